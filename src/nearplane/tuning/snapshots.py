"""Where training stands, kept on disk while it goes on: the same command, given again after a crash, goes on from there.

    OUT.unfinished/journal/
      state.json            what tuning was told, and how many steps are done
      standing-000120.pt    what is trained, the optimizer and the best state so far, behind step 120

The new checkpoint's blocks are written when all steps are done; a run that is stopped then writes them again. How pages get to
disk: `notebook.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from nearplane.formats.container import Container
from nearplane.formats.journal_pages import Notebook
from nearplane.system.progress import duration

log = logging.getLogger("nearplane")


class Snapshots:
    """What `train` is given to remember where it stands.

    Args:
        container: of the tuned checkpoint, just entered.
        told: what tuning is told, see `notebook.told`.
        began: when it began, by `time.perf_counter`.

    Raises:
        RecipeError: a run that was told something else left the folder, and it may not be replaced; names the difference.
        FormatError: what is there cannot be read, and it may not be replaced.
    """

    def __init__(self, container: Container, told: Mapping[str, Any], began: float) -> None:
        self._notebook = Notebook(container, told, began)
        self._standing: dict[str, Any] | None = self._notebook.before(self._understood)
        if self._standing is not None:
            log.info(
                "going on behind step %d of tuning, where a run was stopped that had taken %s: %s",
                self._standing["done"],
                duration(self._notebook.seconds),
                container.folder,
            )

    def _understood(self, state: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self._notebook.load(_page(int(state["done"])))
        return found

    @property
    def seconds(self) -> float:
        """Seconds that tuning has taken, those before it was stopped included."""
        return self._notebook.seconds

    def before(self) -> dict[str, Any] | None:
        """Return where training stood that was stopped; once, as it takes memory."""
        found, self._standing = self._standing, None
        return found

    def passed(self, standing: Callable[[], dict[str, Any]], *, done: bool) -> None:
        """Keep where training stands, unless that would take too much of the time, or of the disk."""
        if self._notebook.wanted(1.0 if done else None):  # what is lost at the end is most
            page = standing()
            self._notebook.write({"done": page["done"]}, {_page(page["done"]): page}, replaced=_page("*"))


def _page(done: int | str) -> str:
    return f"standing-{done:06d}.pt" if isinstance(done, int) else f"standing-{done}.pt"

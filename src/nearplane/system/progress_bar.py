"""The progress bar on a terminal and in a notebook, and which display a verb has. Imports rich only where a bar is shown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

from nearplane.system.progress import silent

BAR_WIDTH = 12  # characters, so that all fits into 80


def display(asked: Any) -> Any:
    """Return the display of a verb: the bar for None, nothing for False, and else what was given."""
    return bar if asked is None else silent if asked is False else asked


def bar(items: Iterable[Any], label: str, total: int) -> Iterator[Any]:
    """Show a bar on the error stream or in a notebook while items pass through; elsewhere log lines show the progress.

    Beside it stands what `Tracked.line` says, anew every tenth of a second; for other items, how many of them are done.
    """
    if not (sys.stderr.isatty() or in_notebook()):
        yield from items
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
    from rich.text import Text

    class Line(ProgressColumn):
        def __init__(self, line: Callable[[], str]) -> None:
            super().__init__()
            self._line = line

        def render(self, task: Any) -> Text:
            return Text(self._line())

    line = getattr(items, "line", None)
    said = (MofNCompleteColumn(), TimeElapsedColumn()) if line is None else (Line(line),)
    with Progress(TextColumn(label), BarColumn(BAR_WIDTH), *said, console=console(), transient=True) as shown:
        yield from shown.track(items, total=total)


@cache
def in_notebook() -> bool:
    """Return whether this process runs the cells of a notebook."""
    if "ipykernel" not in sys.modules:
        return False
    from rich.console import Console

    return Console().is_jupyter


@cache
def console() -> Any:
    """Return the one console of the error stream, which prints lines above a bar that it shows."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False)

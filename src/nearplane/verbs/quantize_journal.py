"""What a solve has behind it, kept on disk while it goes on: the same command, given again after a crash, goes on from there.

    OUT.unfinished/journal/
      state.json          what the run was told, how many blocks are behind it, the record of their layers, the plan, the shards
      plan.pt             what was measured for the plan before the first block
      behind-00007.0.pt   hidden states of both networks behind block 7: some of the batches

A block counts once its shard, these hidden states and then the state are on disk, in this order; until then the block before
counts. What goes on continues to the last bit as the run would have that was stopped. How pages get to disk: `journal_pages.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from nearplane.calibration.activations import Stream
from nearplane.errors import FormatError
from nearplane.formats.container import Container
from nearplane.formats.journal_pages import EXPECTED, Notebook
from nearplane.models.model import Model
from nearplane.planning.ledger import Ledger
from nearplane.planning.plan import Plan
from nearplane.planning.start import Before
from nearplane.record.record import RunRecord
from nearplane.system.matmul_library import repeatable
from nearplane.system.progress import duration

PLAN = "plan.pt"
PAGE = 256 << 20  # bytes of hidden states on a page: so much more is in memory while it is written

log = logging.getLogger(__name__)


class Journal:
    """The journal of one run.

    Args:
        container: that the run writes, just entered.
        told: what the run is told, see `journal_pages.told`.

    Attributes:
        before: what a run that was told the same had done; None: nothing that was kept, or all, see `Container.whole`.

    Raises:
        RecipeError: a run that was told something else left the folder, and it may not be replaced; names the difference.
        FormatError: what is there cannot be read, or a shard is not what was written, and it may not be replaced.
    """

    def __init__(self, container: Container, told: Mapping[str, Any]) -> None:
        self._notebook = Notebook(container, told)
        self._ledger: Ledger | None = None
        self.before = self._notebook.before(self._understood)
        if self.before is not None:
            log.info(
                "going on behind block %d, where a run was stopped that had taken %s: %s",
                self.before.blocks,
                duration(self.before.seconds),
                container.folder,
            )

    def _understood(self, state: Mapping[str, Any]) -> Before:
        record = RunRecord.from_json(state["record"])
        if record.products is not None and not repeatable(record.products):
            raise FormatError(
                f"The run that was stopped multiplied by oneDNN, which this processor or torch cannot do as exactly: go on "
                f"where it began. {EXPECTED}."
            )
        plan = Plan.restored(state["plan"], self._notebook.load(PLAN), record.tokens)
        return Before(blocks=int(state["blocks"]), record=record, plan=plan, seconds=float(state["seconds"]))

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken, those before it was stopped included."""
        return self._notebook.seconds

    @property
    def blocks(self) -> int:
        """How many blocks were walked through before."""
        return 0 if self.before is None else self.before.blocks

    def restore(self, stream: Stream) -> None:
        """Put the hidden states behind these blocks into a stream that stands before the first.

        Raises:
            FormatError: they cannot be read, or are of another shape.
        """
        for number, batches in enumerate(_pages(stream)):
            states = self._notebook.load(page := _behind(self.blocks, number))
            for name, batch in batches:
                now = getattr(stream, name)
                old, new = now[batch], states.get(f"{name}.{batch}")
                if new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
                    raise self._notebook.refused(page)
                now[batch] = new.to(old.device)
        for name in list(stream.calls)[: self.blocks]:
            del stream.calls[name]

    def begin(self, ledger: Ledger, model: Model, record: RunRecord) -> None:
        """Keep what was planned; from now on `passed` keeps what the ledger has.

        Args:
            ledger: of the run; takes over the layers that were solved before.
            model: whose layers they are.
            record: without layers.
        """
        self._ledger, self._record = ledger, record
        if self.before is not None:
            ledger.restore(self.before.record, [name for i in range(self.blocks) for name in model.unquantized(i)])
            return
        if not self._notebook.wanted():
            return
        self._notebook.keep(PLAN, ledger.planned.tensors())
        if self._notebook.room and (ledger.planned.rates or ledger.planned.widths):  # which took forwards to measure
            self._write(0, {})

    def passed(self, blocks: int, stream: Stream | None) -> None:
        """Keep that so many blocks are behind the stream, unless that would take too much of the time, or of the disk."""
        if self._ledger is not None and self._notebook.wanted():
            pages = [] if stream is None else _pages(stream)
            self._write(blocks, {_behind(blocks, i): partial(_on, stream, page) for i, page in enumerate(pages)})

    def _write(self, blocks: int, pages: Mapping[str, Any]) -> None:
        ledger = self._ledger
        assert ledger is not None, "begun"
        record = replace(self._record, layers=tuple(ledger.layers))
        state = {"blocks": blocks, "plan": ledger.planned.state(), "record": record.to_json()}
        self._notebook.write(state, pages, replaced=_behind("*", "*"))


def _pages(stream: Stream) -> list[list[tuple[str, int]]]:
    """Share out the hidden states of both networks, as (attribute of the stream, batch), to pages of about `PAGE` bytes."""
    window = stream.quantized[0].nbytes / stream.sizes[0]
    networks = ["quantized", "original"][: 1 + (stream.original is not None)]
    found: list[list[tuple[str, int]]] = [[]]
    size = 0.0
    for name in networks:
        for batch, windows in enumerate(stream.sizes):
            if size >= PAGE:
                found, size = [*found, []], 0.0
            found[-1].append((name, batch))
            size += window * windows
    return found


def _on(stream: Stream | None, page: list[tuple[str, int]]) -> dict[str, Tensor]:
    """Return the hidden states of a page by name."""
    return {f"{name}.{batch}": getattr(stream, name)[batch] for name, batch in page}


def _behind(blocks: int | str, page: int | str) -> str:
    return f"behind-{blocks:05d}.{page}.pt" if isinstance(blocks, int) else f"behind-{blocks}.{page}.pt"

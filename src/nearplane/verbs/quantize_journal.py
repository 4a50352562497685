"""Journal of a run on disk: if the same command is repeated after a crash, it resumes behind the last finished block.

    OUT.unfinished/journal/
      state.json          run inputs, number of finished blocks, record of their layers, plan, shards
      plan.pt             measurements for the plan from before the first block
      behind-00007.0.pt   hidden states of both networks behind block 7, for some of the batches

A block is finished when its shard, its hidden states and then the state are on disk, in this order. A resumed run writes
the same bytes as one that was never stopped. `journal_pages.py` writes the pages.
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
from nearplane.formats.journal_pages import REMEDY, JournalPages
from nearplane.models.model import Model
from nearplane.planning.ledger import Ledger
from nearplane.planning.plan import Plan
from nearplane.planning.start import StoppedRun
from nearplane.record.record import RunRecord
from nearplane.system.matmul_library import repeatable
from nearplane.system.progress import duration

PLAN = "plan.pt"
PAGE = 256 << 20  # bytes of hidden states on a page; writing it needs so much additional memory

log = logging.getLogger(__name__)


class Journal:
    """The journal of one run.

    Args:
        container: Container that the run writes, just entered.
        told: Run inputs, see `journal_pages.run_inputs`.

    Attributes:
        before: Progress of a stopped run with the same inputs; None if there is none, or if its checkpoint is complete.

    Raises:
        RecipeError: A run with other inputs left the folder, which may not be replaced; the message names the difference.
        FormatError: The journal cannot be read or a shard has changed, and the folder may not be replaced.
    """

    def __init__(self, container: Container, told: Mapping[str, Any]) -> None:
        self._pages = JournalPages(container, told)
        self._ledger: Ledger | None = None
        self.before = self._pages.progress(self._understood)
        if self.before is not None:
            log.info(
                "resuming after block %d a run that was stopped after %s: %s",
                self.before.blocks,
                duration(self.before.seconds),
                container.folder,
            )

    def _understood(self, state: Mapping[str, Any]) -> StoppedRun:
        record = RunRecord.from_json(state["record"])
        if record.products is not None and not repeatable(record.products):
            raise FormatError(
                f"The stopped run multiplied with oneDNN, which is less exact with this processor or this torch. Resume it on its "
                f"first machine. {REMEDY}."
            )
        plan = Plan.restored(state["plan"], self._pages.load(PLAN), record.tokens)
        return StoppedRun(blocks=int(state["blocks"]), record=record, plan=plan, seconds=float(state["seconds"]))

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken, including those before it was stopped."""
        return self._pages.seconds

    @property
    def blocks(self) -> int:
        """Number of blocks that were finished before the run was stopped."""
        return 0 if self.before is None else self.before.blocks

    def restore(self, stream: Stream) -> None:
        """Put the hidden states behind the finished blocks into a stream at the first block.

        Raises:
            FormatError: The hidden states cannot be read, or have another shape.
        """
        for number, batches in enumerate(_pages(stream)):
            states = self._pages.load(page_name := _behind(self.blocks, number))
            for name, batch in batches:
                current = getattr(stream, name)
                old, new = current[batch], states.get(f"{name}.{batch}")
                if new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
                    raise self._pages.changed_page(page_name)
                current[batch] = new.to(old.device)
        for name in list(stream.calls)[: self.blocks]:
            del stream.calls[name]

    def begin(self, ledger: Ledger, model: Model, record: RunRecord) -> None:
        """Write the plan to the journal; from now on `passed` writes the layers of the ledger.

        Args:
            ledger: Ledger of the run; it receives the layers that were solved before.
            model: Model that is quantized.
            record: Run record without layers.
        """
        self._ledger, self._record = ledger, record
        if self.before is not None:
            ledger.restore(self.before.record, [name for i in range(self.blocks) for name in model.unquantized(i)])
            return
        if not self._pages.due():
            return
        self._pages.write_first(PLAN, ledger.planned.tensors())
        if self._pages.room and (ledger.planned.rates or ledger.planned.widths):  # measured in forward passes
            self._write(0, {})

    def passed(self, blocks: int, stream: Stream | None) -> None:
        """Write to the journal that `blocks` blocks are finished, unless it would take too much time or disk space."""
        if self._ledger is not None and self._pages.due():
            pages = [] if stream is None else _pages(stream)
            self._write(blocks, {_behind(blocks, i): partial(_on, stream, page) for i, page in enumerate(pages)})

    def _write(self, blocks: int, pages: Mapping[str, Any]) -> None:
        ledger = self._ledger
        assert ledger is not None, "begin() comes first"
        record = replace(self._record, layers=tuple(ledger.layers))
        state = {"blocks": blocks, "plan": ledger.planned.state(), "record": record.to_json()}
        self._pages.write(state, pages, replaced=_behind("*", "*"))


def _pages(stream: Stream) -> list[list[tuple[str, int]]]:
    """Split the hidden states of both networks, as (attribute of the stream, batch), into pages of about `PAGE` bytes."""
    window = stream.quantized[0].nbytes / stream.sizes[0]
    networks = ["quantized", "original"][: 1 + (stream.original is not None)]
    pages: list[list[tuple[str, int]]] = [[]]
    size = 0.0
    for name in networks:
        for batch, windows in enumerate(stream.sizes):
            if size >= PAGE:
                pages, size = [*pages, []], 0.0
            pages[-1].append((name, batch))
            size += window * windows
    return pages


def _on(stream: Stream | None, page: list[tuple[str, int]]) -> dict[str, Tensor]:
    """Return the hidden states of a page by name."""
    return {f"{name}.{batch}": getattr(stream, name)[batch].cpu() for name, batch in page}


def _behind(blocks: int | str, page: int | str) -> str:
    return f"behind-{blocks:05d}.{page}.pt" if isinstance(blocks, int) else f"behind-{blocks}.{page}.pt"

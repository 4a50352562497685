"""Journal of a run on disk: if the same command is repeated after a crash, it resumes behind the last finished block.

    OUT.unfinished/journal/
      state.json          run inputs, number of finished blocks, record of their layers, plan, parts
      plan.pt             measurements for the plan from before the first block
      behind-00007.0.pt   hidden states of both networks behind block 7, for some of the batches

A block is finished when its part of the weights, its hidden states and then the state are on disk, in this order. When
all layers are written, the state holds their record, and a run that is stopped later only completes the files. A resumed
run writes the same bytes as one that was never stopped. `journal_pages.py` writes the pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nearplane.calibration.activations import Stream
from nearplane.calibration.recorder import tensors_within
from nearplane.calibration.shared_states import SharedStates
from nearplane.calibration.walk import Stage
from nearplane.errors import FormatError
from nearplane.formats.container import Container
from nearplane.formats.journal_pages import REMEDY, JournalPages, RunInputs
from nearplane.planning.plan import restored, state_of, tensors_of
from nearplane.recipe.layer_plan import Plan
from nearplane.record.record import RunRecord
from nearplane.record.record_file import parsed_record
from nearplane.system.matmul_library import repeatable
from nearplane.system.progress import duration
from nearplane.system.sizes import counted

PLAN = "plan.pt"
PAGE = 256 << 20  # bytes of hidden states on a page; writing it needs so much additional memory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedRun:
    """State of a stopped run that is resumed.

    Args:
        blocks: Number of finished blocks.
        record: The run record with their layers and with the entries from before the first block.
        plan: The plan with what was measured.
        seconds: Duration of the stopped run.
    """

    blocks: int
    record: RunRecord
    plan: Plan
    seconds: float


class Journal:
    """The journal of one run.

    Args:
        container: Container that the run writes, just entered.
        inputs: All that the output depends on.
        settled: The plan before anything is measured.

    Attributes:
        before: Progress of a stopped run with the same inputs; None if there is none, or if it had written all layers.

    Raises:
        RecipeError: A run with other inputs left the folder, which may not be replaced; the message names the difference.
        FormatError: The journal cannot be read or a part has changed, and the folder may not be replaced.
    """

    def __init__(self, container: Container, inputs: RunInputs, settled: Plan) -> None:
        self._pages, self._settled = JournalPages(container, inputs), settled
        self.before = self._pages.progress(self._understood)
        if self.before is not None:
            log.info(
                "resuming: %s kept of a run that was stopped after %s: %s",
                counted(self.before.blocks, "block"),
                duration(self.before.seconds),
                container.folder,
            )

    def _understood(self, state: Mapping[str, Any]) -> StoppedRun:
        record = parsed_record(state["record"])
        if record.products is not None and not repeatable(record.products):
            raise FormatError(
                f"The stopped run multiplied with oneDNN, which is less exact with this processor or this torch. Resume it on its "
                f"first machine. {REMEDY}."
            )
        plan = restored(self._settled, state["plan"], self._pages.load(PLAN), record.tokens)
        return StoppedRun(blocks=int(state["blocks"]), record=record, plan=plan, seconds=float(state["seconds"]))

    def completed(self) -> RunRecord | None:
        """Return the record of a stopped run that had written all layers, after completing its files; None for others."""
        return self._pages.completed(self._timed)

    def seal(self, record: RunRecord, others: int) -> RunRecord:
        """Complete the checkpoint after its last layer; see `JournalPages.seal`.

        Args:
            record: The record of the run.
            others: Peak memory of the other ranks together.
        """
        return self._pages.seal(record, partial(self._timed, others=others))

    def _timed(self, record: RunRecord, others: int = 0) -> RunRecord:
        """Return the record with the seconds of the run, also of those before it was stopped, and the memory of all ranks."""
        return replace(record, seconds=self._pages.seconds, peak_memory=record.peak_memory + others)

    @property
    def blocks(self) -> int:
        """Number of blocks that were finished before the run was stopped."""
        return 0 if self.before is None else self.before.blocks

    def restore(self, stream: Stream) -> None:
        """Put the hidden states behind the finished blocks into a stream at the first block.

        Raises:
            FormatError: The hidden states cannot be read, or have another shape.
        """
        found = set[str]()
        for page in self._pages.names(_behind(self.blocks, "*")):
            taken = _Taken(self._pages.load(page))
            stream.dealt.ranks.start(taken)
            try:
                taken(stream)
            except FormatError as error:
                raise self._pages.changed_page(page) from error
            found |= {name for name in taken.states if name.count(".") == 1}  # others are shared states of these
        if len(found) != stream.dealt.batches * len(_networks(stream)):
            raise self._pages.changed_page(_behind(self.blocks, 0))

    def begin(self, plan: Plan, record: RunRecord) -> None:
        """Write the plan of a new run to the journal; from now on `passed` may be called.

        Args:
            plan: What is decided of all layers.
            record: Run record without layers.
        """
        self._plan = plan
        if self.before is not None or not self._pages.due():
            return
        self._pages.write_first(PLAN, tensors_of(plan))
        if self._pages.room and (plan.recipe.scheme.entropy_coded or plan.recipe.allocate == "slope"):
            self._write(0, record, {}, 0)  # what was measured, in forward passes

    def passed(self, blocks: int, stream: Stream | None, record: RunRecord) -> None:
        """Write to the journal that `blocks` blocks are finished, unless it would take too much time or disk space.

        Args:
            blocks: Number of finished blocks.
            stream: Hidden states behind them; None: nothing is calibrated.
            record: The run record with their layers.

        Raises:
            ModelError: A file that the run reads was changed.
            FormatError: A file that it has written was changed.
        """
        self._pages.check_sources()
        if self._pages.due():
            pages = {} if stream is None else _pages(stream, blocks)
            self._write(blocks, record, pages, 0 if stream is None else _bytes(stream))

    def _write(self, blocks: int, record: RunRecord, pages: Mapping[str, Any], size: int) -> None:
        state = {"blocks": blocks, "plan": state_of(self._plan), "record": record.to_json()}
        self._pages.write(state, pages, replaced="behind-*.pt", size=size)


@dataclass(frozen=True, slots=True)
class _Taken:
    """Hidden states by network and number of the batch, from a page; each rank takes those of its own batches."""

    states: dict[str, Tensor]

    def __call__(self, stream: Stream) -> None:
        for name in _networks(stream):
            states = getattr(stream, name)
            for batch, number in enumerate(stream.dealt.numbers):
                if (new := self.states.get(f"{name}.{number}")) is not None:
                    old = states[batch]
                    if (new.shape, new.dtype) != (old.shape, old.dtype):
                        raise FormatError(
                            f"The journal has hidden states of shape {tuple(new.shape)}, not {tuple(old.shape)}. {REMEDY}."
                        )
                    states[batch] = new.to(old.device)
                    stream.shared[name == "quantized", batch] = self._shared(f"{name}.{number}.", old.device)

    def _shared(self, start: str, device: torch.device) -> SharedStates:
        """Return what blocks of a network left for later ones, on one batch."""
        parts: dict[str, dict[int, Tensor]] = {}
        for name, each in self.states.items():
            if name.startswith(start):
                key, _, place = name.removeprefix(start).rpartition(".")
                parts.setdefault(key, {})[int(place)] = each.to(device)
        return SharedStates({key: tuple(each[place] for place in sorted(each)) for key, each in parts.items()})


def _count(stage: Stage) -> int:
    """Return the number of pages with the hidden states of this rank, at the end of a block."""
    assert stage.stream is not None, "rank 0 asks for pages only if there are streams"
    return len(_split(stage.stream))


@dataclass(frozen=True, slots=True)
class _Asked:
    """The page of this number of another rank, at the end of a block."""

    number: int

    def __call__(self, stage: Stage) -> dict[str, Tensor]:
        assert stage.stream is not None, "rank 0 asks for pages only if there are streams"
        return _page(stage.stream, self.number)


def _page(stream: Stream, number: int) -> dict[str, Tensor]:
    """Return a page with hidden states of this rank, by network and number of the batch."""
    page: dict[str, Tensor] = {}
    for name, batch in _split(stream)[number]:
        place = f"{name}.{stream.dealt.numbers[batch]}"
        page[place] = getattr(stream, name)[batch].cpu()
        for key, parts in stream.shared.get((name == "quantized", batch), {}).items():
            page |= {f"{place}.{key}.{number}": part.cpu() for number, part in enumerate(parts)}
    return page


def _networks(stream: Stream) -> list[str]:
    return ["quantized", "original"][: 1 + (stream.original is not None)]


def _split(stream: Stream) -> list[list[tuple[str, int]]]:
    """Split the hidden states of this rank, as (attribute of the stream, batch), into pages of about `PAGE` bytes."""
    window = stream.quantized[0].nbytes / stream.sizes[0]
    pages: list[list[tuple[str, int]]] = [[]]
    size = 0.0
    for name in _networks(stream):
        for batch, windows in enumerate(stream.sizes):
            if batch == 0 and stream.dealt.repeated:
                continue
            if size >= PAGE:
                pages, size = [*pages, []], 0.0
            pages[-1].append((name, batch))
            size += window * windows
    return pages


def _pages(stream: Stream, blocks: int) -> dict[str, Callable[[], dict[str, Tensor]]]:
    """Return by name the pages with the hidden states of all ranks behind so many blocks."""
    ranks = stream.dealt.ranks
    pages: list[Callable[[], dict[str, Tensor]]] = [partial(_page, stream, i) for i in range(len(_split(stream)))]
    for rank in ranks.others:
        pages += [partial(ranks.ask, rank, _Asked(i)) for i in range(ranks.ask(rank, _count))]
    return {_behind(blocks, i): page for i, page in enumerate(pages)}


def _bytes(stream: Stream) -> int:
    """Return the bytes of the hidden states of all ranks, and of the states that blocks share."""
    shared = (each.nbytes for states in stream.shared.values() for each in tensors_within(list(states.values())))
    held: int = sum(each.nbytes for name in _networks(stream) for each in getattr(stream, name)) + sum(shared)
    return held * (stream.dealt.windows + stream.dealt.extra_windows) // sum(stream.sizes)


def _behind(blocks: int, page: int | str) -> str:
    return f"behind-{blocks:05d}.{page}.pt"

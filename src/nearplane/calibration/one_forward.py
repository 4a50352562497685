"""One forward per stream and block: every batch pauses where the input of a stage is there, and goes on when the stage is solved.

All batches of both streams run to the first stage (q/k/v), each in a greenlet of its own; what they show is summed, the layers are
solved and written, and all go on to the next stage. When a forward ends, its output is what enters the next block. That is bit for
bit what a pass per stage gives (`stages.py`), at 2 forwards of a block instead of 4.33, and costs the memory of what is paused.
Where a block cannot be run so, or only up to some stage, its other stages are passes as there. Knows modules and activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableSequence
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from nearplane.calibration.activations import Stream, finite
from nearplane.calibration.stages import FirstLook, first_look, seen
from nearplane.calibration.watch import Additions, InParts, Results, RoutedRows, Rows, Seen, rows_of, total, wide
from nearplane.errors import CalibrationError
from nearplane.models.experts import by_expert
from nearplane.models.layers import Layer
from nearplane.models.model import Block
from nearplane.recipe.sizes import size_text
from nearplane.system.device import Device
from nearplane.system.memory import release

SHARE = 2  # one part in so many of the free memory may hold what is paused: solving takes memory too
BATCH_TOKENS, BATCH_WINDOWS = 2048, 8  # of a batch at most: enough rows for products at full speed


def batch_of(seqlen: int) -> int:
    """Return how many windows of so many tokens pass through a block at a time where memory is not limited."""
    return max(1, min(BATCH_WINDOWS, BATCH_TOKENS // seqlen))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySetting:
    """Where a walk computes, and what trades time for memory. Only `batch` changes the bytes of a checkpoint: the record has it.

    Args:
        batch: windows that pass through a block at a time; sums of floating-point numbers depend on it.
        room: bytes that paused activations may take; stages that take more are passes of their own.
        device: where to compute.
        disk: whether hidden states between blocks lie in a file.
        folder: for that file; None: that of the system for temporary files.
        experts: how many experts of a block are solved together at most; so many have their inputs in memory.
    """

    batch: int
    room: int
    device: Device
    disk: bool = False
    folder: Path | None = None
    experts: int = 1

    @classmethod
    def usual(cls, seqlen: int, device: Device, batch: int | None = None) -> MemorySetting:
        """Return the fastest setting, before a run's first block; `batch` windows at a time, by default those of `batch_of`."""
        return cls(batch=batch or batch_of(seqlen), room=(device.free() or 0) // SHARE, device=device)


def pauses(look: FirstLook, stream: Stream, room: int) -> tuple[int, str]:
    """Decide at how many stages of a block, from the first on, forwards pause; the other ones are passes of their own.

    Args:
        look: how the first batch ran through the block.
        stream: that is to pass through it.
        room: bytes that paused activations may take.

    Returns:
        That many, and why not at all; empty if they do.
    """
    correct = stream.original is not None
    if reason := never_pauses(look, correct=correct):
        return 0, reason
    batches = sum(stream.sizes) / stream.sizes[0]
    held = [look.entered[group[0].name][0].alive for group in look.groups]
    for stage, (group, now) in enumerate(zip(look.groups, held, strict=True)):
        last = stage == len(held) - 1 and not group[0].routed  # what experts multiply is kept
        state = stream.quantized[0].nbytes
        before = held[stage - 1] if stage else state
        needed = int(batches * waiting(now, before, state, 1 + correct, last=last))
        if needed > room:
            where = f"paused at {group[0].name}, forwards would hold {size_text(needed)}"
            return stage, f"{where} of the {size_text(room)} that they may"
    return len(held), ""


def never_pauses(look: FirstLook, *, correct: bool) -> str:
    """Return why forwards cannot pause in a block, whatever memory there is; empty if they can.

    Args:
        look: how a batch ran through the block.
        correct: whether the original network runs beside.
    """
    for layer in (layer for group in look.groups for layer in group):
        times = look.entered[layer.name]
        if len(times) > 1:
            return f"{layer.name} runs {len(times)} times"
        if times[0].rows % 1:
            return f"{layer.name} sees some of the tokens only"
    if look.unwatched and any(layer.adds for group in look.groups for layer in group):
        return f"{look.unwatched} runs the experts that its tokens reach, by itself"
    for group in look.groups if correct else ():
        computed = look.entered[group[0].name][0].computed
        for layer in group:
            numbers = look.operands.get(layer.name, ())
            if layer.adds and not all(number is not None and number < computed for number in numbers):
                return f"what the output of {layer.name} is added to is not known before it runs"
    return ""


def waiting(alive: int, before: int, state: int, streams: int, *, last: bool) -> int:
    """Return the most bytes of activations of a window while forwards go on to wait at a stage.

    Args:
        alive: of a forward that waits there, and `before` at the stage before.
        state: of the hidden states that come out of the block.
        streams: networks that pass.
        last: whether nothing waits for the original network behind this stage: it goes on to the end of the block.
    """
    arrived = alive + state * (streams - 1) if last else streams * alive
    return max(streams * before, arrived)


class Passage:
    """The way of the streams through a block, stage by stage; to be closed: `for groups, rows in passage: ...`

    Yields groups of layers that share an input, one after the other (all at once if not `sequential`), with an iterator over
    what each batch shows of these inputs, as the block is then. Take all of it, and write the layers, before the next. Behind the
    last group the streams have passed the block.

    Args:
        block: in memory, with its original if the stream has two streams.
        stream: standing before the block.
        sequential: whether each stage is to see the layers of those before it as they were written.
        room: bytes that paused activations may take.

    Attributes:
        repeated: why stages are passes of their own; empty if every forward of the block is run once.
    """

    def __init__(self, block: Block, stream: Stream, *, sequential: bool, room: int) -> None:
        self.block, self.stream = block, stream
        self._look, self._room = first_look(block, stream), room
        self._sequential = sequential
        self._stages, self.repeated = pauses(self._look, stream, room) if sequential else (0, "")
        self._whole = 0 < self._stages == len(self._look.groups)
        self._adding = {layer.name for group in self._look.groups for layer in group if layer.adds}
        self._original: list[_Forward] = []
        self._quantized: list[_Forward] = []
        self._ends = ExitStack()  # removes hooks and ends forwards, wherever they are
        self._running: _Forward | None = None

    def __iter__(self) -> Iterator[tuple[tuple[tuple[Layer, ...], ...], Iterator[list[Rows | RoutedRows]] | InParts]]:
        groups = self._look.groups
        if not self._sequential:
            yield groups, seen(self.block, groups, self.stream, last=True)
            self.stream.advance(self.block)
            return
        if self._stages and self.stream.original is not None:
            self._original = self._forwards(self.block.original, self.stream.original)
        if self._stages:
            self._quantized = self._forwards(self.block.quantized, self.stream.quantized)
        for stage, group in enumerate(groups[: self._stages]):
            yield (group,), self._shown(stage)
        if self._whole:
            for batch, forward in enumerate(self._quantized):
                self.stream.quantized[batch] = self._output(forward)
            self.close()
            self.stream.passed(self.block)
            return
        self.close()
        for group in groups[self._stages :]:
            parts, run = self._parts(group), partial(seen, self.block, stream=self.stream)
            if len(parts) > 1:
                yield (group,), InParts(parts=parts, run=run, ends=group is groups[-1])
            else:
                yield (group,), run([group], last=group is groups[-1])
        self.stream.advance(self.block)

    def _parts(self, group: tuple[Layer, ...]) -> list[tuple[Layer, ...]]:
        """Split experts so that what those of each part multiply may be kept; other layers are one part."""
        batches = sum(self.stream.sizes) / self.stream.sizes[0]
        networks = 1 if self.stream.original is None else 2
        sizes = self._look.entered[group[0].name][0].routed or (0, 0)
        whole, apart = (int(size * batches) * networks for size in sizes)
        if whole <= self._room or not group[0].routed:
            return [group]
        experts = list(by_expert(group).values())
        share = -(-len(experts) // min(len(experts), -(-apart // max(1, self._room))))
        chunks = (experts[first : first + share] for first in range(0, len(experts), share))
        return [tuple(chain.from_iterable(chunk)) for chunk in chunks]

    def _forwards(self, module: nn.Module | None, states: MutableSequence[Tensor]) -> list[_Forward]:
        """Make a forward of every batch, not yet started, and the hooks in which they pause."""
        firsts = {group[0].name: stage for stage, group in enumerate(self._look.groups[: self._stages])}
        for layer in self.block.layers_of(module):
            if layer.name in firsts:
                self._ends.enter_context(layer.before(partial(_pause, firsts[layer.name])))
            if layer.name in self._adding:
                self._ends.enter_context(layer.after(self._watch))
        own = [self.stream.own(self.block, batch) for batch in range(len(states))]
        forwards = [_Forward(partial(self._run, module, batch, states), x) for batch, x in enumerate(own)]
        for forward in forwards:
            self._ends.callback(forward.end)
        return forwards

    def _run(self, module: nn.Module | None, batch: int, states: MutableSequence[Tensor]) -> Tensor:
        """Run a copy of the block on a batch: what a greenlet does."""
        hidden = [states[batch]]
        if self._whole:
            states[batch] = hidden[0].new_empty(0)  # not needed again
        return self.stream.forward(self.block, module, batch, hidden.pop())

    def _watch(self, layer: Layer, output: Tensor) -> None:
        assert self._running is not None, "only forwards of this passage run while it has hooks"
        self._running.additions.watch(layer, output)

    def _go_on(self, forward: _Forward) -> Paused | Tensor:
        """Let a forward run to its next pause, or to its end: then what it returns."""
        self._running = forward
        with torch.no_grad(), forward.additions:  # they belong to the thread, not to the greenlet
            said: Paused | Tensor = forward.greenlet.switch()
        self._running = None
        if forward.greenlet.dead:
            forward.additions.finish()
        ran = {name: numbers for name, numbers in forward.additions.found.items() if name in self._adding}
        if any(numbers != self._look.operands[name] for name, numbers in ran.items()):
            raise self._astray()
        return said

    def _seen(self, forward: _Forward, stage: int) -> Seen:
        """Let a forward run to a stage; return what it shows there."""
        group, said = self._look.groups[stage], self._go_on(forward)
        if not isinstance(said, Paused) or said.stage != stage:
            raise self._astray()
        shown = Seen(inputs=group[0].shape[1])
        shown.add(group, said.x, waits=True)
        for layer in (layer for layer in group if layer.adds and self._original):
            numbers = (number for number in self._look.operands[layer.name] if number is not None)
            operands = [forward.results.get(number) for number in numbers]
            known = [wide(operand) for operand in operands if operand is not None]
            if len(known) < len(self._look.operands[layer.name]):
                raise self._astray()
            shown.added[layer.name] = total(known).reshape(-1, layer.shape[0])
        return shown

    @torch.no_grad()
    def _shown(self, stage: int) -> Iterator[list[Rows | RoutedRows]]:
        """Yield what each batch shows at a stage; behind the last the original stream goes on to the next block."""
        name, states = self._look.groups[stage][0].name, self.stream.original
        for batch, forward in enumerate(self._quantized):
            original = None
            if states is not None:
                original = self._seen(self._original[batch], stage)
                if self._whole and stage == self._stages - 1:
                    states[batch] = self._output(self._original[batch])
            yield [rows_of(name, self._seen(forward, stage), original)]
            release()  # what the forwards between two stages took and freed lies among what waits

    def _output(self, forward: _Forward) -> Tensor:
        """Let a forward run to its end; return the hidden states that come out."""
        said = self._go_on(forward)
        if isinstance(said, Paused) or forward.additions.found.keys() != self._adding:
            raise self._astray()
        return finite(said, self.block)

    def close(self) -> None:
        """End all forwards, wherever they are, and let go of what they hold."""
        self._ends.close()
        self._original, self._quantized = [], []

    def _astray(self) -> CalibrationError:
        return CalibrationError(
            f"{self.block.name} ran differently on two batches of tokens: other layers, or other additions. nearplane needs "
            f"blocks that compute the same for all; calibrate with true_sequential=False, which needs less."
        )


class Paused(NamedTuple):
    """Where a forward waits: before the first layer of a stage, which is given `x`."""

    stage: int
    x: Any


def _pause(stage: int, _: Layer, x: Any) -> None:
    """Wait until the forward is to go on; the thread goes on where it was switched to this forward."""
    parent = getcurrent().parent
    assert parent is not None, "only greenlets pause"
    parent.switch(Paused(stage=stage, x=x))


class _Forward:
    """One batch on its way through one copy of a block."""

    def __init__(self, run: Callable[[], Tensor], hidden: Tensor) -> None:
        self.results = Results(hidden)
        self.additions = Additions(results=self.results)
        self.greenlet = greenlet(run)
        self.greenlet.gr_context = copy_context()

    def end(self) -> None:
        if not self.greenlet.dead:
            self.greenlet.throw()

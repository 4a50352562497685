"""One forward pass per stream and block: every batch pauses at each stage until the layers of that stage are solved.

All batches of both streams run to the first stage (q/k/v), each in its own greenlet. Their rows are summed, the layers
are solved and written, and all batches continue to the next stage. The results equal those of one pass per stage
(`separate_passes.py`) to the bit, with 2 forward passes of a block instead of 4.33, at the cost of memory for the paused
activations. Stages at which a block cannot pause are separate passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableSequence
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from nearplane.calibration.activations import Stream
from nearplane.calibration.expert_rows import InParts, RoutedRows
from nearplane.calibration.rounded_stream import RoundedStream
from nearplane.calibration.rows import Additions, Results, Rows, Seen, total, wide
from nearplane.calibration.separate_passes import rows_by_batch
from nearplane.calibration.stages import FirstLook, first_look, rows_of
from nearplane.calibration.states_on_disk import Keep, StatesOnDisk
from nearplane.calibration.states_on_host import StatesOnHost
from nearplane.errors import CalibrationError
from nearplane.models.experts import Routed, by_expert
from nearplane.models.layers import Layer
from nearplane.models.model import Block
from nearplane.system.device import Device
from nearplane.system.memory import release
from nearplane.system.sizes import size_text

PAUSED_DIVISOR = 2  # paused activations may fill half of the free memory: solving needs memory too
BATCH_TOKENS, BATCH_WINDOWS = 2048, 8  # largest batch by default: enough rows for matrix products at full speed


def default_batch(seqlen: int) -> int:
    """Return the default number of windows of `seqlen` tokens in a batch."""
    return max(1, min(BATCH_WINDOWS, BATCH_TOKENS // seqlen))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySetting:
    """Device of a walk, and settings that trade time for memory. Only `batch` changes the bytes of the checkpoint.

    Args:
        batch: Windows per forward pass; floating-point sums depend on it.
        room: Bytes that paused activations may take; stages that need more are separate passes.
        device: The device of the computation.
        states: Where hidden states between blocks lie: on the device, in memory of its host, or in a file.
        folder: Folder of that file; None: the system's folder for temporary files.
        experts: Most experts of a block that are solved together; their inputs are in memory at the same time.
    """

    batch: int
    room: int
    device: Device
    states: Literal["device", "host", "disk"] = "device"
    folder: Path | None = None
    experts: int = 1

    @property
    def keep(self) -> Keep:
        """Function that makes a list of hidden states."""
        if self.states == "disk":
            return partial(StatesOnDisk, self.folder)
        return list if self.states == "device" else StatesOnHost

    @classmethod
    def usual(cls, seqlen: int, device: Device, batch: int | None = None) -> MemorySetting:
        """Return the fastest setting, before the first block of a run; `batch` is by default `default_batch`."""
        return cls(batch=batch or default_batch(seqlen), room=(device.free() or 0) // PAUSED_DIVISOR, device=device)


def paused_stages(look: FirstLook, stream: Stream, room: int) -> tuple[int, str]:
    """Return the number of stages at which forward passes of a block pause; later stages are separate passes.

    Args:
        look: Observations of the first batch in the block.
        stream: The stream before the block.
        room: Bytes that paused activations may take.

    Returns:
        The number of stages, from the first on, and the reason why it is not all; "" if it is all.
    """
    correct = stream.original is not None
    if reason := never_pauses(look, correct=correct):
        return 0, reason
    batches = stream.dealt.most / stream.sizes[0]
    held = [look.entered[group[0].name][0].needed for group in look.groups]
    for stage, (group, here) in enumerate(zip(look.groups, held, strict=True)):
        last = stage == len(held) - 1 and not group[0].routed  # rows of experts are kept
        state = stream.quantized[0].nbytes
        before = held[stage - 1] if stage else state
        needed = int(batches * paused_bytes(here, before, state, 1 + correct, last=last))
        if needed > room:
            where = f"forward passes paused at {group[0].name} would need {size_text(needed)}"
            return stage, f"{where}, more than the {size_text(room)} that paused passes may use"
    return len(held), ""


def never_pauses(look: FirstLook, *, correct: bool) -> str:
    """Return the reason why forward passes cannot pause in a block, whatever memory there is; "" if they can.

    Args:
        look: Observations of one batch in the block.
        correct: Whether the original network runs as well.
    """
    for layer in (layer for group in look.groups for layer in group):
        runs = look.entered[layer.name]
        if len(runs) > 1:
            return f"{layer.name} runs {len(runs)} times"
        if runs[0].rows % 1:
            return f"{layer.name} receives only some of the tokens"
    if look.unwatched and any(layer.adds for group in look.groups for layer in group):
        return f"{look.unwatched} runs experts inside one module, depending on the tokens"
    for group in look.groups if correct else ():
        computed = look.entered[group[0].name][0].computed
        for layer in group:
            numbers = look.operands.get(layer.name, ())
            if layer.adds and not all(number is not None and number < computed for number in numbers):
                return f"the output of {layer.name} is added to a tensor that is computed later"
    return ""


def paused_bytes(held: int, before: int, state: int, streams: int, *, last: bool) -> int:
    """Return the peak bytes of one window's activations while forward passes run from one stage to the next.

    Args:
        held: Bytes held by a forward pass that is paused at the next stage.
        before: Bytes held by a forward pass that is paused at the stage before.
        state: Bytes of the hidden states that leave the block.
        streams: Number of networks that run.
        last: Whether this is the last pause of the original network, which then runs to the end of the block.
    """
    arrived = held + state * (streams - 1) if last else streams * held
    return max(streams * before, arrived)


class BlockForward:
    """Forward passes of both streams through a block, stage by stage: `for groups, rows in passage: ...`

    Yields the groups of layers that share an input (one at a time; all at once if not `sequential`), each with an
    iterator over the rows of this input, batch by batch. The caller consumes the iterator and writes the layers before
    the next group. After the last group, the streams have passed the block. Must be closed.

    Args:
        block: The block in memory, with its original if there are two streams.
        stream: The streams before the block.
        sequential: Whether the layers of each stage see those of earlier stages as they were written.
        room: Bytes that paused activations may take.
        onward: Whether something runs on the block's outputs; else the last layers' products are left out.

    Attributes:
        repeated: Reason why some stages are separate passes; "" if every forward pass of the block runs once.
    """

    def __init__(self, block: Block, stream: Stream, *, sequential: bool, room: int, onward: bool = True) -> None:
        self.block, self.stream, self._onward = block, stream, onward
        self._look, self._room = first_look(block, stream), room
        self._sequential = sequential
        self._stages, self.repeated = paused_stages(self._look, stream, room) if sequential else (0, "")
        self._whole = 0 < self._stages == len(self._look.groups)
        self._adding = {layer.name for group in self._look.groups for layer in group if layer.adds}
        self._original: list[_Forward] = []
        self._quantized: list[_Forward] = []
        self._ends = ExitStack()  # removes hooks and stops forward passes
        self._running: _Forward | None = None
        self._nothing = stream.quantized[0].new_empty(0)  # made here, as it would be a result of a forward pass there

    def __iter__(self) -> Iterator[tuple[tuple[tuple[Layer, ...], ...], Iterator[list[Rows | RoutedRows]] | InParts]]:
        groups = self._look.groups
        if not self._sequential:
            yield groups, rows_by_batch(self.block, groups, self.stream, last=True)
            self.stream.advance(self.block)
            return
        if self._stages and self.stream.original is not None:
            self._original = self._forwards(self.block.original, self.stream.original)
        if self._stages:
            self._quantized = self._forwards(self.block.quantized, self.stream.quantized)
        for stage, group in enumerate(groups[: self._stages]):
            yield (group,), self._shown(stage)
        if self._whole:
            for batch, forward in enumerate(self._quantized if self._onward else ()):
                self.stream.quantized[batch] = self._output(forward)
            self.close()
            self.stream.passed(self.block)
            return
        self.close()
        for group in groups[self._stages :]:
            parts, run = self._parts(group), partial(rows_by_batch, self.block, stream=self.stream)
            if len(parts) > 1:
                yield (group,), InParts(parts=parts, run=run, ends=group is groups[-1])
            else:
                yield (group,), run([group], last=group is groups[-1])
        self.stream.advance(self.block)

    def _parts(self, group: tuple[Layer, ...]) -> list[tuple[Layer, ...]]:
        """Split experts so that the rows of each part fit into memory; other layers are one part."""
        batches = self.stream.dealt.most / self.stream.sizes[0]
        networks = 1 if self.stream.original is None else 2
        sizes = self._look.entered[group[0].name][0].routed or (0, 0)
        shared_bytes, pair_bytes = (int(size * batches) * networks for size in sizes)
        if shared_bytes <= self._room or not group[0].routed:
            return [group]
        experts = list(by_expert(group).values())
        size = -(-len(experts) // min(len(experts), -(-pair_bytes // max(1, self._room))))
        chunks = (experts[first : first + size] for first in range(0, len(experts), size))
        return [tuple(chain.from_iterable(chunk)) for chunk in chunks]

    def _forwards(self, module: nn.Module | None, states: MutableSequence[Tensor]) -> list[_Forward]:
        """Make a forward pass for every batch, not yet started, and the hooks in which they pause."""
        stage_of = {group[0].name: stage for stage, group in enumerate(self._look.groups[: self._stages])}
        for layer in self.block.layers_of(module):
            if layer.name in stage_of:
                self._ends.enter_context(layer.before(partial(_pause, stage_of[layer.name])))
            if layer.name in self._adding:
                self._ends.enter_context(layer.after(self._watch))
        forwards = [
            _Forward(partial(self._run, module, batch, states), self.stream.block_input(self.block, batch))
            for batch in range(len(states))
        ]
        for forward in forwards:
            self._ends.callback(forward.end)
        return forwards

    def _run(self, module: nn.Module | None, batch: int, states: MutableSequence[Tensor]) -> Tensor:
        """Run a copy of the block on a batch; the function of a greenlet."""
        hidden = [states[batch]]
        if self._whole:
            states[batch] = self._nothing  # its memory is free once the block has used it
        return self.stream.forward(self.block, module, batch, hidden.pop())

    def _watch(self, layer: Layer, output: Tensor) -> None:
        assert self._running is not None, "only forwards of this passage run while it has hooks"
        self._running.additions.watch(layer, output)

    def _continue(self, forward: _Forward) -> Paused | Tensor:
        """Run a forward pass to its next pause or to its end; return the pause or the output."""
        self._running, forward.paused = forward, None  # its input may be freed
        with torch.no_grad(), forward.additions:  # both are states of the thread, not of the greenlet
            event: Paused | Tensor = forward.greenlet.switch()
        self._running = None
        if forward.greenlet.dead:
            forward.additions.finish()
        ran = {name: numbers for name, numbers in forward.additions.found.items() if name in self._adding}
        if any(numbers != self._look.operands[name] for name, numbers in ran.items()):
            raise self._inconsistent_batches()
        return event

    def _paused(self, forward: _Forward, stage: int) -> Paused:
        """Run a forward pass to a stage, unless it waits there."""
        if forward.paused is None or forward.paused.stage != stage:
            event = self._continue(forward)
            if not isinstance(event, Paused) or event.stage != stage:
                raise self._inconsistent_batches()
            forward.paused = event
            entered = self._look.entered[self._look.groups[stage][0].name][0]
            if forward.results.count == entered.results:  # else their places differ, and all keep their memory
                forward.results.drop(entered.idle)
        return forward.paused

    def _seen(self, forward: _Forward, stage: int, rounding: RoundedStream | None = None) -> Seen:
        """Run a forward pass to a stage; return its input rows, and the tensors added to the outputs of its layers."""
        group, event = self._look.groups[stage], self._paused(forward, stage)
        shown = Seen(inputs=group[0].shape[1], rounded=None if rounding is None else rounding.rounded)
        shown.add(group, event.x, waits=True)
        for layer in (layer for layer in group if layer.adds and self._original):
            numbers = (number for number in self._look.operands[layer.name] if number is not None)
            operands = [forward.results.get(number) for number in numbers]
            known = [wide(operand) for operand in operands if operand is not None]
            if len(known) < len(self._look.operands[layer.name]):
                raise self._inconsistent_batches()
            shown.added[layer.name] = total(known).reshape(-1, layer.shape[0])
        return shown

    @torch.no_grad()
    def _shown(self, stage: int) -> Iterator[list[Rows | RoutedRows]]:
        """Yield the rows of each batch at a stage; then the original stream enters the next block, if any."""
        group, states, rounding = self._look.groups[stage], self.stream.original, self.stream.rounding
        ends = self._whole and stage == self._stages - 1
        if rounding is not None and rounding.measures(group):
            fitted = self._quantized[: self.stream.dealt.fitted]
            inputs = (self._paused(each, stage).x for each in fitted)
            peak = max(x.peak if isinstance(x, Routed) else float(x.abs().max()) for x in inputs)
            rounding.measured(group, max(self.stream.dealt.ranks.gather(peak)))
        for batch, forward in enumerate(self._quantized):
            original = None
            if states is not None:
                original = self._seen(self._original[batch], stage)
                if ends and self._onward:
                    original.rows = [rows.clone() for rows in original.rows]  # the block may work in place
                    states[batch] = self._output(self._original[batch])
            yield [rows_of(group[0].name, self._seen(forward, stage, rounding), original)]
            del original
            for ended in (forward, *self._original[batch : batch + 1]) if ends and not self._onward else ():
                ended.end()
            release()  # memory that the forward passes freed is scattered among paused activations
        if ends:
            self.block.free_original()  # its stream has passed the block

    def _output(self, forward: _Forward) -> Tensor:
        """Run a forward pass to its end; return its output hidden states."""
        event = self._continue(forward)
        if isinstance(event, Paused) or forward.additions.found.keys() != self._adding:
            raise self._inconsistent_batches()
        return self.stream.noted(event)

    def close(self) -> None:
        """Stop all forward passes and free their memory."""
        self._ends.close()
        self._original, self._quantized = [], []

    def _inconsistent_batches(self) -> CalibrationError:
        return CalibrationError(
            f"{self.block.name} ran different layers or additions on two batches of tokens. nearplane needs blocks "
            f"that compute the same for all batches. Use true_sequential=False, which does not need this."
        )


class Paused(NamedTuple):
    """A pause of a forward pass: before the first layer of a stage, whose input is `x`."""

    stage: int
    x: Any


def _pause(stage: int, _: Layer, x: Any) -> None:
    """Pause this forward pass; the thread returns to the point from which it switched to this greenlet."""
    parent = getcurrent().parent
    assert parent is not None, "only greenlets pause"
    parent.switch(Paused(stage=stage, x=x))


class _Forward:
    """Forward pass of one batch through one copy of a block, in a greenlet."""

    def __init__(self, run: Callable[[], Tensor], hidden: Tensor) -> None:
        self.results = Results(hidden)
        self.additions = Additions(results=self.results)
        self.paused: Paused | None = None  # where it waits
        self.greenlet = greenlet(run)
        self.greenlet.gr_context = copy_context()

    def end(self) -> None:
        if not self.greenlet.dead:
            self.greenlet.throw()

"""Stand-ins for the blocks of a network, which record the calls of its blocks."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nearplane.calibration.rows import same
from nearplane.calibration.states_on_disk import Keep
from nearplane.calibration.two_stacks import FinalNorm, joined_stacks
from nearplane.errors import ModelError
from nearplane.models.kinds import call_kwargs, main_input

HANDED = "{}>{}"  # name of what a block returns after the hidden states for the next one: the block, and the place
ENCODER_OUT = object()  # placeholder for the encoder's output in the recorded arguments of a decoder block


class Stop(Exception):  # noqa: N818  (not an error)
    """Ends a forward pass early, once everything needed was observed."""


def stop(*_: Any) -> None:
    raise Stop


@dataclass(frozen=True, slots=True)
class Handed:
    """Placeholder for a tensor that the block before returned after its hidden states, in the arguments of a block.

    Args:
        key: Its name, see `HANDED`.
    """

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Arguments with which the network calls a block on one batch, without the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positional: bool  # whether the hidden states are the first argument, or `hidden_states=`
    positions: slice | None = None  # the block works on these; None: all
    encoder_positions: slice | None = None  # cross-attention reads these; None: no cross-attention

    def run(self, block: Callable[..., Any], hidden: Tensor) -> Any:
        """Call a block on hidden states with these arguments."""
        if self.positional:
            return block(hidden, *self.args, **self.kwargs)
        return block(hidden_states=hidden, **self.kwargs)


class Tape:
    """Record that all `Recorder`s of a network write to: the inputs of the first block and the calls of all blocks.

    Args:
        names: Block names in the order they run.
        starts: Indices of the blocks that begin a stack.

    Attributes:
        hidden: Inputs of the first block, by batch; with two stacks, the inputs of both first blocks, see `joined_stacks`.
        calls: {block name: one `Call` per batch}.
        first_blocks: {index: first block of a stack, in memory}; `probe` keeps those that compute values for all.
        between: Function from the end of the encoder to the decoder; None where there is one stack.
        extra: Values that each block returns after the hidden states, see `Stream`.
        handed: Names of those tensors among them that the next block takes.
    """

    def __init__(self, names: list[str], starts: Sequence[int]) -> None:
        self.hidden: MutableSequence[Tensor] = []
        self.calls: dict[str, list[Call]] = {name: [] for name in names}
        self.first_blocks: dict[int, Any] = {}
        self.between: FinalNorm | None = None
        self.extra: list[tuple[Any, ...] | None] = [None for _ in names]
        self.handed: set[str] = set()
        self._names, self._starts = names, starts
        self._probing = False
        self._pool: dict[tuple[Any, ...], Tensor] = {}  # arguments that are equal in all batches are kept once
        self._begin_batch()

    def probe(self, network: PreTrainedModel, part: Tensor, device: torch.device) -> None:
        """Run one window, with the real first block of each stack, to find the other outputs of blocks."""
        self._probing = True
        self.run(network, [part], device)
        self._probing, self._pool = False, {}

    def run(
        self, network: PreTrainedModel, parts: Sequence[Tensor], device: torch.device, keep: Keep = list
    ) -> MutableSequence[Tensor]:
        """Run all batches without the blocks; return the inputs of the first block and record all calls."""
        self.hidden, self.calls = keep(()), {name: [] for name in self._names}
        for part in parts:
            self._begin_batch()
            given = part.to(device)
            with suppress(Stop):
                network(main_input(network, given), **call_kwargs(network, given))
            if self._next != len(self._names):
                name = self._names[self._next]
                raise ModelError(f"{name} did not run. nearplane needs blocks that run once each, in order.")
            if len(states := self.hidden[-1]) != len(part):
                raise ModelError(
                    f"{self._names[0]} receives hidden states of shape {tuple(states.shape)} for tokens of shape "
                    f"{tuple(part.shape)}. nearplane needs windows along the first dimension of both. Use another model."
                )
        return self.hidden

    def _begin_batch(self) -> None:
        """Reset the state of a batch."""
        self._next = 0
        self._current: Tensor | None = None
        # placeholders of other outputs of blocks; only the next block may receive them
        self._extra_zeros: list[Tensor] = []
        self._next_zeros: list[Tensor] = []  # those of the last block
        self._shared_values: tuple[Any, ...] | None = None  # computed by the first block of a stack for all its blocks
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # id: (tensor of this batch, equal tensor that is kept)

    def record(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a block's arguments; return its input in the form in which the block returns its output."""
        hidden, args, named, positional = split_arguments(args, kwargs)
        name, first = self._names[index], index in self._starts
        if index != self._next:
            raise ModelError(f"{name} runs out of order. nearplane needs blocks that run once each, in order.")
        if not first and self._current is not None and not same(hidden, self._current):
            raise ModelError(f"The model changes the hidden states before {name}, so it cannot be run block by block.")
        if index == 0:
            self.hidden.append(hidden)
        elif first:
            self.hidden[-1] = joined_stacks(self.hidden[-1], hidden, name)
        leaf = count()

        def keep(value: Any) -> Any:
            place = next(leaf)
            if not isinstance(value, Tensor):
                return value
            if self.between is not None and value is self.between.output:
                return ENCODER_OUT
            for at, placeholder in enumerate(self._next_zeros):
                if value is placeholder:
                    handed = Handed(HANDED.format(self._names[index - 1], at))
                    self.handed.add(handed.key)
                    return handed
            if any(value is placeholder for placeholder in self._extra_zeros):
                raise ModelError(f"{name} receives more than hidden states from a block that is not the one before it.")
            if id(value) not in self._kept:
                known = self._pool.setdefault((index, place, value.shape, value.dtype), value)
                self._kept[id(value)] = (value, known if known is value or torch.equal(known, value) else value)
            return self._kept[id(value)][1]

        call = Call(args=args, kwargs=named, positional=positional)
        at, read = self._positions(index, hidden)
        kept = replace(call, args=mapped(keep, args), kwargs=mapped(keep, named), positions=at, encoder_positions=read)
        self.calls[name].append(kept)
        if first:
            self._shared_values = self._values_for_all(index, call, hidden)
        self._next, self._current = index + 1, hidden
        if self._next == len(self._names):
            raise Stop
        if self.between is not None and self._next == self._starts[1]:
            self.between.begin(hidden)
        self._next_zeros = []
        if self._shared_values is not None:
            return (hidden, *self._shared_values)
        if self.extra[index] is None:
            return hidden
        extra = zeros(self.extra[index])
        self._next_zeros = tensors_within(extra)
        self._extra_zeros += self._next_zeros
        return (hidden, *extra)

    def _positions(self, index: int, hidden: Tensor) -> tuple[slice | None, slice | None]:
        """Return the positions that a block works on (None: all) and those that cross-attention reads (or None)."""
        if self.between is None:
            return None, None
        positions, length = self.hidden[-1].shape[1], hidden.shape[1]
        if index < self._starts[1]:
            return slice(0, length), None
        return slice(positions - length, positions), slice(0, positions - length)

    def _values_for_all(self, index: int, call: Call, hidden: Tensor) -> tuple[Any, ...] | None:
        """Run the first block of a stack if it is loaded; return the values that it computes for all blocks."""
        if index not in self.first_blocks:
            return None
        run = partial(call.run, self.first_blocks[index])
        output = run(hidden.clone())  # a block may work in place
        extra = output[1:] if isinstance(output, tuple) else None
        if self._probing:
            end = min((other for other in self._starts if other > index), default=len(self._names))
            self.extra[index:end] = [extra] * (end - index)
            if extra is None or not computes_for_all(run, hidden, extra):
                del self.first_blocks[index]
                return None
        return extra


class StandIn(nn.Module):
    """Module in place of a block, with all attributes of that block."""

    def __init__(self, block: nn.Module, **attributes: Any) -> None:
        super().__init__()
        for name, value in (("block", block), *attributes.items()):
            object.__setattr__(self, name, value)  # the block is not a submodule: its weights stay on disk

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "block"), name)


class Recorder(StandIn):
    """Stand-in for block number `index` that records its calls on a `tape` and returns its input."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.tape.record(self.index, args, kwargs)


def split_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any], bool]:
    """Return (hidden states, other args, other kwargs, whether the hidden states were a positional argument)."""
    if args:
        return args[0], args[1:], kwargs, True
    kwargs = dict(kwargs)
    return kwargs.pop("hidden_states"), (), kwargs, False


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to everything inside tuples, lists and dicts."""
    if type(value) in (tuple, list):
        return type(value)(mapped(function, item) for item in value)
    if type(value) is dict:
        return {key: mapped(function, item) for key, item in value.items()}
    return function(value)


def tensors_within(value: Any) -> list[Tensor]:
    """Return the tensors inside tuples, lists and dicts, in order."""
    found: list[Tensor] = []
    mapped(lambda each: found.append(each) if isinstance(each, Tensor) else None, value)
    return found


def zeros(extra: Any) -> Any:
    return mapped(lambda value: torch.zeros_like(value) if isinstance(value, Tensor) else value, extra)


def part_of(whole: Tensor, positions: slice | None) -> Tensor:
    """Return the hidden states at `positions`; None: all of them."""
    return whole if positions is None else whole[:, positions].contiguous()


def with_part(whole: Tensor, positions: slice | None, part: Tensor) -> Tensor:
    """Return hidden states in which `part` replaces those at `positions`; None: all of them."""
    if positions is None:
        return part
    return torch.cat([whole[:, : positions.start], part, whole[:, positions.stop :]], 1)


def computes_for_all(block: Callable[[Tensor], Any], hidden: Tensor, extra: Any) -> bool:
    """Whether the tensors that a block returns after the hidden states do not depend on them.

    Such tensors pass from block to block unchanged: the first block of T5 computes the position bias for all blocks.

    Args:
        block: The block as a function from hidden states to its output.
        hidden: Hidden states on which the block was run.
        extra: Values that the block returned after the hidden states.
    """
    if not any(isinstance(value, Tensor) for value in extra):
        return False
    other = block(hidden.flip(1) * 0.5)[1:]
    return all(
        type(a) is type(b) and (not isinstance(a, Tensor) or torch.equal(a, b))
        for a, b in zip(extra, other, strict=True)
    )

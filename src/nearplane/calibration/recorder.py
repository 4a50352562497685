"""Stand-ins for the blocks of a network: they record how it calls its blocks, or return what they are given.

Of networks with two stacks of blocks, an encoder and a decoder whose blocks look at what comes out of it (cross-attention), hidden
states travel as one tensor, those of the encoder first: (windows, positions of both, hidden). So every block of the decoder has the
encoder's output in the same network at hand, and gradients find their way back. Each block works on its own positions and leaves
the others as they are.

Knows how blocks are called; not what their hidden states are used for.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nearplane.calibration.states_on_disk import Keep
from nearplane.calibration.watch import Stop, same
from nearplane.errors import ModelError
from nearplane.models.kinds import main_input, words

ENCODED = object()  # stands in the arguments of a block for what comes out of the encoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How the network calls a block for one batch, apart from the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positional: bool  # whether the hidden states are the first argument, or `hidden_states=`
    own: slice | None = None  # positions that the block works on; None: all
    seen: slice | None = None  # those of the encoder, which it sees

    def run(self, block: Callable[..., Any], hidden: Tensor) -> Any:
        """Call a block so, on hidden states."""
        if self.positional:
            return block(hidden, *self.args, **self.kwargs)
        return block(hidden_states=hidden, **self.kwargs)


class Tape:
    """What the recorders write on: what enters the first block, and how every block is called.

    Args:
        names: of the blocks.
        firsts: numbers of those that begin a stack.

    Attributes:
        hidden: what entered the first block, by batch; of two stacks both firsts', see `joined`.
        calls: {block name: its other arguments, by batch}.
        opening: {number: block in memory} of first blocks, of which `probe` leaves those that make something for all.
        between: what leads from the first stack to the second, if there are two.
        extra: see `Stream`.
    """

    def __init__(self, names: list[str], firsts: Sequence[int]) -> None:
        self.hidden: MutableSequence[Tensor] = []
        self.calls: dict[str, list[Call]] = {name: [] for name in names}
        self.opening: dict[int, Any] = {}
        self.between: Between | None = None
        self.extra: list[tuple[Any, ...] | None] = [None for _ in names]
        self._names, self._firsts = names, firsts
        self._probing = False
        self._pool: dict[tuple[Any, ...], Tensor] = {}  # arguments that are equal in all batches are kept once
        self._begin()

    def probe(self, network: PreTrainedModel, part: Tensor, device: torch.device) -> None:
        """Run one window, and the first block of each stack for real, to know what blocks return beside hidden states."""
        self._probing = True
        self.run(network, [part], device)
        self._probing, self._pool = False, {}

    def run(
        self, network: PreTrainedModel, parts: Sequence[Tensor], device: torch.device, keep: Keep = list
    ) -> MutableSequence[Tensor]:
        """Run all batches through the network without its blocks; return what enters the first, keep how all are called."""
        self.hidden, self.calls = keep(()), {name: [] for name in self._names}
        for part in parts:
            self._begin()
            given = part.to(device)
            with suppress(Stop):
                network(main_input(network, given), **words(network, given))
            if self._next != len(self._names):
                name = self._names[self._next]
                raise ModelError(f"{name} did not run: nearplane needs blocks that run once each, in order.")
            if len(found := self.hidden[-1]) != len(part):
                raise ModelError(
                    f"{self._names[0]} is given hidden states {tuple(found.shape)} for tokens {tuple(part.shape)}: nearplane "
                    f"needs one window behind the other in both. Use another model."
                )
        return self.hidden

    def _begin(self) -> None:
        """A new batch begins."""
        self._next = 0
        self._current: Tensor | None = None
        self._given: list[Tensor] = []
        self._handed: tuple[Any, ...] | None = None  # what the first block of a stack made for all
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # id: (tensor of this batch, what is kept for it)

    def record(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep a block's arguments and return its input the way the block would return its output."""
        hidden, args, named, positional = taken_apart(args, kwargs)
        name, first = self._names[index], index in self._firsts
        if index != self._next:
            raise ModelError(f"{name} runs out of turn: nearplane needs blocks that run once each, in order.")
        if not first and self._current is not None and not same(hidden, self._current):
            raise ModelError(f"The model changes hidden states before {name}: it cannot be run block by block.")
        if index == 0:
            self.hidden.append(hidden)
        elif first:
            self.hidden[-1] = joined(self.hidden[-1], hidden, name)
        leaf = count()

        def keep(value: Any) -> Any:
            place = next(leaf)
            if not isinstance(value, Tensor):
                return value
            if self.between is not None and value is self.between.output:
                return ENCODED
            if any(value is given for given in self._given):
                raise ModelError(f"The block before {name} hands it more than hidden states: that cannot be replayed.")
            if id(value) not in self._kept:
                known = self._pool.setdefault((index, place, value.shape, value.dtype), value)
                self._kept[id(value)] = (value, known if known is value or torch.equal(known, value) else value)
            return self._kept[id(value)][1]

        call = Call(args=args, kwargs=named, positional=positional)
        own, seen = self._places(index, hidden)
        kept = replace(call, args=mapped(keep, args), kwargs=mapped(keep, named), own=own, seen=seen)
        self.calls[name].append(kept)
        if first:
            self._handed = self._made_for_all(index, call, hidden)
        self._next, self._current = index + 1, hidden
        if self._next == len(self._names):
            raise Stop
        if self.between is not None and self._next == self._firsts[1]:
            self.between.begin(hidden)
        if self._handed is not None:
            return (hidden, *self._handed)
        if self.extra[index] is None:
            return hidden
        extra = zeros(self.extra[index])
        mapped(lambda value: self._given.append(value) if isinstance(value, Tensor) else None, extra)
        return (hidden, *extra)

    def _places(self, index: int, hidden: Tensor) -> tuple[slice | None, slice | None]:
        """Return which positions a block works on, and which it sees beside; None: all, and none."""
        if self.between is None:
            return None, None
        places, own = self.hidden[-1].shape[1], hidden.shape[1]
        if index < self._firsts[1]:
            return slice(0, own), None
        return slice(places - own, places), slice(0, places - own)

    def _made_for_all(self, index: int, call: Call, hidden: Tensor) -> tuple[Any, ...] | None:
        """Run the first block of a stack where it is not known what it returns, or makes for all; return the latter."""
        if index not in self.opening:
            return None
        run = partial(call.run, self.opening[index])
        output = run(hidden.clone())  # a block may work in place
        extra = output[1:] if isinstance(output, tuple) else None
        if self._probing:
            end = min((other for other in self._firsts if other > index), default=len(self._names))
            self.extra[index:end] = [extra] * (end - index)
            if extra is None or not hands_over(run, hidden, extra):
                del self.opening[index]
                return None
        return extra


class _StandIn(nn.Module):
    """Stands in for a block; has all its other attributes."""

    def __init__(self, block: nn.Module, **own: Any) -> None:
        super().__init__()
        for name, value in (("block", block), *own.items()):
            object.__setattr__(self, name, value)  # the block is no submodule: its weights stay on disk

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "block"), name)


class End(_StandIn):
    """Returns the hidden states that it was `given`, or passes on its input, the way the block returns its output, with `extra`."""

    given: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = taken_apart(args, kwargs)[0] if self.given is None else self.given
        return hidden if self.extra is None else (hidden, *zeros(self.extra))


class Recorder(_StandIn):
    """Records on a `tape` how the block of an `index` is called, and returns its input."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.tape.record(self.index, args, kwargs)


def taken_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any], bool]:
    """Split a block's arguments: (hidden states, other args, other kwargs, whether they came by position)."""
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


def zeros(extra: Any) -> Any:
    return mapped(lambda value: torch.zeros_like(value) if isinstance(value, Tensor) else value, extra)


class Between:
    """Watches what an encoder does to the hidden states behind its last block: nothing, or one module, its last norm.

    Attributes:
        output: of the encoder that ran last.
    """

    def __init__(self, encoder: nn.Module) -> None:
        self.output: Tensor | None = None
        self._behind: Tensor | None = None
        self._candidates: list[tuple[nn.Module, Tensor]] = []
        self._module: nn.Module | None = None
        for module in encoder.modules():
            module.register_forward_hook(self._left if module is encoder else self._ran)

    def begin(self, behind: Tensor) -> None:
        """Note what the last block of the encoder returned."""
        self._behind, self._candidates = behind, []

    def _ran(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._behind is not None and args and isinstance(output, Tensor) and args[0] is self._behind:
            self._candidates.append((module, output))

    def _left(self, encoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        found = self.output = output[0]
        if self._behind is None or same(found, self._behind):
            return
        made = [module for module, result in self._candidates if same(result, found)]
        if not made:
            raise ModelError(
                f"{type(encoder).__name__} does more behind its last block than one module does: it cannot be run block by block."
            )
        self._module = self._module or deepcopy(made[0])  # the network is freed, this is small

    def __call__(self, states: Tensor) -> Any:
        """Return what the decoder sees, of hidden states behind the encoder's last block."""
        return states if self._module is None else self._module(states)


def part_of(whole: Tensor, positions: slice | None) -> Tensor:
    """Return the hidden states at some positions; None: all."""
    return whole if positions is None else whole[:, positions].contiguous()


def with_part(whole: Tensor, positions: slice | None, part: Tensor) -> Tensor:
    """Return hidden states with others at some positions; None: at all."""
    if positions is None:
        return part
    return torch.cat([whole[:, : positions.start], part, whole[:, positions.stop :]], 1)


def joined(encoder: Tensor, decoder: Tensor, name: str) -> Tensor:
    """Return the hidden states that enter both stacks as one tensor.

    Args:
        encoder: (windows, positions, hidden) that enter the first block.
        decoder: (windows, positions, hidden) that enter the first block of the decoder.
        name: of that block.

    Raises:
        ModelError: they are not of one width.
    """
    if encoder.shape[2] != decoder.shape[2]:
        raise ModelError(
            f"{name} is given hidden states {decoder.shape[2]} wide, the encoder {encoder.shape[2]}: nearplane passes encoders and "
            f"decoders of one width."
        )
    return torch.cat([encoder, decoder], 1)


def hands_over(block: Callable[[Tensor], Any], hidden: Tensor, extra: Any) -> bool:
    """Whether a block returns tensors beside hidden states that are the same for others: they go from block to block as they are.

    T5's first block makes the bias of positions for all.

    Args:
        block: from hidden states to its output.
        hidden: that it was given.
        extra: that it returned.
    """
    if not any(isinstance(value, Tensor) for value in extra):
        return False
    other = block(hidden.flip(1) * 0.5)[1:]
    return all(
        type(a) is type(b) and (not isinstance(a, Tensor) or torch.equal(a, b))
        for a, b in zip(extra, other, strict=True)
    )

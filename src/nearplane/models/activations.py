"""Activation streams: what enters each block of a network, found by running the network without its blocks.

Knows how blocks are called; not what is measured on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from nearplane.errors import CalibrationError, ModelError
from nearplane.headless import read_out, takes_images, words
from nearplane.models.data import check_vocabulary
from nearplane.models.model import ABSENT, Block, Model
from nearplane.models.watch import Stop, same, stop, until_stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How the network calls a block for one batch, apart from the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positional: bool  # whether the hidden states are the first argument, or `hidden_states=`


class Stream:
    """Hidden states on their way through the network, batch by batch: (windows, seqlen, hidden) each.

    Attributes:
        quantized: inputs of the next block in the quantized network; batches of extra windows come last.
        original: the same in the original one; None if only one stream runs. Both start as the same tensors.
        calls: {block name: its other arguments, by batch}.
        ahead: whether `original` has passed the block that `quantized` still stands before.
        extra: what a block returns beside hidden states, of one window; None if it returns no tuple.
        sizes: windows of each batch.
        fitted: batches that sums are made of; the windows of those behind them enter none.
    """

    def __init__(
        self,
        hidden: list[Tensor],
        calls: dict[str, list[Call]],
        *,
        two_streams: bool,
        extra: Any = None,
        fitted: int | None = None,
    ) -> None:
        self.quantized = hidden
        self.fitted = len(hidden) if fitted is None else fitted
        self.original = list(hidden) if two_streams else None
        self.calls, self.ahead, self.extra = calls, False, extra
        self.sizes = [len(x) for x in hidden]

    def forward(self, block: Block, module: Callable[..., Any] | None, batch: int, hidden: Tensor) -> Tensor:
        """Run a copy of a block on one batch and return the hidden states that come out."""
        assert module is not None, ABSENT
        call = self.calls[block.name][batch]
        hidden = hidden.clone()  # a block may work in place
        if call.positional:
            output = module(hidden, *call.args, **call.kwargs)
        else:
            output = module(hidden_states=hidden, **call.kwargs)
        states: Tensor = output[0] if isinstance(output, tuple) else output
        return states

    @torch.no_grad()
    def advance(self, block: Block) -> None:
        """Move both streams past a block; each batch of the old hidden states is freed as the new one is there.

        Raises:
            CalibrationError: what comes out is not finite.
        """
        for batch in range(len(self.sizes)):
            self.quantized[batch] = finite(self.forward(block, block.quantized, batch, self.quantized[batch]), block)
            if self.original is not None and not self.ahead:
                self.original[batch] = finite(self.forward(block, block.original, batch, self.original[batch]), block)
        self.passed(block)

    def passed(self, block: Block) -> None:
        """Note that both streams stand behind a block."""
        self.ahead = False
        del self.calls[block.name]


@torch.no_grad()
def skeleton(
    model: Model,
    tokens: Tensor,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    batch: int = 8,
    first: int | None = None,
    two_streams: bool = True,
    embeddings: Tensor | None = None,
    extra: Tensor | None = None,
) -> Stream:
    """Run the network without its blocks: learn the inputs of the first one and the other arguments of all.

    Every block is replaced by a recorder that returns its input, so embeddings, masks and rotary tables are computed as
    the model does; they are in memory only for this.

    Args:
        model: whose blocks are to be calibrated.
        tokens: (windows, seqlen) int64; of networks that take images (images, channels, height, width).
        device, dtype: where and in what to compute; hidden states stay there.
        batch: windows at a time.
        first: windows of the first batch, by which blocks are looked at before all pass through; None: as of the others.
        two_streams: keep hidden states of the original network beside those of the quantized one.
        embeddings: (vocabulary, hidden) input embeddings of the quantized network; None: those of the original.
        extra: (windows, seqlen) more tokens, in batches of their own behind the others.

    Raises:
        ModelError: the blocks do not run one after the other, each on what the one before returned.
        CalibrationError: a token is not in the model's vocabulary.
    """
    place, alone = torch.device(device), min(first or 0, len(tokens) - 1)
    fitted = [*tokens[:alone].split(batch), *tokens[alone:].split(batch)] if alone else list(tokens.split(batch))
    batches = fitted if extra is None else [*fitted, *extra.split(batch)]
    for part in batches if not takes_images(model.network) else ():
        check_vocabulary(part, len(model.network.get_input_embeddings().weight))
    tape = _Tape([block.name for block in model.blocks])
    recorders = [_Recorder(block.empty, index, tape) for index, block in enumerate(model.blocks)]
    with model.around(recorders, place, dtype) as network:
        if (head := network.get_output_embeddings()) is not None:
            head.register_forward_pre_hook(stop)
        with model.blocks[0].on(place, dtype, original=False) as opening:
            tape.probe = opening.quantized
            until_stopped(lambda: network(tokens[:1].to(place), **words(network)))
            tape.probe = None
        original = None
        if embeddings is not None and two_streams:
            original = tape.run(network, batches, place)
        if embeddings is not None:
            network.get_input_embeddings().weight.copy_(embeddings)
        hidden = tape.run(network, batches, place)
    stream = Stream(hidden, tape.calls, two_streams=two_streams, extra=tape.extra, fitted=len(fitted))
    stream.original = original or stream.original
    return stream


@torch.no_grad()
def finish(model: Model, stream: Stream, tokens: Tensor, *, device: torch.device | str, dtype: torch.dtype) -> None:
    """Move both streams from behind the last block to the head: past the last norm.

    Args:
        model: whose head is a module of its own.
        stream: from `skeleton`, advanced past all blocks.
        tokens: (windows, seqlen) that it was made of, extra ones last.
        device, dtype: where and in what to compute.
    """
    entered: list[Tensor] = []

    def enter(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        entered.append(args[0])
        raise Stop

    with _behind(model, stream, torch.device(device), dtype, head=False) as (network, end):
        network.get_output_embeddings().register_forward_pre_hook(enter)
        for states in (stream.quantized, stream.original or []):
            for batch, (part, hidden) in enumerate(zip(tokens.split(stream.sizes), states, strict=False)):
                end.given = hidden
                until_stopped(partial(network, part.to(hidden.device), **words(network)))
                states[batch] = entered.pop()


@contextmanager
def readout(
    model: Model, stream: Stream, *, device: torch.device | str, dtype: torch.dtype
) -> Iterator[Callable[..., Tensor]]:
    """Hold what follows the last block in memory: yields logits(tokens, hidden), (windows, seqlen, vocabulary).

    Of a network without head it yields the last hidden states in their place.

    Gradients flow from the logits to the hidden states where the caller lets them, and to tensors that are
    given as a third argument, by name, in place of parameters of the network.

    Args:
        model: whose head is wanted.
        stream: from `skeleton`; tells what blocks return.
        device, dtype: where and in what to compute.
    """
    with _behind(model, stream, torch.device(device), dtype, head=True) as (network, end):

        def logits(tokens: Tensor, hidden: Tensor, given: Mapping[str, Tensor] | None = None) -> Tensor:
            end.given = hidden
            output = functional_call(network, dict(given or {}), (tokens.to(hidden.device),), words(network))
            return read_out(network, output)

        yield logits


@contextmanager
def _behind(
    model: Model, stream: Stream, device: torch.device, dtype: torch.dtype, *, head: bool
) -> Iterator[tuple[PreTrainedModel, _End]]:
    """Hold what follows the last block in memory: the network, and what to give the hidden states to."""
    end = _End(model.blocks[-1].empty, stream.extra)
    between = [_End(block.empty, stream.extra) for block in model.blocks[:-1]]
    with model.around([*between, end], device, dtype, head=head) as network:
        yield network, end


class _Tape:
    """What the recorders write on: the first block's inputs and every block's calls."""

    def __init__(self, names: list[str]) -> None:
        self.hidden: list[Tensor] = []
        self.calls: dict[str, list[Call]] = {name: [] for name in names}
        self.probe: nn.Module | None = None
        self._names = names
        self.extra: tuple[Any, ...] | None = None  # what a block returns beside hidden states; None if no tuple
        self._pool: dict[tuple[Any, ...], Tensor] = {}  # arguments that are equal in all batches are kept once
        self.begin()

    def run(self, network: nn.Module, parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Run all batches through the network without its blocks; return what enters the first, keep how all are called."""
        self.hidden, self.calls = [], {name: [] for name in self._names}
        for part in parts:
            self.begin()
            until_stopped(partial(network, part.to(device), **words(network)))
            self.check()
            if len(found := self.hidden[-1]) != len(part):
                raise ModelError(
                    f"{self._names[0]} is given hidden states {tuple(found.shape)} for tokens {tuple(part.shape)}: nearplane "
                    f"needs one window behind the other in both. Use another model."
                )
        return self.hidden

    def begin(self) -> None:
        """A new batch begins."""
        self._next = 0
        self._current: Tensor | None = None
        self._given: list[Tensor] = []
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # id: (tensor of this batch, what is kept for it)

    def record(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep a block's arguments and return its input the way the block would return its output."""
        hidden, args, named, positional = _taken_apart(args, kwargs)
        if self.probe is not None:
            output = self.probe(hidden, *args, **named) if positional else self.probe(hidden_states=hidden, **named)
            self.extra = output[1:] if isinstance(output, tuple) else None
            raise Stop
        name = self._names[index]
        if index != self._next:
            raise ModelError(f"{name} runs out of turn: nearplane needs blocks that run once each, in order.")
        if self._current is not None and not same(hidden, self._current):
            raise ModelError(f"The model changes hidden states before {name}: it cannot be run block by block.")
        if not index:
            self.hidden.append(hidden)
        leaf = count()

        def keep(value: Any) -> Any:
            return self._keep(name, index, next(leaf), value)

        self.calls[name].append(Call(args=_mapped(keep, args), kwargs=_mapped(keep, named), positional=positional))
        self._next, self._current = index + 1, hidden
        if self._next == len(self._names):
            raise Stop
        if self.extra is None:
            return hidden
        extra = _zeros(self.extra)
        _mapped(lambda value: self._given.append(value) if isinstance(value, Tensor) else None, extra)
        return (hidden, *extra)

    def check(self) -> None:
        """Raise unless every block has run."""
        if self._next != len(self._names):
            name = self._names[self._next]
            raise ModelError(f"{name} did not run: nearplane needs blocks that run once each, in order.")

    def _keep(self, name: str, index: int, leaf: int, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if any(value is given for given in self._given):
            raise ModelError(f"The block before {name} hands it more than hidden states: that cannot be replayed.")
        if id(value) not in self._kept:
            first = self._pool.setdefault((index, leaf, value.shape, value.dtype), value)
            self._kept[id(value)] = (value, first if first is value or torch.equal(first, value) else value)
        return self._kept[id(value)][1]


class _StandIn(nn.Module):
    """Stands in for a block; has all its other attributes."""

    def __init__(self, block: nn.Module, **own: Any) -> None:
        super().__init__()
        for name, value in (("block", block), *own.items()):
            object.__setattr__(self, name, value)  # the block is no submodule: its weights stay on disk

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "block"), name)


class _End(_StandIn):
    """Returns the hidden states that it was given, or passes on its input, the way the block would return its output."""

    def __init__(self, block: nn.Module, extra: tuple[Any, ...] | None) -> None:
        super().__init__(block, extra=extra)
        self.given: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _taken_apart(args, kwargs)[0] if self.given is None else self.given
        return hidden if self.extra is None else (hidden, *_zeros(self.extra))


class _Recorder(_StandIn):
    """Records how the block is called, and returns its input."""

    def __init__(self, block: nn.Module, index: int, tape: _Tape) -> None:
        super().__init__(block, index=index, tape=tape)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.tape.record(self.index, args, kwargs)


def _taken_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any], bool]:
    """Split a block's arguments: (hidden states, other args, other kwargs, whether they came by position)."""
    if args:
        return args[0], args[1:], kwargs, True
    kwargs = dict(kwargs)
    return kwargs.pop("hidden_states"), (), kwargs, False


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to everything inside tuples, lists and dicts."""
    if type(value) in (tuple, list):
        return type(value)(_mapped(function, item) for item in value)
    if type(value) is dict:
        return {key: _mapped(function, item) for key, item in value.items()}
    return function(value)


def _zeros(extra: tuple[Any, ...]) -> Any:
    return _mapped(lambda value: torch.zeros_like(value) if isinstance(value, Tensor) else value, extra)


def finite(hidden: Tensor, block: Block) -> Tensor:
    """Return what comes out of a block, if it is finite."""
    if not torch.isfinite(hidden).all():
        raise CalibrationError(f"{block.name} returns NaN or Inf. Check the checkpoint, or compute in a wider dtype.")
    return hidden

"""Activation streams: what enters each block of a network, found by running the network without its blocks.

Knows how blocks are called; not what is measured on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from nearplane.calibration.recorder import ENCODED, Between, Call, End, Recorder, Tape, mapped, part_of, with_part
from nearplane.calibration.states_on_disk import Keep
from nearplane.calibration.texts import check_vocabulary
from nearplane.calibration.watch import Stop, stop
from nearplane.errors import CalibrationError
from nearplane.models.kinds import Taken, main_input, read_out, taken_by, words
from nearplane.models.model import ABSENT, Block, Model


class Stream:
    """Hidden states on their way through the network, batch by batch: (windows, seqlen, hidden) each.

    Attributes:
        quantized: inputs of the next block in the quantized network; batches of extra windows come last.
        original: the same in the original one; None if only one stream runs. Both start as the same tensors.
        calls: {block name: its other arguments, by batch}.
        ahead: whether `original` has passed the block that `quantized` still stands before.
        extra: what each block returns beside hidden states, of one window; None if it returns no tuple.
        between: from the hidden states behind an encoder to what a decoder sees of them.
        sizes: windows of each batch.
        fitted: batches that sums are made of; the windows of those behind them enter none.
    """

    def __init__(
        self,
        hidden: MutableSequence[Tensor],
        calls: dict[str, list[Call]],
        *,
        original: MutableSequence[Tensor] | None = None,
        extra: Sequence[tuple[Any, ...] | None] = (),
        between: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.quantized, self.original, self.fitted = hidden, original, len(hidden)
        self.calls, self.ahead, self.extra, self.between = calls, False, extra, between
        self.sizes = [len(x) for x in hidden]

    def forward(self, block: Block, module: Callable[..., Any] | None, batch: int, hidden: Tensor) -> Tensor:
        """Run a copy of a block on one batch and return the hidden states that come out."""
        assert module is not None, ABSENT
        call = self.calls[block.name][batch]
        whole = hidden.clone()  # a block may work in place
        if call.seen is not None:
            assert self.between is not None, "decoders are behind an encoder"
            encoded = self.between(whole[:, call.seen])
            args, kwargs = mapped(lambda value: encoded if value is ENCODED else value, (call.args, call.kwargs))
            call = replace(call, args=args, kwargs=kwargs)
        output = call.run(module, part_of(whole, call.own))
        states: Tensor = output[0] if isinstance(output, tuple) else output
        return with_part(whole, call.own, states)

    def own(self, block: Block, batch: int) -> Tensor:
        """Return the hidden states in the quantized network that a block is given, without those that it lets be."""
        return part_of(self.quantized[batch], self.calls[block.name][batch].own)

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
    batches: Sequence[Tensor],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    embeddings: Tensor | None = None,
    keep: Keep = list,
) -> Stream:
    """Run the network without its blocks: learn the inputs of the first one and the other arguments of all.

    Every block is replaced by a recorder that returns its input, so embeddings, masks and rotary tables are computed as
    the model does; they are in memory only for this.

    Args:
        model: whose blocks are to be calibrated.
        batches: (windows, seqlen) int64 each, with their sound where the network hears; of networks that take images (images,
            channels, height, width). By the first one blocks are looked at before all pass through.
        device, dtype: where and in what to compute; hidden states stay there.
        embeddings: (vocabulary, hidden) input embeddings of the quantized network, beside whose stream that of the original
            starts; None: those of the original, and one stream.
        keep: makes the lists that hold hidden states.

    Raises:
        ModelError: the blocks do not run one after the other, each on what the one before returned.
        CalibrationError: a token is not in the model's vocabulary.
    """
    place = torch.device(device)
    for part in batches if taken_by(model.network) is not Taken.IMAGES else ():
        check_vocabulary(part, len(model.network.get_input_embeddings().weight))
    firsts = [next(i for i, b in enumerate(model.blocks) if b.name.startswith(f"{stack}.")) for stack in model.stacks]
    tape = Tape([block.name for block in model.blocks], firsts)
    recorders = [Recorder(block.empty, index=index, tape=tape) for index, block in enumerate(model.blocks)]
    with model.around(recorders, place, dtype) as network, ExitStack() as opening:
        if (head := network.get_output_embeddings()) is not None:
            head.register_forward_pre_hook(stop)
        if len(firsts) > 1:
            tape.between = Between(network.get_encoder())
        for first in firsts:
            block = opening.enter_context(model.blocks[first].on(place, dtype, original=False))
            tape.opening[first] = block.quantized
        tape.probe(network, batches[0][:1], place)
        if not tape.opening:
            opening.close()
        original = None
        if embeddings is not None:
            original = tape.run(network, batches, place, keep)
            network.get_input_embeddings().weight.copy_(embeddings)
        hidden = tape.run(network, batches, place, keep)
    return Stream(hidden, tape.calls, original=original, extra=tape.extra, between=tape.between)


def places(model: Model, windows: Tensor) -> int:
    """Return how many hidden states a network has of a window: of both stacks, of patches of an image and what stands before."""
    return skeleton(model, [windows[:1]], device="cpu", dtype=torch.float32).quantized[0].shape[1]


@torch.no_grad()
def finish(model: Model, stream: Stream, tokens: Tensor, dtype: torch.dtype) -> None:
    """Move both streams from behind the last block to the head: past the last norm.

    Args:
        model: whose head is a module of its own.
        stream: from `skeleton`, advanced past all blocks.
        tokens: (windows, seqlen) that it was made of, extra ones last.
        dtype: in which to compute.
    """
    assert len(model.stacks) == 1, "heads behind a decoder are not quantized"
    entered: list[Tensor] = []

    def enter(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        entered.append(args[0])
        raise Stop

    with _behind(model, stream, stream.quantized[0].device, dtype, head=False) as (network, end):
        network.get_output_embeddings().register_forward_pre_hook(enter)
        for states in (stream.quantized, stream.original or []):
            for batch, (part, hidden) in enumerate(zip(tokens.split(stream.sizes), states, strict=False)):
                end.given, given = hidden, part.to(hidden.device)
                with suppress(Stop):
                    network(given, **words(network, given))
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
            tokens = tokens.to(hidden.device)
            end.given = hidden if len(model.stacks) == 1 else hidden[:, -tokens.shape[1] :]  # what the decoder is given
            output = functional_call(network, dict(given or {}), (main_input(network, tokens),), words(network, tokens))
            return read_out(network, output)

        yield logits


@contextmanager
def _behind(
    model: Model, stream: Stream, device: torch.device, dtype: torch.dtype, *, head: bool
) -> Iterator[tuple[PreTrainedModel, End]]:
    """Hold what follows the last block in memory: the network, and what to give the hidden states to."""
    ends = [End(block.empty, extra=extra) for block, extra in zip(model.blocks, stream.extra, strict=True)]
    with model.around(ends, device, dtype, head=head) as network:
        yield network, ends[-1]


def finite(hidden: Tensor, block: Block) -> Tensor:
    """Return what comes out of a block, if it is finite."""
    if not torch.isfinite(hidden).all():
        raise CalibrationError(f"{block.name} returns NaN or Inf. Check the checkpoint, or compute in a wider dtype.")
    return hidden

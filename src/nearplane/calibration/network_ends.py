"""What follows the last block of a network: its last norm and its head, run on the hidden states of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from nearplane.calibration.activations import Stream
from nearplane.calibration.recorder import StandIn, Stop, split_arguments, zeros
from nearplane.models.kinds import call_kwargs, main_input, read_out
from nearplane.models.model import Model


class End(StandIn):
    """Stand-in that returns `states`, or its input if that is None, in the form of the block's output."""

    states: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = split_arguments(args, kwargs)[0] if self.states is None else self.states
        return hidden if self.extra is None else (hidden, *zeros(self.extra))


@torch.no_grad()
def finish(model: Model, stream: Stream, tokens: Tensor, dtype: torch.dtype) -> None:
    """Move both streams from the output of the last block to the input of the head: through the last norm.

    Args:
        model: A model whose head is a module of its own.
        stream: The stream that `skeleton` made of `tokens`, advanced past all blocks.
        tokens: (windows, seqlen) calibration tokens of the batches of the stream, extra windows last.
        dtype: Dtype of the computation.
    """
    assert len(model.stacks) == 1, "the head of a decoder with an encoder is not quantized"
    head_inputs: list[Tensor] = []

    def capture(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        head_inputs.append(args[0])
        raise Stop

    with _network_ends(model, stream, stream.quantized[0].device, dtype, head=False) as (network, end):
        network.get_output_embeddings().register_forward_pre_hook(capture)
        for states in (stream.quantized, stream.original or []):
            for batch, (part, hidden) in enumerate(zip(tokens.split(stream.sizes), states, strict=False)):
                end.states, tokens_here = hidden, part.to(hidden.device)
                with suppress(Stop):
                    network(tokens_here, **call_kwargs(network, tokens_here))
                states[batch] = head_inputs.pop()


@contextmanager
def readout(
    model: Model, stream: Stream, *, device: torch.device | str, dtype: torch.dtype
) -> Iterator[Callable[..., Tensor]]:
    """Load what follows the last block; yield the function logits(tokens, hidden) -> (windows, seqlen, vocabulary).

    For a network without head, the function returns the last hidden states instead of logits. Gradients flow to the
    hidden states if autograd is on, and to the tensors of an optional third argument, {parameter name: tensor}, which
    replace parameters of the network.

    Args:
        model: The model that is read out.
        stream: A stream that `skeleton` made of this model.
        device, dtype: Device and dtype of the computation.
    """
    with _network_ends(model, stream, torch.device(device), dtype, head=True) as (network, end):

        def logits(tokens: Tensor, hidden: Tensor, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
            tokens = tokens.to(hidden.device)
            end.states = hidden if len(model.stacks) == 1 else hidden[:, -tokens.shape[1] :]  # the decoder's positions
            output = functional_call(
                network, dict(parameters or {}), (main_input(network, tokens),), call_kwargs(network, tokens)
            )
            return read_out(network, output)

        yield logits


@contextmanager
def _network_ends(
    model: Model, stream: Stream, device: torch.device, dtype: torch.dtype, *, head: bool
) -> Iterator[tuple[PreTrainedModel, End]]:
    """Load the network without its blocks; yield it and the stand-in that passes hidden states on as the last block."""
    ends = [End(block.empty, extra=extra) for block, extra in zip(model.blocks, stream.extra, strict=True)]
    with model.around(ends, device, dtype, head=head) as network:
        yield network, ends[-1]

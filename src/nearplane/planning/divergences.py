"""What rounded layers cost the network together: the divergence of its predictions, measured on several texts in one pass."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from nearplane.calibration.activations import Stream
from nearplane.calibration.network_ends import readout
from nearplane.calibration.positions import PositionWeights
from nearplane.calibration.windows import joined_windows
from nearplane.errors import CalibrationError
from nearplane.models.divergence import NOTHING_TO_MEASURE, Divergence, distance, divergence, predicts_always_the_same
from nearplane.models.kinds import has_head
from nearplane.models.model import Model
from nearplane.planning.estimates import inputs_of, stream_of
from nearplane.planning.parts import windows_at_once
from nearplane.planning.roundings import Rounding, rounded_inputs
from nearplane.system.memory import release
from nearplane.system.progress import Progress, Tracked, silent

COMPARED_LOGITS = 1 << 26  # logits in memory at a time


@torch.no_grad()
def divergences(
    model: Model,
    fitted: Tensor,
    unseen: Sequence[Tensor],
    roundings: Mapping[str, Rounding],
    positions: Mapping[str, PositionWeights],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    progress: Progress = silent,
) -> list[float]:
    """Measure KL(original || network with layers rounded together), nats per scored token.

    One block is in memory at a time. Layers are rounded as in `estimated`, by moments of the original network.

    Args:
        unseen: (windows, seqlen) tokens that are scored, of each text.
        roundings: How layers are rounded, by name; others stay as they are.
        positions: Weights of positions by layer.
        model, fitted, device, dtype, progress: See `estimated`.

    Returns:
        One number for each text. Without a head, the divergence of the last hidden states, see `distance`.

    Raises:
        CalibrationError: The original's predictions do not depend on the text, or predictions are not finite.
    """
    stream = stream_of(model, fitted, joined_windows([*unseen]), positions, device, dtype)
    places = range(stream.dealt.fitted, len(stream.sizes))
    rounded = [stream.quantized[place] for place in places]  # hidden states of the rounded network, batch by batch
    total = len(model.blocks)
    blocks = Tracked(model.in_turn(model.blocks, device), "measuring", total, blocks=[1] * total)
    for block in progress(blocks, "measuring the choice", total):
        with block.on(device, dtype, original=False), ExitStack() as hooks:
            changed = []
            for layer, _, inputs in inputs_of(block, stream):
                if (rounding := roundings.get(layer.name)) is not None:
                    changed.append((layer, rounding(layer.read(), inputs, None)))
            for layer, (values, _, how) in changed:
                layer.write(values)
                if how is not None:
                    hooks.enter_context(layer.replacing(partial(rounded_inputs, how=how)))
            rounded = [
                stream.forward(block, block.quantized, place, x, trial=True)
                for place, x in zip(places, rounded, strict=True)
            ]
            stream.passed(block)
            del changed
        release()
    windows = [torch.cat([*states]) for states in ([stream.quantized[place] for place in places], rounded)]
    counts = [len(tokens) for tokens in unseen]
    texts = zip(unseen, *(states.split(counts) for states in windows), strict=True)
    return _losses(model, stream, [*texts], device, dtype)


def _losses(
    model: Model,
    stream: Stream,
    texts: Sequence[tuple[Tensor, Tensor, Tensor]],
    device: torch.device,
    dtype: torch.dtype,
) -> list[float]:
    """Return the divergence of predictions, nats per scored token.

    Args:
        model, stream, device, dtype: Arguments and stream of the measurement.
        texts: Tokens of each text, and the hidden states after the last block of both networks.
    """
    found, varies = list[float](), False
    with readout(model, stream, device=device, dtype=dtype) as logits:
        head = has_head(model.network)
        ends = model.network.get_output_embeddings() if head else model.network.get_input_embeddings()
        width = ends.weight.shape[0 if head else 1]

        def predicted(part: Tensor, hidden: Tensor) -> Tensor:
            if not head:
                return logits(part, hidden)
            scored = logits(part, hidden)[:, :-1]
            return scored.to(torch.promote_types(scored.dtype, torch.float32)).log_softmax(-1)

        for tokens, *states in texts:
            windows = min(windows_at_once(tokens), max(1, COMPARED_LOGITS // (width * tokens.shape[1])))
            total = Divergence()
            for part, x, x_hat in zip(*(each.split(windows) for each in (tokens, *states)), strict=True):
                expected = predicted(part, x)
                varies |= not head or not predicts_always_the_same(expected)
                total += (divergence if head else distance)(expected, predicted(part, x_hat))
            found.append(total.kl / total.tokens)
    if not varies:
        raise CalibrationError(NOTHING_TO_MEASURE)
    if not all(math.isfinite(loss) for loss in found):
        raise CalibrationError("The network's predictions are NaN or Inf. Check the checkpoint.")
    return found

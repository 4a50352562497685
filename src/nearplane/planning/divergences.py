"""What rounded layers cost the network together: the divergence of its predictions, measured on several texts in one pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from nearplane.calibration.activations import Stream
from nearplane.calibration.network_ends import readout
from nearplane.calibration.positions import PositionWeights
from nearplane.calibration.states_on_disk import Keep
from nearplane.calibration.windows import joined_windows
from nearplane.errors import CalibrationError
from nearplane.models.divergence import NOTHING_TO_MEASURE, Divergence, distance, divergence, predicts_always_the_same
from nearplane.models.kinds import continues_text, has_head
from nearplane.models.model import Model
from nearplane.planning.estimates import inputs_of, stream_of
from nearplane.planning.roundings import Rounding, rounded_inputs
from nearplane.system.memory import release
from nearplane.system.progress import Progress, Tracked, silent

COMPARED_LOGITS = 1 << 24  # logits of each network in memory at a time


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
    keep: Keep = list,
    progress: Progress = silent,
) -> list[float]:
    """Measure KL(original || network with layers rounded together), nats per scored token.

    One block is in memory at a time. Layers are rounded as in `estimated`, by moments of the original network.

    Args:
        unseen: (windows, seqlen) tokens that are scored, of each text.
        roundings: How layers are rounded, by name; others stay as they are.
        positions: Weights of positions by layer.
        model, fitted, device, dtype, keep, progress: See `estimated`.

    Returns:
        One number for each text. Without a head, the divergence of the last hidden states, see `distance`.

    Raises:
        CalibrationError: The original's predictions do not depend on the text, or predictions are not finite.
    """
    stream = stream_of(model, fitted, joined_windows([*unseen]), positions, device, dtype, keep)
    places = range(stream.dealt.fitted, len(stream.sizes))
    rounded = keep(stream.quantized[place] for place in places)  # hidden states of the rounded network, batch by batch
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
            for number, place in enumerate(places):
                rounded[number] = stream.forward(block, block.quantized, place, rounded[number], trial=True)
            stream.passed(block)
            del changed
        release()
    windows = [torch.cat([stream.quantized[place] for place in places]), torch.cat([*rounded])]
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
        head, whole = has_head(model.network), not continues_text(model.network)
        ends = model.network.get_output_embeddings() if head else model.network.get_input_embeddings()
        width = ends.weight.shape[0 if head else 1]

        def predicted(part: Tensor, hidden: Tensor) -> Tensor:
            scored = logits(part, hidden)
            if not head:
                return scored
            scored = scored[:, :-1] if whole else scored
            return scored.to(torch.promote_types(scored.dtype, torch.float32)).log_softmax(-1)

        for text in texts:
            total = Divergence()
            for part, x, x_hat in _parts(text, max(1, COMPARED_LOGITS // width), whole=whole):
                expected = predicted(part, x)
                varies |= not head or (expected[..., 0].numel() > 1 and not predicts_always_the_same(expected))
                total += (divergence if head else distance)(expected, predicted(part, x_hat))
            found.append(total.kl / total.tokens)
    if not varies:
        raise CalibrationError(NOTHING_TO_MEASURE)
    if not all(math.isfinite(loss) for loss in found):
        raise CalibrationError("The network's predictions are NaN or Inf. Check the checkpoint.")
    return found


def _parts(text: tuple[Tensor, Tensor, Tensor], tokens: int, *, whole: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the parts of a text whose predictions are in memory at a time: all positions but the last of each window.

    Args:
        text: (windows, seqlen) tokens and (windows, seqlen, hidden) states of both networks.
        tokens: Number of tokens of a part.
        whole: Whether windows stay whole with their last position, as networks need them that do not continue text.
    """
    length = text[0].shape[1]
    for one, x, x_hat in zip(*(each.split(max(1, tokens // length)) for each in text), strict=True):
        if whole:  # states of an encoder stand before those of the decoder
            yield one, x, x_hat
            continue
        for start in range(0, length - 1, tokens):
            here = slice(start, min(start + tokens, length - 1))
            yield one[:, here], x[:, here], x_hat[:, here]

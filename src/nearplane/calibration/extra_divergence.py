"""KL of the quantized network's predictions from the original's on the extra windows, from both streams behind the last block.

Only the last norm and the head run, with the original's weights also where the head is quantized afterwards. Where targets are not
corrected, the original's blocks run once on these windows. The KL is the same on any number of ranks: windows are added in their
order.
"""

from __future__ import annotations

import logging
import math
from collections.abc import MutableSequence

import torch
from torch import Tensor

from nearplane.calibration.activations import Stream, skeleton
from nearplane.calibration.network_ends import readout
from nearplane.calibration.states_on_disk import Keep
from nearplane.models.kinds import continues_text
from nearplane.models.model import Model

COMPARED_LOGITS = 2**20  # of each network that are compared at a time
log = logging.getLogger("nearplane")


def is_compared(model: Model, stream: Stream | None) -> bool:
    """Return whether predictions on extra windows are compared: of networks that continue text, where there are such windows."""
    return stream is not None and stream.dealt.extra_windows > 0 and continues_text(model.network)


@torch.no_grad()
def extra_divergence(
    model: Model, stream: Stream, batches: list[torch.Tensor], dtype: torch.dtype, keep: Keep
) -> float | None:
    """Return the mean KL(original || quantized) in nats over all tokens of the extra windows but the last of each.

    Args:
        model: The original model.
        stream: The stream behind the last block, of both networks or of the quantized one alone.
        batches: (windows, seqlen) tokens of this rank's batches.
        dtype: Dtype of the computation.
        keep: Function that makes lists of hidden states.

    Returns:
        The divergence; None on ranks that follow, and if it is not finite.
    """
    dealt, place = stream.dealt, stream.quantized[0].device
    originals: MutableSequence[Tensor] | dict[int, Tensor] | None = stream.original
    if originals is None:
        outputs = _outputs(model, batches[dealt.fitted :], place, dtype, keep)
        originals = dict(enumerate(outputs, dealt.fitted))
    sums: list[tuple[int, int, float]] = []  # window, tokens, KL of all together
    with readout(model, stream, device=place, dtype=dtype) as logits:
        for batch in range(dealt.fitted, len(batches)):
            tokens, both = batches[batch], (originals[batch], stream.quantized[batch])
            for window in range(len(tokens)):
                total = torch.zeros((), dtype=torch.float64, device=place)
                last = tokens.shape[1] - 1
                step = max(1, COMPARED_LOGITS // len(model.network.get_input_embeddings().weight))
                for start in range(0, last, step):
                    part = slice(start, min(start + step, last))
                    one = slice(window, window + 1)
                    true, other = (logits(tokens[one, part], each[one, part].to(place)).float() for each in both)
                    true, other = true.log_softmax(-1), other.log_softmax(-1)
                    chances = true.exp()  # 0 of tokens that the original excludes, whose logits may be minus infinity
                    total += (chances * (true - other)).masked_fill(chances == 0, 0).sum(-1).double().sum()
                    del true, other, chances
                sums.append((dealt.starts[batch] + window, last, float(total)))
    every = sorted(each for some in dealt.ranks.gather(sums) for each in some)
    if not dealt.ranks.leads:
        return None
    mean = sum(kl for *_, kl in every) / sum(count for _, count, _ in every)
    if not math.isfinite(mean):
        log.warning(
            "the KL on the extra windows is %s and is not recorded: the quantized network excludes tokens", mean
        )
        return None
    return mean


def _outputs(
    model: Model, batches: list[Tensor], place: torch.device, dtype: torch.dtype, keep: Keep
) -> MutableSequence[Tensor]:
    """Return the outputs of the original's last block, which is read from disk once more with all others."""
    if not batches:
        return []  # other ranks have the extra windows
    tuned, model.tuned = model.tuned, {}
    try:
        stream = skeleton(model, batches, device=place, dtype=dtype, keep=keep)
        for block in model.in_turn(model.blocks, place):
            with block.on(place, dtype, original=False):
                stream.advance(block)
    finally:
        model.tuned = tuned
    return stream.quantized

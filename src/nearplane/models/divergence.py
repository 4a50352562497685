"""Divergence between the outputs of two networks: predictions of tokens, or hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SAME_PREDICTIONS = 1e-5  # largest difference of log-probabilities that counts as rounding
COMPARED_TOKENS = 64  # tokens whose predictions are compared with each other
NOTHING_TO_MEASURE = (
    "The model predicts the same for every token of the calibration text, so the effect of errors on its predictions "
    "cannot be measured. Check the checkpoint and the text."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Divergence between two networks as sums over tokens, so that batches can be added.

    Args:
        kl: Sum of KL(original || quantized) in nats.
        agreed: Number of tokens at which both networks predict the same token as most likely.
        tokens: Number of tokens compared.
    """

    kl: float = 0.0
    agreed: int = 0
    tokens: int = 0

    def __add__(self, other: Divergence) -> Divergence:
        return Divergence(kl=self.kl + other.kl, agreed=self.agreed + other.agreed, tokens=self.tokens + other.tokens)


def predicts_always_the_same(predicted: Tensor) -> bool:
    """Return whether log-probabilities (..., vocabulary) at several evenly spaced tokens are equal up to rounding."""
    rows = predicted.flatten(0, -2)
    rows = rows[:: -(-len(rows) // COMPARED_TOKENS)]
    return len(rows) > 1 and float((rows - rows[0]).abs().max()) < SAME_PREDICTIONS


def divergence(original: Tensor, quantized: Tensor) -> Divergence:
    """Compare the predictions of two networks at the same positions.

    Args:
        original, quantized: (..., vocabulary) log-probabilities in float32.
    """
    kl = (original.exp() * (original - quantized)).sum(-1).double().sum()
    agreed = (original.argmax(-1) == quantized.argmax(-1)).sum()
    sums = torch.stack([kl, agreed.double()]).tolist()  # a device is waited for once
    return Divergence(kl=sums[0], agreed=int(sums[1]), tokens=original[..., 0].numel())


def distance(original: Tensor, quantized: Tensor) -> Divergence:
    """Compare the last hidden states (..., hidden) of two networks, each taken as the mean of a normal distribution.

    Its standard deviation s is the root mean square of the original hidden state: `KL = |x - y|^2 / (2 s^2)`.
    """
    original, quantized = original.float(), quantized.float()
    variance = original.square().mean(-1).clamp(min=1e-30)
    kl = ((original - quantized).square().sum(-1) / (2 * variance)).double().sum()
    return Divergence(kl=float(kl), tokens=original[..., 0].numel())

"""How far two networks' predictions are apart: KL(original || quantized) in nats per token, and top-1 agreement.

Of networks without head, which predict nothing, how far their last hidden states are.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Sums over tokens, so that batches add up.

    Args:
        kl: sum of KL(original || quantized), nats.
        agreed: tokens at which both networks hold the same one for the most likely.
        tokens: that were compared.
    """

    kl: float = 0.0
    agreed: int = 0
    tokens: int = 0

    def __add__(self, other: Divergence) -> Divergence:
        return Divergence(kl=self.kl + other.kl, agreed=self.agreed + other.agreed, tokens=self.tokens + other.tokens)


def divergence(original: Tensor, quantized: Tensor) -> Divergence:
    """Compare the predictions of two networks at the same positions.

    Args:
        original, quantized: (..., vocabulary) log-probabilities in float32.
    """
    kl = (original.exp() * (original - quantized)).sum(-1).double().sum()
    agreed = (original.argmax(-1) == quantized.argmax(-1)).sum()
    return Divergence(kl=float(kl), agreed=int(agreed), tokens=original[..., 0].numel())


def distance(original: Tensor, quantized: Tensor) -> Divergence:
    """Compare the last hidden states of two networks (..., hidden), as if each were the mean of a normal distribution.

    Its standard deviation is the root mean square of the original's token, in every direction: `KL = |x - y|^2 / (2 s^2)`.
    """
    original, quantized = original.float(), quantized.float()
    variance = original.square().mean(-1).clamp(min=1e-30)
    kl = ((original - quantized).square().sum(-1) / (2 * variance)).double().sum()
    return Divergence(kl=float(kl), tokens=original[..., 0].numel())

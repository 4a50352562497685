"""Statistics of predictions: figures of each scored token from the logits of one or two networks, and their summary.

It knows neither models nor files. Means have a 95 % interval from a bootstrap over windows, since tokens of one window are
not independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

RESAMPLES, SEED = 2000, 0  # of the bootstrap
MIN_WINDOWS = 8  # of a bootstrap: of fewer, resamples are too much alike
SHARES = (0.5, 0.99, 0.999, 1.0)  # of the tokens, below which the KL is stated
OUTSIDE = 2.5  # percent of the resamples below the interval, and above it
LEAST_LOG, INFINITE = -1e300, 1e200  # log-probability in place of minus infinity, and means that it makes infinite
COUNTS = 1 << 22  # numbers in a part of the bootstrap


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Figures of every scored token in its order; all tensors are one-dimensional and equally long.

    Args:
        window: Index of the token's window.
        position: Number of tokens before it in its window, from which it is predicted.
        nll: Negative log-likelihood in nats, float64.
        original_nll: The same of the original; None, like all that follow, without an original.
        kl: KL(original || model) in nats, float64.
        reverse_kl: KL(model || original) in nats, float64.
        same_top: Whether both networks have the same most likely token.
    """

    window: Tensor
    position: Tensor
    nll: Tensor
    original_nll: Tensor | None = None
    kl: Tensor | None = None
    reverse_kl: Tensor | None = None
    same_top: Tensor | None = None

    @classmethod
    def joined(cls, parts: Sequence[TokenScores]) -> TokenScores:
        """Return the tokens of all parts in the order of their windows."""
        order = torch.argsort(torch.cat([part.window for part in parts]), stable=True)
        return cls(
            **{
                name: torch.cat([getattr(part, name) for part in parts])[order]
                for name in cls.__slots__
                if getattr(parts[0], name) is not None
            }
        )

    @property
    def probability_change(self) -> Tensor:
        """Probability of the right token in the model minus that in the original."""
        assert self.original_nll is not None
        return (-self.nll).exp() - (-self.original_nll).exp()


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure with its 95 % interval from a bootstrap over windows; fewer than `MIN_WINDOWS` have no interval."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionRange:
    """KL(original || model) at the positions from `first` to `last`, in nats per token.

    Args:
        first, last: Least and largest number of tokens before the scored token in its window.
        tokens: Number of scored tokens.
        kl: Mean of their KL.
    """

    first: int
    last: int
    tokens: int
    kl: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Summary of the scored tokens; all but the perplexity are None without an original.

    Args:
        perplexity: exp of the mean negative log-likelihood per token.
        original_perplexity: The same of the original.
        perplexity_ratio: The model's perplexity divided by the original's.
        kl: Mean KL(original || model) in nats per token.
        reverse_kl: Mean KL(model || original) in nats per token.
        kl_median, kl_99, kl_999, kl_max: Quantiles of KL(original || model) over tokens, interpolated linearly.
        same_top: Share of tokens for which both networks have the same most likely token.
        probability_change: Mean change of the probability of the right token, from -1 to 1.
        probability_change_rms: Root mean square of this change.
        by_position: KL(original || model) at positions 1, 2 to 3, 4 to 7 and so on.
    """

    perplexity: Estimate
    original_perplexity: Estimate | None = None
    perplexity_ratio: Estimate | None = None
    kl: Estimate | None = None
    reverse_kl: Estimate | None = None
    kl_median: float | None = None
    kl_99: float | None = None
    kl_999: float | None = None
    kl_max: float | None = None
    same_top: Estimate | None = None
    probability_change: Estimate | None = None
    probability_change_rms: Estimate | None = None
    by_position: tuple[PositionRange, ...] = ()


def score_tokens(
    logits: Sequence[Tensor], targets: Tensor, *, window: Tensor, position: Tensor
) -> tuple[TokenScores, list[Tensor]]:
    """Return the figures of some tokens, and the log-probabilities (tokens, vocabulary) of each network in float64.

    Args:
        logits: (tokens, vocabulary) of the model, and perhaps of the original.
        targets: (tokens,) right tokens.
        window, position: (tokens,) see `TokenScores`.
    """
    predicted = [each.double().log_softmax(-1) for each in logits]
    nll = [-each.gather(-1, targets[:, None])[:, 0].cpu() for each in predicted]
    if len(predicted) == 1:
        return TokenScores(window=window, position=position, nll=nll[0]), predicted
    same = predicted[0].argmax(-1) == predicted[1].argmax(-1)
    model, original = (each.clamp_(min=LEAST_LOG) for each in predicted)
    difference = original - model
    return TokenScores(
        window=window,
        position=position,
        nll=nll[0],
        original_nll=nll[1],
        kl=_expected(original, difference),
        reverse_kl=_expected(model, difference.neg_()),
        same_top=same.cpu(),
    ), predicted


def _expected(log_probabilities: Tensor, values: Tensor) -> Tensor:
    """Return the means of values (tokens, vocabulary) over a distribution; tokens of probability 0 count for nothing."""
    means = log_probabilities.exp().mul_(values).sum(-1)  # exp(LEAST_LOG) is 0, and no mask as large as they is needed
    return means.clamp_(min=0).masked_fill_(means > INFINITE, math.inf).cpu()


def summarize(scores: TokenScores) -> Statistics:
    """Return the summary of scored tokens, with intervals from `RESAMPLES` resamples of their windows."""
    columns = {"nll": scores.nll}
    if scores.original_nll is not None and scores.kl is not None:
        assert scores.reverse_kl is not None
        assert scores.same_top is not None
        change = scores.probability_change
        columns |= {
            "original": scores.original_nll,
            "kl": scores.kl,
            "reverse": scores.reverse_kl,
            "same": scores.same_top.double(),
            "change": change,
            "square": change.square(),
        }
    means = _Means(scores.window, columns)
    if scores.kl is None:
        return Statistics(perplexity=means.estimate(lambda mean: _exp(mean["nll"])))
    kl, finite = scores.kl.numpy(), bool(scores.kl.isfinite().all())  # between a number and infinity lies none
    quantiles = np.quantile(kl, SHARES) if finite else np.quantile(kl, SHARES, method="lower")
    median, ninety_nine, nine, largest = quantiles.tolist()
    return Statistics(
        perplexity=means.estimate(lambda mean: _exp(mean["nll"])),
        original_perplexity=means.estimate(lambda mean: _exp(mean["original"])),
        perplexity_ratio=means.estimate(lambda mean: _exp(mean["nll"] - mean["original"])),
        kl=means.estimate(lambda mean: mean["kl"]),
        reverse_kl=means.estimate(lambda mean: mean["reverse"]),
        kl_median=median,
        kl_99=ninety_nine,
        kl_999=nine,
        kl_max=largest,
        same_top=means.estimate(lambda mean: mean["same"]),
        probability_change=means.estimate(lambda mean: mean["change"]),
        probability_change_rms=means.estimate(lambda mean: np.sqrt(mean["square"])),
        by_position=_by_position(scores),
    )


def _by_position(scores: TokenScores) -> tuple[PositionRange, ...]:
    """Return the KL at positions 1, 2 to 3, 4 to 7 and so on."""
    assert scores.kl is not None
    ranges, first, end = [], 1, int(scores.position.max())
    while first <= end:
        last = min(2 * first - 1, end)
        inside = (scores.position >= first) & (scores.position <= last)
        if tokens := int(inside.sum()):
            means = _Means(scores.window[inside], {"kl": scores.kl[inside]})
            estimate = means.estimate(lambda mean: mean["kl"])
            ranges.append(PositionRange(first=first, last=last, tokens=tokens, kl=estimate))
        first = last + 1
    return tuple(ranges)


class _Means:
    """Means of columns over all tokens, and over the tokens of resampled windows.

    Args:
        window: (tokens,) index of each token's window.
        columns: {name: (tokens,) values}.
    """

    def __init__(self, window: Tensor, columns: dict[str, Tensor]) -> None:
        names, index = window.unique(return_inverse=True)
        count, columns = len(names), {**columns, "tokens": torch.ones(len(window), dtype=torch.float64)}
        sums = torch.zeros(count, len(columns), dtype=torch.float64)
        sums.index_add_(0, index, torch.stack(list(columns.values()), 1).double())
        self.mean = self._divided(columns, sums.sum(0, keepdim=True))
        self.resampled = None
        if count >= MIN_WINDOWS:
            generator, parts = torch.Generator().manual_seed(SEED), []
            size = max(1, COUNTS // count)
            for begin in range(0, RESAMPLES, size):
                shape = min(size, RESAMPLES - begin), count
                drawn, once = torch.randint(count, shape, generator=generator), torch.ones(shape, dtype=torch.float64)
                times = torch.zeros_like(once).scatter_add_(1, drawn, once)
                parts.append(times @ sums)
            self.resampled = self._divided(columns, torch.cat(parts))

    @staticmethod
    def _divided(columns: dict[str, Tensor], sums: Tensor) -> dict[str, np.ndarray]:
        return dict(zip(columns, (sums[:, :-1] / sums[:, -1:]).numpy().T, strict=False))

    def estimate(self, figure: Callable[[dict[str, np.ndarray]], np.ndarray]) -> Estimate:
        """Return a figure of the means with its interval."""
        value = float(figure(self.mean)[0])
        if self.resampled is None or not math.isfinite(value):
            return Estimate(value=value)
        low, high = np.percentile(figure(self.resampled), (OUTSIDE, 100 - OUTSIDE))
        return Estimate(value=value, low=float(low), high=float(high))


def _exp(nats: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(nats))

"""Second moments of the rows that a layer multiplies, the sums that they are made of, and the target that follows from them.

The network upstream is quantized, so the layer really sees `X_hat`, while its target is `X W^T` of the original network.
Minimising `||X W^T + r - X_hat values^T - r_hat||^2` moves the target of the lattice problem from `W` to `W + Delta`.

Knows neither layers nor where rows come from: plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nearplane.lattice.factor import Factor, total

SPAN = 256  # columns of a block of `X^T X`; of symmetric sums half of the blocks are formed


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """Rows that nothing is fitted to: on them the outputs of a layer are compared with the original's.

    Args:
        X_hat: (rows, in) of the quantized network's inputs.
        X: (rows, in) the same of the original network; None where it did not run.
    """

    X_hat: Tensor
    X: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Second moments of the rows that a layer multiplies, averaged over tokens.

    Args:
        H: (in, in) float64, `X_hat^T X_hat / tokens` of the quantized network's inputs.
        tokens: rows that were averaged.
        C: (in, in) float64, `X^T X_hat / tokens` with X the original network's inputs; None where no correction is wanted,
            or `lost` says what it would.
        lost: (out, in) float64, `E[(W x + r - W x_hat - r_hat) x_hat^T]`: what the layer's output has lost before it is quantized,
            with the residual stream r that it is added to, against its inputs; None where `C` says it, `W (C - H)`.
        held_out: the same moments over the last fifth of the windows alone (they are part of the whole), in the dtype of the rows;
            None without a correction.
        extra: rows of windows that entered none of the above; None where there were none, or no row of them came here.
        alive: (in,) bool, inputs that were not 0 at some token in the original network; None where it did not run.
        alike: of an expert, the share of its rows whose tokens the original network sends to it as well; None of others, or where
            it did not run.
        blended: of an expert, how many of `tokens` stand for the mean over all experts of its block; None of others.
    """

    H: Tensor
    tokens: int
    C: Tensor | None = None
    lost: Tensor | None = None
    held_out: Moments | None = None
    extra: Extra | None = None
    alive: Tensor | None = None
    alike: float | None = None
    blended: int | None = None

    @property
    def corrects(self) -> bool:
        """Whether they tell what the quantized inputs have lost."""
        return self.C is not None or self.lost is not None


@dataclass(slots=True)
class MomentSums:
    """Sums, not yet divided by tokens, H in its upper triangle only.

    `alive` counts the batches in which an input of the original network was not 0; `dtype` is that of the rows.
    """

    H: Tensor | None = None
    alive: Tensor | None = None
    C: Tensor | None = None
    lost: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0
    dtype: torch.dtype = torch.float64

    def add(
        self,
        X_hat: Tensor,
        X: Tensor | None = None,
        outputs: Mapping[str, Tensor] | None = None,
        *,
        crossed: bool = True,
    ) -> None:
        """Add rows of one batch.

        Args:
            X_hat: (rows, in) of the quantized network's input.
            X: (rows, in) the same of the original network; None without a comparison.
            outputs: (rows, out) `W x + r - W x_hat - r_hat`, by layer: what its outputs have lost.
            crossed: whether to sum C; not needed where all layers are among `outputs`.
        """
        if not len(X_hat):
            return
        self.tokens, self.dtype = self.tokens + len(X_hat), X_hat.dtype
        self.H = _plus_gram(self.H, X_hat)
        if X is not None:
            self.C = _plus(self.C, X.T @ X_hat) if crossed else None
            self.alive = _plus(self.alive, X.any(0))
            for name, difference in (outputs or {}).items():
                self.lost[name] = _plus(self.lost.get(name), difference.T @ X_hat)

    def absorb(self, other: MomentSums) -> None:
        """Add other sums to these, in place."""
        pairs = (self.H, other.H), (self.C, other.C), (self.alive, other.alive)
        self.H, self.C, self.alive = (self._sum(*pair) for pair in pairs)
        for name, lost in other.lost.items():
            self.lost[name] = self.lost[name].add_(lost) if name in self.lost else lost.clone()
        self.tokens += other.tokens

    def blend(self, other: MomentSums, share: float) -> None:
        """Add a share of other sums, which stay as they are."""
        H, C = (None if sums is None else sums * share for sums in (other.H, other.C))
        self.dtype = self.dtype if self.tokens else other.dtype
        self.absorb(MomentSums(H=H, alive=other.alive, C=C, tokens=round(other.tokens * share)))

    @staticmethod
    def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        if b is None:
            return a
        return b.clone() if a is None else a.add_(b)

    def means(self, total: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float64) -> MomentSums:
        """Return the means over the tokens, whole, in `dtype`, of float64 in the memory of the sums, which are gone then.

        `total` adds up the sums of all ranks in place.
        """
        tokens = int(total(torch.tensor(self.tokens)))

        def mean(x: Tensor) -> Tensor:
            return total(x).div_(tokens).to(dtype)

        lost = {name: mean(self.lost.pop(name)) for name in [*self.lost]}
        H, self.H = None if self.H is None else _mirrored(mean(self.H)), None
        C, self.C = None if self.C is None else mean(self.C), None
        alive = None if self.alive is None else total(self.alive) > 0
        return MomentSums(H=H, alive=alive, C=C, lost=lost, tokens=tokens)

    def of(self, name: str, held: MomentSums | None) -> Moments:
        """Return what is known of one layer."""
        assert self.H is not None, "no row was added"
        apart = None if held is None else held.of(name, None)
        lost = self.lost.get(name)
        C = self.C if lost is None else None
        return Moments(H=self.H, C=C, lost=lost, tokens=self.tokens, held_out=apart, alive=self.alive)


@dataclass(slots=True)
class ExtraRows:
    """Rows of extra windows, as they come."""

    X_hat: list[Tensor] = field(default_factory=list)  # (rows, in) each
    X: list[Tensor] = field(default_factory=list)

    def add(self, X_hat: Tensor, X: Tensor | None = None) -> None:
        """Keep a copy of rows (rows, in) of one batch, of the quantized and of the original network."""
        if len(X_hat):
            self.X_hat.append(X_hat.clone())
            self.X += [] if X is None else [X.clone()]

    def together(self) -> Extra | None:
        """Return all rows, no longer kept here; None if there were none."""
        if not self.X_hat:
            return None
        extra = Extra(X_hat=torch.cat(self.X_hat), X=torch.cat(self.X) if self.X else None)
        self.X_hat, self.X = [], []
        return extra


def mismatch(W: Tensor, H: Tensor, C: Tensor, S: Tensor | None) -> Tensor:
    """Return (out, in) `W (C - H) + S`: the part of the output that the quantized inputs lost, against those inputs.

    Products are formed in the dtype of `W`, of differences that are formed in that of the moments.

    Args:
        W: (out, in).
        H: (in, in) `X_hat^T X_hat / tokens`, undamped.
        C: (in, in) `X^T X_hat / tokens`.
        S: (out, in) `E[(r - r_hat) x_hat^T]` of the residual stream that the output is added to, or None.
    """
    apart = torch.empty(H.shape, dtype=W.dtype, device=W.device)
    for rows in torch.arange(len(H), device=W.device).split(512):  # never all of it in the dtype of the moments
        apart[rows] = (C[rows] - H[rows]).to(W.dtype)
    lost = W @ apart
    return lost if S is None else lost.add_(S)


def correction(lost: Tensor, factor: Factor) -> Tensor:
    """Return (out, in) `Delta = lost (H + lambda I)^-1`, the full correction of the weights."""
    return factor.solve(lost)


def trust(lost_held_out: Tensor, H_held_out: Tensor, Delta: Tensor) -> float:
    """Return in closed form how far to go along `Delta`: `rho` in [0, 1] with the least error on held-out tokens.

        rho = <lost_v, Delta> / tr(Delta H_v Delta^T)

    Args:
        lost_held_out: (out, in) `mismatch` of the held-out tokens.
        H_held_out: (in, in) of the held-out tokens.
        Delta: (out, in) correction fitted on the other tokens.
    """
    wide = H_held_out.dtype
    energy = float(total((Delta @ H_held_out.to(Delta.dtype)) * Delta, wide))
    if energy <= 0:
        return 0.0
    return min(1.0, max(0.0, float(total(lost_held_out * Delta, wide)) / energy))


def weighted_difference(whole: Tensor, tokens: int, part: Tensor, part_tokens: int) -> Tensor:
    """Return the average over the tokens of `whole` that are not in `part`, both averages over their tokens."""
    rest = tokens - part_tokens
    return (whole * (tokens / rest)).sub_(part, alpha=part_tokens / rest)


def _plus_gram(sums: Tensor | None, X: Tensor) -> Tensor:
    """Add `X^T X` of rows (rows, in), of which only the blocks on and above the diagonal are formed: see `_mirrored`."""
    n = X.shape[1]
    sums = torch.zeros(n, n, dtype=torch.float64, device=X.device) if sums is None else sums
    for a in range(0, n, SPAN):
        sums[a : a + SPAN, a:].add_(X[:, a : a + SPAN].T @ X[:, a:])
    return sums


def _mirrored(H: Tensor) -> Tensor:
    """Fill in the blocks below the diagonal, in place."""
    for a in range(0, len(H), SPAN):
        H[a + SPAN :, a : a + SPAN] = H[a : a + SPAN, a + SPAN :].T
    return H


def _plus(sums: Tensor | None, product: Tensor) -> Tensor:
    return product.double() if sums is None else sums.add_(product)

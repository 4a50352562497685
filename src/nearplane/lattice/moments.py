"""Second moments of the rows that a layer multiplies, and the sums that they are made of: plain tensors.

Knows neither layers nor where rows come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nearplane.lattice.root import TALL, append, combine

SPAN = 256  # columns of a block of `X^T X`; of symmetric sums half of the blocks are formed


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """Second moments of rows that nothing is fitted to: what the outputs of a layer differ by from the original's.

    Args:
        H: (in, in) float64, `X_hat^T X_hat / tokens`.
        K: (in, in) float64, `(X - X_hat)^T X_hat / tokens`; None where the original network did not run.
        Q: (in, in) float64, `(X - X_hat)^T (X - X_hat) / tokens`; None likewise.
    """

    H: Tensor
    K: Tensor | None = None
    Q: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Second moments of the rows that a layer multiplies, averaged over tokens.

    Args:
        H: (in, in) float64, `X_hat^T X_hat / tokens` of the quantized network's inputs.
        tokens: rows that were averaged.
        C: (in, in) float64, `X^T X_hat / tokens` with X the original network's inputs; None where no correction is wanted.
        S: (out, in) float64, `E[(r - r_hat) x_hat^T]`, the mismatch of the residual stream that the layer's output is
            added to; None where it is added to none.
        held_out: the same moments over the last fifth of the windows alone (they are part of the whole); None without C.
        root: (in, in) float64 upper triangular, `R^T R = tokens * H` from QR of the inputs; None where it was not asked for. With
            it the factor never sees H, which then serves the nearest loss and the right-hand side of the correction alone.
        fitting_root: the same of the tokens that are not held out, which the correction is first fitted on; None where
            none are held out. It cannot be had from the other: taking rows out of a root costs what squaring costs.
        extra: moments of windows that entered none of the above; None where there were none, or no row of them came here.
        alive: (in,) share of the tokens at which the input was not 0 in the original network; None without C.
    """

    H: Tensor
    tokens: int
    C: Tensor | None = None
    S: Tensor | None = None
    held_out: Moments | None = None
    root: Tensor | None = None
    fitting_root: Tensor | None = None
    extra: Extra | None = None
    alive: Tensor | None = None


@dataclass(slots=True)
class MomentSums:
    """Sums, not yet divided by tokens, H in its upper triangle only; if `rooted` the root of H as well.

    `waiting` are the rows that the root has not taken in yet; `alive` counts the tokens of the original network at which an input
    was not 0.
    """

    H: Tensor | None = None
    alive: Tensor | None = None
    C: Tensor | None = None
    S: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0
    rooted: bool = False
    R: Tensor | None = None
    waiting: list[Tensor] = field(default_factory=list)  # (rows, in) each

    def add(self, X_hat: Tensor, X: Tensor | None = None, residual: Mapping[str, Tensor] | None = None) -> None:
        """Add rows of one batch.

        Args:
            X_hat: (rows, in) of the quantized network's input.
            X: (rows, in) the same of the original network; None without a comparison.
            residual: (rows, out) `r - r_hat` of the residual stream, by layer.
        """
        if not len(X_hat):
            return
        self.tokens += len(X_hat)
        self.H = _plus_gram(self.H, X_hat)
        if self.rooted:
            self.waiting.append(X_hat)
            if sum(map(len, self.waiting)) >= TALL * X_hat.shape[1]:
                self.triangle()
        if X is not None:
            self.C = _plus(self.C, X.T @ X_hat)
            self.alive = _plus(self.alive, X.count_nonzero(0))
            for name, difference in (residual or {}).items():
                self.S[name] = _plus(self.S.get(name), difference.T @ X_hat)

    def triangle(self) -> Tensor | None:
        """Return the root of all rows so far, after taking in those that wait for a block worth its decomposition."""
        if self.waiting:
            rows, self.waiting = self.waiting, []
            self.R = append(self.R, torch.cat(rows))
        return self.R

    def absorb(self, other: MomentSums) -> None:
        """Add other sums to these, in place; the other root is handed over."""
        R, other.R = other.triangle(), None
        if R is not None:
            own = self.triangle()
            self.R = R if own is None else combine(own, R)
        self.H, self.C, self.alive = (
            self._sum(*pair) for pair in ((self.H, other.H), (self.C, other.C), (self.alive, other.alive))
        )
        for name, S in other.S.items():
            self.S[name] = self.S[name].add_(S) if name in self.S else S.clone()
        self.tokens += other.tokens

    @staticmethod
    def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        if b is None:
            return a
        return b.clone() if a is None else a.add_(b)

    def means(self, total: Callable[[Tensor], Tensor]) -> MomentSums:
        """Return the means over the tokens, whole, in the memory of the sums; `total` adds up the sums of all ranks in place."""
        tokens = int(total(torch.tensor(self.tokens)))

        S = {name: total(S).div_(tokens) for name, S in self.S.items()}
        H, alive, C = (None if x is None else total(x).div_(tokens) for x in (self.H, self.alive, self.C))
        _mirror(H)
        return MomentSums(H=H, alive=alive, C=C, S=S, tokens=tokens, R=self.triangle())

    def of(self, name: str, held: MomentSums | None, fitting_root: Tensor | None = None) -> Moments:
        """Return what is known of one layer."""
        assert self.H is not None, "no row was added"
        apart = None if held is None else held.of(name, None)
        S, R = self.S.get(name), self.R
        return Moments(
            H=self.H,
            C=self.C,
            S=S,
            tokens=self.tokens,
            held_out=apart,
            root=R,
            fitting_root=fitting_root,
            alive=self.alive,
        )


@dataclass(slots=True)
class ExtraSums:
    """Sums over extra windows, not yet divided by tokens, H and Q in the upper triangle only."""

    H: Tensor | None = None
    K: Tensor | None = None
    Q: Tensor | None = None
    tokens: int = 0

    def add(self, X_hat: Tensor, X: Tensor | None = None) -> None:
        """Add rows (rows, in) of one batch, of the quantized and of the original network."""
        if not len(X_hat):
            return
        self.tokens += len(X_hat)
        self.H = _plus_gram(self.H, X_hat)
        if X is not None:
            D = X - X_hat
            self.K, self.Q = _plus(self.K, D.T @ X_hat), _plus_gram(self.Q, D)

    def means(self, total: Callable[[Tensor], Tensor]) -> Extra | None:
        """Return the means over the tokens, in the memory of the sums; None if there were none."""
        tokens = int(total(torch.tensor(self.tokens)))
        H, K, Q = (None if x is None else total(x).div_(tokens) for x in (self.H, self.K, self.Q))
        _mirror(H)
        _mirror(Q)
        return None if H is None else Extra(H=H, K=K, Q=Q)


def _plus_gram(total: Tensor | None, X: Tensor) -> Tensor:
    """Add `X^T X` of rows (rows, in), of which only the blocks on and above the diagonal are formed: see `_mirror`."""
    n = X.shape[1]
    total = torch.zeros(n, n, dtype=torch.float64, device=X.device) if total is None else total
    for a in range(0, n, SPAN):
        total[a : a + SPAN, a:].add_(X[:, a : a + SPAN].T @ X[:, a:])
    return total


def _mirror(total: Tensor | None) -> None:
    """Fill in the blocks below the diagonal, in place."""
    for a in range(0, 0 if total is None else len(total), SPAN):
        assert total is not None
        total[a + SPAN :, a : a + SPAN] = total[a : a + SPAN, a + SPAN :].T


def _plus(total: Tensor | None, product: Tensor) -> Tensor:
    return product.double() if total is None else total.add_(product)

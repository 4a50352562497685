"""Second moments of the rows that a layer multiplies, and the sums that they are made of: plain tensors.

Knows neither layers nor where rows come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
        self.H, self.C, self.alive = (
            self._sum(*pair) for pair in ((self.H, other.H), (self.C, other.C), (self.alive, other.alive))
        )
        for name, lost in other.lost.items():
            self.lost[name] = self.lost[name].add_(lost) if name in self.lost else lost.clone()
        self.tokens += other.tokens

    def blend(self, other: MomentSums, share: float) -> None:
        """Add a share of other sums, which stay as they are."""
        H, C = other.H, other.C
        part = MomentSums(
            H=None if H is None else H * share,
            alive=other.alive,
            C=None if C is None else C * share,
            tokens=round(other.tokens * share),
        )
        self.dtype = self.dtype if self.tokens else other.dtype
        self.absorb(part)

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
        H, self.H = None if self.H is None else mean(self.H), None
        C, self.C = None if self.C is None else mean(self.C), None
        alive = None if self.alive is None else total(self.alive) > 0
        _mirror(H)
        return MomentSums(H=H, alive=alive, C=C, lost=lost, tokens=tokens)

    def of(self, name: str, held: MomentSums | None) -> Moments:
        """Return what is known of one layer."""
        assert self.H is not None, "no row was added"
        apart = None if held is None else held.of(name, None)
        lost = self.lost.get(name)
        return Moments(
            H=self.H,
            C=self.C if lost is None else None,
            lost=lost,
            tokens=self.tokens,
            held_out=apart,
            alive=self.alive,
        )


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

"""Second moments of a layer's inputs, their sums over batches, and the corrected target that follows from them.

Earlier layers are quantized, so the layer receives `X_hat`, while its target is `X W^T` of the original model.
Minimising `||X W^T + r - X_hat values^T - r_hat||^2` moves the target of the lattice problem from `W` to `W + Delta`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial, reduce

import torch
from torch import Tensor

from nearplane.lattice.exact_sum import ExactSum, unit_of
from nearplane.lattice.factor import read, strips, total
from nearplane.lattice.kernels import tiling_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """Inputs of a layer on extra windows, outside every fit, where its outputs are compared with the original ones.

    Args:
        X_hat: (rows, in) inputs in the quantized model.
        X: (rows, in) inputs in the original model; None where it did not run.
        sizes: Number of rows of each text of a mix, in their order.
    """

    X_hat: Tensor
    X: Tensor | None = None
    sizes: tuple[int, ...] = ()

    def by_source(self) -> list[Extra | None]:
        """Return the rows of each text of a mix, None for a text without rows; empty for a single text."""
        if len(self.sizes) < 2:
            return []
        X = [None] * len(self.sizes) if self.X is None else self.X.split(self.sizes)
        parts = zip(self.X_hat.split(self.sizes), X, strict=True)
        return [Extra(X_hat=X_hat, X=rows) if len(X_hat) else None for X_hat, rows in parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Second moments of a layer's inputs, averaged over tokens.

    Args:
        H: (in, in) float64, `X_hat^T X_hat / tokens` of inputs in the quantized model.
        tokens: Number of rows that were averaged.
        C: (in, in) float64, `X^T X_hat / tokens` with inputs X in the original model; None without a correction, or
            where `lost` is given instead.
        lost: (out, in) float64, `E[(W x + r - W x_hat - r_hat) x_hat^T]`: error of the output before the layer
            is quantized, with the residual stream r it is added to, correlated with the inputs; None where it follows
            from `C` as `W (C - H)`.
        held_out: Moments over the held-out windows (the last fifth, also part of the whole), in the dtype of the rows;
            None without a correction.
        extra: Rows of the extra windows, which enter none of the above; None if there are none.
        alive: (in,) bool, True where the input was not 0 for some token in the original model; None where it did not
            run.
        alike: Share of an expert's rows whose tokens the original router sends to it too; None for other layers, or
            where the original model did not run.
        blended: Number of an expert's `tokens` that stand for the mean over its block's experts; None for other layers.
        positions: Binary exponent of the factor of the rows in each octave of positions; empty: rows are as they are.
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
    positions: tuple[int, ...] = ()

    @property
    def corrects(self) -> bool:
        """Whether the moments contain the error of the quantized inputs."""
        return self.C is not None or self.lost is not None


@dataclass(slots=True)
class MomentSums:
    """Sums over batches before division by the number of tokens; order and grouping of the batches change no bit.

    `named` are the sums: "H", "C", and "lost." with the name of a layer. `alive` is above 0 for inputs of the original model
    that were not 0 in some batch; `dtype` is that of the products. `unit` is that of all sums, see `unit_of`; None: that of the
    first rows.
    """

    named: dict[str, ExactSum] = field(default_factory=dict)
    alive: Tensor | None = None
    tokens: int = 0
    dtype: torch.dtype = torch.float64
    unit: Tensor | None = None

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
            X_hat: (rows, in) inputs in the quantized model.
            X: (rows, in) inputs in the original model; None if it does not run.
            outputs: (rows, out) errors `W x + r - W x_hat - r_hat` of the outputs, by layer.
            crossed: Whether to sum C; not needed where all layers are among `outputs`.
        """
        if not len(X_hat):
            return
        self.tokens, self.dtype = self.tokens + len(X_hat), sum_dtype(X_hat)
        self.unit = unit_of(X_hat) if self.unit is None else self.unit
        n, span = X_hat.shape[1], tiling_of(X_hat.device).span
        H = self._sum("H", n, n, span)
        for a in range(0, n, span):
            H.add(cross_product(X_hat[:, a : a + span], X_hat[:, a:]), a)
        if X is not None:
            if crossed:
                self._sum("C", n, n).add(cross_product(X, X_hat))
            if self.alive is None or tiling_of(X.device).waits or not bool(self.alive.all()):
                self.alive = X.any(0).long().add_(0 if self.alive is None else self.alive)
            for name, difference in (outputs or {}).items():
                self._sum(f"lost.{name}", difference.shape[1], n).add(cross_product(difference, X_hat))

    def merge(self, other: MomentSums) -> None:
        """Add the sums of other batches, which are not changed; either may be without rows."""
        for name, each in other.named.items():
            if name not in self.named:
                self.named[name] = each.zero()
            self.named[name].merge(each)
        if other.alive is not None:
            self.alive = other.alive if self.alive is None else self.alive + other.alive
        self.dtype = self.dtype if self.tokens else other.dtype
        self.tokens += other.tokens

    def _sum(self, name: str, rows: int, columns: int, span: int | None = None) -> ExactSum:
        """Return the sum of a name, which begins as zero."""
        assert self.unit is not None, "it comes with the first rows"
        if name not in self.named:
            self.named[name] = ExactSum(self.unit, (rows, columns), span)
        return self.named[name]

    def totals(self) -> MomentTotals:
        """Return the sums in float64; this empties them, as their memory is reused."""
        checks = [("quantized" if name == "H" else "original", *each.within()) for name, each in self.named.items()]
        values = {name: self.named.pop(name).value() for name in [*self.named]}
        H, C, alive = values.pop("H", None), values.pop("C", None), None if self.alive is None else self.alive > 0
        lost = {name.removeprefix("lost."): value for name, value in values.items()}
        return MomentTotals(H=H, alive=alive, C=C, lost=lost, tokens=self.tokens, dtype=self.dtype, checks=checks)


@dataclass(slots=True)
class MomentTotals:
    """Sums over all tokens in float64, before division by their number; H in its upper triangle only.

    Args:
        checks: Network ("quantized" or "original"), whether the products were finite, and whether the sum was in range.
    """

    H: Tensor | None = None
    alive: Tensor | None = None
    C: Tensor | None = None
    lost: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0
    dtype: torch.dtype = torch.float64
    checks: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)

    def blend(self, other: MomentTotals, share: float) -> None:
        """Add a share of other sums, which are not changed."""
        self.dtype = self.dtype if self.tokens else other.dtype
        self.H, self.C = _with_share(self.H, other.H, share), _with_share(self.C, other.C, share)
        if other.alive is not None:
            self.alive = other.alive if self.alive is None else self.alive | other.alive
        self.tokens += round(other.tokens * share)
        self.checks += other.checks

    def means(self, dtype: torch.dtype = torch.float64) -> MomentTotals:
        """Return the means over all tokens as full matrices in `dtype`; the memory of these sums is reused."""

        def mean(x: Tensor) -> Tensor:
            return x.div_(self.tokens).to(dtype)

        lost = {name: mean(self.lost.pop(name)) for name in [*self.lost]}
        H, self.H = None if self.H is None else _mirrored(mean(self.H)), None
        C, self.C = None if self.C is None else mean(self.C), None
        return replace(self, H=H, C=C, lost=lost)

    def of(self, name: str, held: MomentTotals | None) -> Moments:
        """Return the moments of one layer, from means."""
        assert self.H is not None, "no row was added"
        held_out = None if held is None else held.of(name, None)
        lost = self.lost.get(name)
        C = self.C if lost is None else None
        return Moments(H=self.H, C=C, lost=lost, tokens=self.tokens, held_out=held_out, alive=self.alive)


@dataclass(slots=True)
class ExtraRows:
    """Inputs of a layer on the extra windows, collected batch by batch."""

    X_hat: list[Tensor] = field(default_factory=list)  # (rows, in) each
    X: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=lambda: [0])  # rows of each text of a mix

    def add(self, X_hat: Tensor, X: Tensor | None = None, source: int = 0) -> None:
        """Keep a copy of one batch's inputs (rows, in) in the quantized and in the original model, at least float32.

        `source` is the number of the text; texts come in their order.
        """
        if len(X_hat):
            self.X_hat.append(X_hat.to(sum_dtype(X_hat), copy=True))
            self.X += [] if X is None else [X.to(sum_dtype(X), copy=True)]
            self.sizes[source] += len(X_hat)

    def together(self) -> Extra | None:
        """Return all rows and forget them; None if there are none."""
        if not self.X_hat:
            return None
        X = torch.cat(self.X) if self.X else None
        extra = Extra(X_hat=torch.cat(self.X_hat), X=X, sizes=tuple(self.sizes))
        self.X_hat, self.X, self.sizes = [], [], [0] * len(self.sizes)
        return extra


def moment_difference(H: Tensor, C: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (in, in) `C - H` in a dtype, computed in that of the moments.

    `lost = W (C - H)`, and the correlation of the residual stream's error with the inputs if the output is added to it,
    is the error of the output due to quantized inputs, correlated with these inputs; `lost (H + lambda I)^-1` is the
    full correction of the weights.
    """
    difference = torch.empty(H.shape, dtype=dtype, device=H.device)
    for rows in strips(H, 512):
        difference[rows] = C[rows] - H[rows]
    return difference


def trust(lost_held_out: Tensor, H_held_out: Tensor, Delta: Tensor) -> float:
    """Return the factor `rho` in [0, 1] of `Delta` with the least error on the held-out windows, in closed form.

        rho = <lost_v, Delta> / tr(Delta H_v Delta^T)

    Args:
        lost_held_out: (out, in) error of the held-out windows, see `moment_difference`.
        H_held_out: (in, in) Hessian of the held-out windows.
        Delta: (out, in) correction fitted on the other windows.
    """
    dtype = H_held_out.dtype
    energies = (Delta @ H_held_out.to(Delta.dtype)) * Delta
    energy, product = read(total(energies, dtype), total(lost_held_out * Delta, dtype))
    return min(1.0, max(0.0, product / energy)) if energy > 0 else 0.0


def weighted_difference(whole: Tensor, tokens: int, part: Tensor, part_tokens: int) -> Tensor:
    """Return the mean over the tokens outside `part`, from the means over all tokens and over `part`."""
    remaining = tokens - part_tokens
    return (whole * (tokens / remaining)).sub_(part, alpha=part_tokens / remaining)


def sum_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype in which products of tensors are summed: float32, or float64 if one has that dtype."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def cross_product(A: Tensor, B: Tensor) -> Tensor:
    """Return (a, b) `A^T B` of rows (rows, a) and (rows, b); see `wide_product`."""
    return wide_product(A.T, B)


def wide_product(A: Tensor, B: Tensor) -> Tensor:
    """Return (a, b) `A B` of (a, n) and (n, b), with sums in float32, and exact products where B has 16 bits.

    Float32 holds every product of two bfloat16 or float16 numbers. Where the device multiplies them with such sums
    (tensor cores of GPUs), it does; elsewhere both are widened first, which gives the same products in another order.
    A of float32 is there the sum of three bfloat16 matrices, so that three fast products take the place of a slow one.
    Two matrices of float32 are multiplied in float32, of float64 in float64.
    """
    dtype = sum_dtype(A, B)
    if B.dtype != dtype and sums_in_float32(B.device, B.dtype):
        if A.dtype == B.dtype:
            return torch.mm(A, B, out_dtype=dtype)
        if A.dtype == torch.float32 and B.dtype == torch.bfloat16:
            least, *others = (partial(torch.mm, part, B, out_dtype=dtype) for part in reversed(bfloat16_parts(A)))
            return reduce(lambda sums, part: sums.add_(part()), others, least())
    return A.to(dtype) @ B.to(dtype)


def bfloat16_parts(A: Tensor) -> list[Tensor]:
    """Return three bfloat16 tensors whose sum is a float32 tensor, the largest first: each holds 8 of its 24 bits.

    What is below 2^-133 is lost, and numbers from 2^128 - 2^119 on become infinite.
    """
    parts, rest = [], A
    for _ in range(3):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1]
    return parts


@cache
def sums_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device has a product of 16-bit matrices with a float32 result."""
    one = torch.ones(1, 1, dtype=dtype, device=device)
    try:
        torch.mm(one, one, out_dtype=torch.float32)
    except RuntimeError:  # NotImplementedError among them: what torch raises where there is none
        return False
    return True


def _mirrored(H: Tensor) -> Tensor:
    """Fill in the blocks below the diagonal in place."""
    span = tiling_of(H.device).span
    for a in range(0, len(H), span):
        H[a + span :, a : a + span] = H[a : a + span, a + span :].T
    return H


def _with_share(sums: Tensor | None, other: Tensor | None, share: float) -> Tensor | None:
    """Add a share of another tensor in place."""
    if other is None:
        return sums
    return other * share if sums is None else sums.add_(other * share)

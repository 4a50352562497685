"""Factorization `H[p][:, p] = U diag(d) U^T` of the Hessian without an inverse, and rounding orders `p` of its columns.

`sqrt(d_j)` is the length of the j-th Gram-Schmidt vector of the layer's inputs; all bounds and losses follow from `d`.

Decompositions and sums here do not depend on the number of threads, to the last bit: the same command gives the same
bytes. torch divides a sum over all entries of a large tensor among its threads, MKL decompositions and triangular
solves; the order of additions then changes. Sums along one dimension are the same for any number of threads, and matrix
products are with the mode of MKL that `system/repeatable.py` sets (measured with torch 2.13; a test checks it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice.kernels import tiling_of
from nearplane.lattice.pivoted_order import pivoted_order

Order = Literal["natural", "reversed", "activation", "pivoted"]
AUTO_DAMPS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
MAX_FLOAT32_CONDITION = 1e3  # "auto" factors in float64 above this condition
ROWS_AT_ONCE = 512  # rows permuted at once
MAX_SERIAL_SUM = 1 << 14  # entries that torch sums in one thread, for any number of threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """`(H + shift I)[p][:, p] = U diag(d) U^T`, everything in rounding order.

    Args:
        order: (in,) columns in the order in which they are rounded.
        U: (in, in) unit upper triangular.
        d: (in,) squared Gram-Schmidt lengths, positive.
        damp: Damping that was used, relative to the mean of the diagonal of H.
        shift: Number that damping added to the diagonal, in the units of H.
        dead: (in,) bool in the *original* column order; True where the input was always 0.
    """

    order: Tensor
    U: Tensor
    d: Tensor
    damp: float
    shift: float
    dead: Tensor

    def solve(self, R: Tensor) -> Tensor:
        """Return (out, in) `R (H + shift I)^-1`, by two triangular solves in the dtype of `R`."""
        U = self.U.to(R.dtype)
        X = R.T[self.order]  # (in, out)
        X = triangular(U, X, upper=True, unit=True).div_(self.d.to(R.dtype)[:, None])
        X = triangular(U.T, X, upper=False, unit=True)
        solved = torch.empty_like(X)
        solved[self.order] = X
        return solved.T


def factorize(
    H: Tensor,
    order: Order | Tensor = "natural",
    *,
    damp: float | Literal["auto"] = 0.01,
    dtype: torch.dtype | Literal["auto"] | None = None,
) -> Factor:
    """Factor `H + damp * mean(diag H) * I` in rounding order by one Cholesky decomposition.

    Args:
        H: (in, in) symmetric positive semi-definite.
        order: Name of a rounding order, or a permutation (in,).
        damp: Relative damping; "auto" takes the first of 1e-4, 1e-3, ..., 1 for which the factorization succeeds.
        dtype: Dtype of the factorization; None: that of `H`; "auto": float32 where its relative error is below 1/1000
            (see `condition`), else float64.

    Raises:
        NumericalError: `H` is not finite, or not positive definite with this damping; names the column.

    Equivalent to the three factorizations of GPTQ (Cholesky, inverse, Cholesky) at a quarter of the work.
    """
    if dtype == "auto":
        try:
            single = factorize(H, order, damp=damp, dtype=torch.float32)
        except NumericalError:
            single = None
        accurate = single is not None and condition(H, single) < MAX_FLOAT32_CONDITION
        return single if single is not None and accurate else factorize(H, order, damp=damp, dtype=torch.float64)
    dtype = dtype or H.dtype
    diagonal = torch.empty(len(H), 2, dtype=dtype, device=H.device)[:, 0]
    diagonal.copy_(H.diagonal())  # strided as in H, so that sums are taken in the same order
    *extremes, mean = read(*(extreme.to(dtype) for extreme in H.aminmax()), diagonal.mean())
    if not all(map(math.isfinite, extremes)):
        raise NumericalError("The Hessian contains NaN or Inf: the calibration inputs of this layer are not finite.")
    dead = diagonal == 0
    for candidate in AUTO_DAMPS if damp == "auto" else (float(damp),):
        shift = candidate * mean
        damping = torch.full_like(diagonal, shift)
        if shift == 0:
            damping.masked_fill_(dead, 1)  # inputs that were always 0: any length is equally good
        if isinstance(order, Tensor):
            p = order.to(H.device)
        else:
            p = pivoted_order(_damped(H, damping)) if order == "pivoted" else order_by(diagonal, order)
        U, failed = _reverse_cholesky(permuted(H, p, dtype), damping[p])
        if failed is None:
            lengths = U.diagonal().clone()
            return Factor(order=p, U=U.div_(lengths), d=lengths.square(), damp=candidate, shift=shift, dead=dead)
    raise NumericalError(
        f"The Hessian is not positive definite: the pivot of column {int(p[failed])} is not positive with damping "
        f"{damp}. Use more calibration tokens, a larger --damp, or --damp auto."
    )


def condition(H: Tensor, factor: Factor) -> float:
    """Return the amplification of rounding errors in a factorization: the largest ratio of diagonal entry to pivot.

    Like the error of Cholesky, it does not change when columns are scaled. Measured on spectra up to k^-3 with damping
    down to 1e-8: the relative error of a float32 `d` is at most 5e-7 times this ratio.
    """
    diagonal = H.diagonal()[factor.order] + factor.shift
    return float((diagonal / factor.d).max())


def _damped(H: Tensor, damping: Tensor) -> Tensor:
    """Return (in, in) `H + diag(damping)`, in the dtype of `damping`."""
    damped = H.to(damping.dtype, copy=True)
    damped.diagonal().add_(damping)
    return damped


def permuted(H: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (in, in) `H[order][:, order]` in a dtype, copied some rows at a time."""
    H_p = torch.empty(H.shape, dtype=dtype, device=H.device)
    for rows in strips(H, ROWS_AT_ONCE):
        H_p[rows] = H[order[rows, None], order]
    return H_p


def strips(x: Tensor, count: int) -> list[slice]:
    """Return parts of the rows of a matrix that are handled at once: `count` rows, on a GPU more if rows are short.

    `count` is a power of two. No part reaches into two strips of `solved_strips`.
    """
    tiling = tiling_of(x.device)
    rows = min(count, tiling.strip_rows)
    while rows < tiling.strip_rows and 2 * rows * x.shape[1] <= tiling.numbers:
        rows *= 2
    return _parts(len(x), rows)


def solved_strips(rows: int, device: torch.device) -> list[slice]:
    """Return the rows of each strip of a layer of so many rows, or of a part that begins with a strip.

    The rows of a strip are solved together on a device (`Tiling.strip_rows`). Products of matrices may round otherwise when
    they have another number of rows. As strips are the same whichever process solves them, the results are, too.
    """
    return _parts(rows, tiling_of(device).strip_rows)


def _parts(rows: int, size: int) -> list[slice]:
    return [slice(a, min(a + size, rows)) for a in range(0, rows, size)]


def _reverse_cholesky(H: Tensor, damping: Tensor) -> tuple[Tensor, int | None]:
    """Return the upper triangular R of `H + diag(damping) = R R^T` in the memory of `H`, and the first failing pivot.

    Blocks of columns from the last to the first: one matrix product, one small Cholesky and one triangular solve each.
    """
    R = H  # columns to the right of a block are R's, the others H's
    tiling = tiling_of(H.device)
    block = tiling.cholesky
    # () of each block: the failing pivot, counted from the last column and 1; 0 if there is none
    infos: list[Tensor] = []
    for b in range(len(H), 0, -block):
        a = max(b - block, 0)
        S = torch.addmm(H[:b, a:b], R[:b, b:], R[a:b, b:].T, alpha=-1)  # (b, b - a), Schur complement of this block
        S[a:].diagonal().add_(damping[a:b])
        with one_thread():
            L, info = torch.linalg.cholesky_ex(S[a:].flip(0, 1))
        infos.append(info)
        R[a:b, a:b] = L.flip(0, 1)
        if not tiling.waits and not (int(info) == 0 and bool((L.diagonal() > 0).all())):
            break  # elsewhere reading it would cost more than the other blocks
        if b < len(H):
            R[b:, a:b] = 0
        if a:
            R[:a, a:b] = triangular(R[a:b, a:b], S[:a].T, upper=True).T
    found: list[int] = torch.cat([torch.stack(infos), (R.diagonal() > 0).to(infos[0].dtype)]).tolist()
    pivots, positive = found[: len(infos)], found[len(infos) :][::-1]
    for i, pivot in enumerate(pivots):
        wrong = [k for k in range(i * block, min((i + 1) * block, len(H))) if not positive[k]]
        if pivot or wrong:
            return R, len(H) - (i * block + pivot if pivot else wrong[0] + 1)
    return R, None


def order_by(diagonal: Tensor, order: Order) -> Tensor:
    """Return the permutation (in,) of an order that depends on the diagonal (in,) of `H` only: `p[0]` is rounded first.

    natural: 0, 1, ...; activation: descending diagonal ("act-order").
    """
    n = len(diagonal)
    match order:
        case "natural":
            return torch.arange(n, device=diagonal.device)
        case "reversed":
            return torch.arange(n - 1, -1, -1, device=diagonal.device)
        case "activation":
            return torch.argsort(diagonal, descending=True, stable=True)
        case "pivoted":
            raise NumericalError("The pivoted order needs the Hessian, not only its diagonal; use pivoted_order.")


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread in this context: for decompositions that are small or rare."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def triangular(A: Tensor, B: Tensor, *, upper: bool, unit: bool = False) -> Tensor:
    """Return (n, m) the solution X of `A X = B`.

    On the CPU by halves down to `Tiling.triangle` rows: the products that join two halves use all threads.

    Args:
        A: (n, n) triangular; the entries on the other side of the diagonal are ignored.
        B: (n, m) right-hand sides.
        upper: Whether `A` is upper triangular.
        unit: Whether the diagonal of `A` is taken as 1.
    """
    if (rows := tiling_of(A.device).triangle) is None:
        at_once: Tensor = torch.linalg.solve_triangular(A, B, upper=upper, unitriangular=unit)
        return at_once
    X = B.clone()
    _solve(A, X, upper, unit, rows)
    return X


def _solve(A: Tensor, X: Tensor, upper: bool, unit: bool, rows: int) -> None:
    n = len(A)
    if n <= rows:
        with one_thread():
            X.copy_(torch.linalg.solve_triangular(A, X, upper=upper, unitriangular=unit))
        return
    half = -(-n // 2 // rows) * rows
    first, second = (slice(half, n), slice(0, half)) if upper else (slice(0, half), slice(half, n))
    _solve(A[first, first], X[first], upper, unit, rows)
    X[second].addmm_(A[second, first], X[first], alpha=-1)
    _solve(A[second, second], X[second], upper, unit, rows)


def read(*tensors: Tensor) -> list[float]:
    """Return all numbers of some tensors, which wait for a GPU once."""
    alike = len({each.dtype for each in tensors}) == 1 and tensors[0].is_floating_point()  # then nothing is converted
    numbers: list[float] = torch.cat([(each if alike else each.double()).reshape(-1) for each in tensors]).tolist()
    return numbers


def total(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return () the sum of all entries of a tensor of any shape, taken in `dtype`."""
    sums = x.reshape(-1)
    while len(sums) > MAX_SERIAL_SUM:
        whole = len(sums) // MAX_SERIAL_SUM * MAX_SERIAL_SUM
        rows, remainder = sums[:whole].view(-1, MAX_SERIAL_SUM), sums[whole:]
        sums = torch.cat([rows.sum(1, dtype=dtype), remainder.sum(dtype=dtype)[None]])
    return sums.sum(dtype=dtype)

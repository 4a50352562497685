"""One factorization of the Hessian, no inverse: `H[p][:, p] = U diag(d) U^T`, and the orders `p` in which columns are rounded.

`sqrt(d_j)` is the length of the j-th Gram-Schmidt vector of the layer's inputs; every bound and every loss is read off `d`.

The last bits of decompositions and sums here do not depend on how many threads compute: the same command gives the same bytes.
torch splits a sum over all entries of a large tensor among its threads, MKL decompositions and triangular solves; they then add
in another order. Products of matrices and sums along one dimension are the same for any number (measured with torch 2.13; a test
keeps to it).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nearplane.errors import NumericalError

Order = Literal["natural", "reversed", "activation", "pivoted"]
AUTO_DAMPS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
TRUSTED = 1e3  # condition up to which "auto" factors in float32
BLOCK = 192  # columns that are factored at once
ROWS = 512  # that are permuted at once, or updated by one product
TRIANGLE = 96  # rows of one that one thread solves
SERIAL = 1 << 14  # entries that torch sums in one thread, whatever their number


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """`(H + shift I)[p][:, p] = U diag(d) U^T`, everything in rounding order.

    Args:
        order: (in,) column that is rounded first, second, ...
        U: (in, in) unit upper triangular.
        d: (in,) squared Gram-Schmidt lengths, positive.
        damp: damping that was used, relative to the mean of the diagonal of H.
        shift: the same in the units of H: what was added to the diagonal.
        dead: (in,) bool in the *original* column order: inputs that were always 0.
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
        order: a name, or a permutation (in,) to use as it is.
        damp: relative damping; "auto" takes the first of 1e-4, 1e-3, ..., 1 that factors.
        dtype: of the factorization; None takes that of `H`, "auto" float32 where that is good to a thousandth (`condition`).

    Raises:
        NumericalError: `H` is not finite, or not positive definite with this damping; names column and pivot.

    Equal to the three factorizations of GPTQ (Cholesky, inverse, Cholesky) at a quarter of the work.
    """
    if dtype == "auto":
        try:
            single = factorize(H, order, damp=damp, dtype=torch.float32)
        except NumericalError:
            single = None
        trusted = single is not None and condition(H, single) < TRUSTED
        return single if single is not None and trusted else factorize(H, order, damp=damp, dtype=torch.float64)
    dtype = dtype or H.dtype
    diagonal = torch.empty(len(H), 2, dtype=dtype, device=H.device)[:, 0]
    diagonal.copy_(H.diagonal())  # with gaps as in H: sums are taken in that order
    if not bool(torch.isfinite(torch.stack(H.aminmax()).to(dtype)).all()):
        raise NumericalError("The Hessian holds NaN or Inf: the calibration inputs of this layer are not finite.")
    dead = diagonal == 0
    mean = float(diagonal.mean())
    for candidate in AUTO_DAMPS if damp == "auto" else (float(damp),):
        shift = candidate * mean
        added = torch.full_like(diagonal, shift)
        added.masked_fill_(dead & (shift == 0), 1)  # any length does: nothing hangs on it
        if isinstance(order, Tensor):
            p = order.to(H.device)
        else:
            p = pivoted_order(_damped(H, added)) if order == "pivoted" else order_by(diagonal, order)
        U, failed = _reverse_cholesky(permuted(H, p, dtype), added[p])
        if failed is None:
            lengths = U.diagonal().clone()
            return Factor(order=p, U=U.div_(lengths), d=lengths.square(), damp=candidate, shift=shift, dead=dead)
    raise NumericalError(
        f"The Hessian is not positive definite: the pivot of column {int(p[failed])} is not positive with damping {damp}. "
        "Use more calibration tokens, a larger --damp, or --damp auto."
    )


def condition(H: Tensor, factor: Factor) -> float:
    """Return how much rounding errors of a factorization are enlarged: the largest ratio of a diagonal entry to its pivot.

    Does not change when columns are scaled, as the error of Cholesky does not. Measured on spectra up to k^-3 with damping down
    to 1e-8: the relative error of a float32 `d` is at most 5e-7 times this.
    """
    diagonal = H.diagonal()[factor.order] + factor.shift
    return float((diagonal / factor.d).max())


def _damped(H: Tensor, added: Tensor) -> Tensor:
    """Return (in, in) `H + diag(added)`, in the dtype of `added`."""
    damped = H.to(added.dtype, copy=True)
    damped.diagonal().add_(added)
    return damped


def permuted(H: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (in, in) `H[order][:, order]` in a dtype; beside it some rows at a time are in memory."""
    found = torch.empty(H.shape, dtype=dtype, device=H.device)
    for a in range(0, len(H), ROWS):
        found[a : a + ROWS] = H[order[a : a + ROWS, None], order]
    return found


def _reverse_cholesky(H: Tensor, added: Tensor) -> tuple[Tensor, int | None]:
    """Return the upper triangular R with `H + diag(added) = R R^T`, in the memory of `H`, or the first pivot that is not positive.

    Blocks of columns from the last to the first: one matrix product, one small Cholesky and one triangular solve each.
    """
    R = H  # columns to the right of a block are R's, the others H's
    for b in range(len(H), 0, -BLOCK):
        a = max(b - BLOCK, 0)
        S = torch.addmm(H[:b, a:b], R[:b, b:], R[a:b, b:].T, alpha=-1)  # (b, b - a), Schur complement of this block
        S[a:].diagonal().add_(added[a:b])
        with one_thread():
            L, info = torch.linalg.cholesky_ex(S[a:].flip(0, 1))
        positive = L.diagonal() > 0
        if int(info) or not bool(positive.all()):
            return R, b - (int(info) or 1 + int((~positive).nonzero()[0]))
        R[a:b, a:b] = L.flip(0, 1)
        R[b:, a:b] = 0
        R[:a, a:b] = triangular(R[a:b, a:b], S[:a].T, upper=True).T
    return R, None


def rounding_order(H: Tensor, order: Order) -> Tensor:
    """Return the permutation (in,) of a named order: `p[0]` is rounded first.

    natural: 0, 1, ...; activation: descending diagonal of `H` ("act-order"); pivoted: the smallest remaining Schur complement
    is eliminated first and rounded last (Chen, Hoefler, Alistarh 2025, Algorithm 4).
    """
    return pivoted_order(H) if order == "pivoted" else order_by(H.diagonal(), order)


def order_by(diagonal: Tensor, order: Order) -> Tensor:
    """Return the permutation (in,) of an order that the diagonal (in,) of `H` decides."""
    n = len(diagonal)
    match order:
        case "natural":
            return torch.arange(n, device=diagonal.device)
        case "reversed":
            return torch.arange(n - 1, -1, -1, device=diagonal.device)
        case "activation":
            return torch.argsort(diagonal, descending=True, stable=True)
        case "pivoted":
            raise NumericalError("The pivoted order needs all of the Hessian, not its diagonal: use rounding_order.")


def pivoted_order(H: Tensor, *, panel: int = 64) -> Tensor:
    """Return the rounding order (in,) by minimal pivots, of equal ones the lowest index first.

        S = H ;  k_i = argmin_k S_kk over the columns left ;  S -= S_{:,k} S_{k,:} / S_kk ;  p = (k_n, ..., k_1)

    At each step the smallest remaining Schur complement goes first; the column eliminated last is rounded first (Chen, Hoefler,
    Alistarh 2025, Algorithm 4). This is LAPACK's `pstrf` with the smallest instead of the largest pivot, blocked the same way:
    nearly all of the work is matrix products. A pivot that is only rounding error (`H` is singular) is passed over without an
    update: `p` is a permutation always.

    Args:
        H: (in, in) symmetric, finite, on any device; the order is computed in its dtype.
        panel: columns eliminated between two updates of the remaining matrix.
    """
    n = len(H)
    S = H.clone()  # (left, left) Schur complement as of the last update, lower triangle
    left = torch.arange(n, device=H.device)  # (left,) the columns that S holds, ascending
    floor = torch.finfo(H.dtype).eps * H.diagonal()
    diagonal = H.diagonal().clone()  # (left,) of the Schur complement as of the last pivot; infinite where eliminated
    order = torch.empty(n, dtype=torch.long, device=H.device)
    for start in range(0, n, panel):
        if len(left) - (n - start) > len(left) // 4:  # dropping what is eliminated costs a copy: not at every panel
            kept = torch.isfinite(diagonal).nonzero()[:, 0]
            left, diagonal, S = left[kept], diagonal[kept], S[kept[:, None], kept]
        picked, L = _eliminate(S, diagonal, floor[left], min(panel, n - start))
        order[start : start + panel] = left[picked]
        for a in range(0, len(left), ROWS):
            b = a + ROWS
            S[a:b, :b].addmm_(L[:, a:b].T, L[:, :b], alpha=-1)
    return order.flip(0)


def _eliminate(S: Tensor, diagonal: Tensor, floor: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Eliminate the smallest pivots one by one. Updates `diagonal`; `S` is due for `S -= L^T L`.

    Returns:
        Where the pivots were (steps,), and L (steps, left).
    """
    L = S.new_zeros(steps, len(S))
    picked = torch.empty(steps, dtype=torch.long, device=S.device)
    index = torch.arange(len(S), device=S.device)
    for i in range(steps):
        k = diagonal.argmin(keepdim=True)  # (1,), never read back: no step waits for the device
        column = torch.where(index < k, S.index_select(0, k)[0], S.index_select(1, k)[:, 0])  # (left,)
        column = torch.addmv(column, L[:i].T, L[:i].index_select(1, k)[:, 0], alpha=-1)
        L[i] = torch.where(diagonal[k] > floor[k], column / diagonal[k].sqrt(), 0)
        diagonal -= L[i].square()
        diagonal.index_fill_(0, k, torch.inf)
        picked[i : i + 1] = k
    return picked, L


@contextmanager
def one_thread() -> Iterator[None]:
    """Let this thread's tensors be computed by one thread inside: for decompositions of small matrices, or of rare ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def triangular(A: Tensor, B: Tensor, *, upper: bool, unit: bool = False) -> Tensor:
    """Return (n, m) the solution X of `A X = B`.

    By halves down to `TRIANGLE` rows: what the half that is solved adds to the other is a product, which all threads share.

    Args:
        A: (n, n) triangular; what is on the other side of its diagonal is not looked at.
        B: (n, m).
        upper: whether it is upper triangular.
        unit: whether its diagonal counts as 1.
    """
    X = B.clone()
    _solve(A, X, upper, unit)
    return X


def _solve(A: Tensor, X: Tensor, upper: bool, unit: bool) -> None:
    n = len(A)
    if n <= TRIANGLE:
        with one_thread():
            X.copy_(torch.linalg.solve_triangular(A, X, upper=upper, unitriangular=unit))
        return
    half = -(-n // 2 // TRIANGLE) * TRIANGLE
    first, second = (slice(half, n), slice(0, half)) if upper else (slice(0, half), slice(half, n))
    _solve(A[first, first], X[first], upper, unit)
    X[second].addmm_(A[second, first], X[first], alpha=-1)
    _solve(A[second, second], X[second], upper, unit)


def total(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return () the sum of all entries of a tensor of any shape, taken in `dtype`."""
    sums = x.reshape(-1)
    while len(sums) > SERIAL:
        whole = len(sums) // SERIAL * SERIAL
        rows, rest = sums[:whole].view(-1, SERIAL), sums[whole:]
        sums = torch.cat([rows.sum(1, dtype=dtype), rest.sum(dtype=dtype)[None]])
    return sums.sum(dtype=dtype)

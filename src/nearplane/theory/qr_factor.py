"""The factor of a Hessian without the Hessian: a triangular root of the inputs by streamed QR, `R^T R = sum X^T X`.

The product factors `H` by Cholesky (`lattice/factor.py`); this is the same factor, made from the rows of `X`. Forming `X^T X`
squares the condition number of the inputs, and half of the digits of `U` and `d` may be gone before anything is factored.
Orthogonal transformations of `X` itself lose only what its own condition number costs.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice.factor import AUTO_DAMPS, Factor, Order, one_thread, order_by, rounding_order

TALL = 2  # rows of a block over columns: R below it is a quarter of the work, and three of such blocks fit in memory


def append(R: Tensor | None, X: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the root of all rows so far, `R <- qr([R; X])`, block by block.

    Args:
        R: (in, in) root of the rows before, or None.
        X: (rows, in), any number of rows; in few rows at a time most of the work is R again.
        dtype: of the decompositions.

    Returns:
        (in, in) upper triangular with a diagonal that is not negative: unique where the rows have full rank.
    """
    step = TALL * X.shape[1]
    for start in range(0, max(len(X), 1), step):
        rows = X[start : start + step].to(dtype)
        R = _triangle(rows if R is None else torch.cat([R.to(dtype), rows]))
    assert R is not None  # there is one block even of no rows
    return R


def factorize_inputs(X: Tensor, order: Order | Tensor = "natural", *, damp: float | Literal["auto"] = 0.01) -> Factor:
    """Factor `X^T X / tokens + damp * mean(diag H) * I` from the rows `X` (tokens, in) in float64; see `factorize_root`."""
    return factorize_root(append(None, X), len(X), order, damp=damp)


def factorize_root(
    R: Tensor, tokens: int, order: Order | Tensor = "natural", *, damp: float | Literal["auto"] = 0.01
) -> Factor:
    """Factor `H + damp * mean(diag H) * I` in rounding order from a root of H, without forming H.

        [R[:, p] / sqrt(tokens); sqrt(shift) I], columns reversed, = Q T        U sqrt(d) = T^T, both axes reversed

    The diagonal of H, for damping and the activation order, is the squared norms of columns. The pivoted order alone is
    looked up on `R^T R`: rounding errors may decide between pivots there, but `U` and `d` are exact for whatever order it is.

    Args:
        R: (in, in) `append`'s, or any matrix (rows, in) with `R^T R = tokens * H`; the factor has its dtype.
        tokens: rows that were appended.
        order: a name, or a permutation (in,) to use as it is.
        damp: relative damping; "auto" is the first of `AUTO_DAMPS`, which suffices in float64: no length is below
            1e-2 / sqrt(in) of its column's norm then, far above rounding errors.

    Raises:
        NumericalError: `R` is not finite, or a length is rounding error with this damping; names the column.

    Equal to `factorize(H)` up to rounding errors: those of `d` grow with the condition of X here, with its square there.
    Birnick (2025) factors the data in this way; damping as rows below the data is his as well.
    """
    if not bool(torch.isfinite(torch.stack(R.aminmax())).all()):
        raise NumericalError(
            "The root of the Hessian holds NaN or Inf: the calibration inputs of this layer are not finite."
        )
    A = R / tokens**0.5
    diagonal = A.square().sum(0)  # (in,) of H
    dead = diagonal == 0
    damping = AUTO_DAMPS[0] if damp == "auto" else float(damp)
    shift = damping * float(diagonal.mean())
    p = order.to(R.device) if isinstance(order, Tensor) else _order(A, diagonal, order, shift)
    live = p[~dead[p]]
    root = _reverse_root(A[:, live], shift)
    lengths = root.diagonal().clone()
    lost = lengths <= len(p) * torch.finfo(R.dtype).eps * (diagonal[live] + shift).sqrt()
    if bool(lost.any()):
        raise NumericalError(
            f"The Hessian is not positive definite: column {int(live[lost.nonzero()[-1]])} depends on those rounded after it, "
            f"up to rounding errors, with damping {damp}. Use more calibration tokens or a larger --damp."
        )
    place = (~dead[p]).nonzero()[:, 0]
    U = torch.eye(len(p), dtype=R.dtype, device=R.device)
    U[place[:, None], place] = root / lengths
    d = torch.full_like(diagonal, shift or 1.0)  # any length does for dead inputs: nothing hangs on it
    d[place] = lengths.square()
    return Factor(order=p, U=U, d=d, damp=damping, shift=shift, dead=dead)


def _order(A: Tensor, diagonal: Tensor, order: Order, shift: float) -> Tensor:
    if order != "pivoted":
        return order_by(diagonal, order)
    H = A.T @ A
    H.diagonal().add_(torch.where(diagonal == 0, shift or 1.0, shift))
    return rounding_order(H, order)


def _reverse_root(A: Tensor, shift: float) -> Tensor:
    """Return the upper triangular L with `A^T A + shift I = L L^T`, its diagonal not negative."""
    if shift:
        A = torch.cat([A, torch.eye(A.shape[1], dtype=A.dtype, device=A.device).mul_(shift**0.5)])
    return _triangle(A.flip(1)).T.flip(0, 1)


def _triangle(A: Tensor) -> Tensor:
    """Return R (in, in) of `A = Q R`, upper triangular, its diagonal not negative; rows of 0 where A has fewer rows."""
    n = A.shape[1]
    with one_thread():
        T: Tensor = torch.linalg.qr(A, mode="r").R  # (min(rows, in), in)
    T = T * torch.where(T.diagonal() < 0, -1, 1)[:, None]
    return T if len(T) == n else torch.cat([T, T.new_zeros(n - len(T), n)])

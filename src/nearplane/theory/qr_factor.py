"""Factor of a Hessian without the Hessian itself: a triangular root of the inputs by streamed QR, `R^T R = sum X^T X`.

nearplane factors `H` by Cholesky (`lattice/factor.py`); this is the same factor, computed from the rows of `X`. Forming
`X^T X` squares the condition number of the inputs, which may cost half of the digits of `U` and `d` before the
factorization. Orthogonal transformations of `X` lose only the digits of its own condition number.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice.factor import AUTO_DAMPS, Factor, Order, one_thread, order_by
from nearplane.lattice.pivoted_order import pivoted_order

ROWS_PER_COLUMN = 2  # rows of a block per column: R is then a quarter of the work, and three such blocks fit in memory


def append(R: Tensor | None, X: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the root of all rows so far, `R <- qr([R; X])`, block by block.

    Args:
        R: (in, in) root of the earlier rows, or None.
        X: (rows, in) rows to append; with few rows at a time most of the work is to factor R again.
        dtype: Dtype of the decompositions.

    Returns:
        (in, in) upper triangular with a diagonal that is not negative: unique where the rows have full rank.
    """
    step = ROWS_PER_COLUMN * X.shape[1]
    for start in range(0, max(len(X), 1), step):
        rows = X[start : start + step].to(dtype)
        R = _triangle(rows if R is None else torch.cat([R.to(dtype), rows]))
    assert R is not None  # there is at least one block, possibly without rows
    return R


def factorize_inputs(X: Tensor, order: Order | Tensor = "natural", *, damp: float | Literal["auto"] = 0.01) -> Factor:
    """Factor `X^T X / tokens + damp * mean(diag H) * I` from the rows `X` (tokens, in) in float64: `factorize_root`."""
    return factorize_root(append(None, X), len(X), order, damp=damp)


def factorize_root(
    R: Tensor, tokens: int, order: Order | Tensor = "natural", *, damp: float | Literal["auto"] = 0.01
) -> Factor:
    """Factor `H + damp * mean(diag H) * I` in rounding order from a root of H, without forming H.

        [R[:, p] / sqrt(tokens); sqrt(shift) I], columns reversed, = Q T        U sqrt(d) = T^T, both axes reversed

    The diagonal of H, for damping and the activation order, consists of the squared norms of columns. Only the pivoted
    order is computed from `R^T R`: rounding errors may decide between pivots there, but `U` and `d` fit the order
    found.

    Args:
        R: (in, in) root of `append`, or any matrix (rows, in) with `R^T R = tokens * H`; the factor has its dtype.
        tokens: Number of rows that were appended.
        order: Name of a rounding order, or a permutation (in,).
        damp: Relative damping; "auto" is the first of `AUTO_DAMPS`, which suffices in float64: no length is then below
            1e-2 / sqrt(in) of its column's norm, far above rounding errors.

    Raises:
        NumericalError: `R` is not finite, or a length is only rounding error with this damping; names the column.

    Equal to `factorize(H)` up to rounding errors: those of `d` grow with the condition number of X here, and with its
    square there. Birnick (2025) factors the data in this way, and also adds damping as rows below the data.
    """
    if not bool(torch.isfinite(torch.stack(R.aminmax())).all()):
        raise NumericalError(
            "The root of the Hessian contains NaN or Inf: the calibration inputs of this layer are not finite."
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
    small = lengths <= len(p) * torch.finfo(R.dtype).eps * (diagonal[live] + shift).sqrt()
    if bool(small.any()):
        raise NumericalError(
            f"The Hessian is not positive definite: column {int(live[small.nonzero()[-1]])} depends on columns rounded "
            f"after it up to rounding errors, with damping {damp}. Use more calibration tokens or a larger --damp."
        )
    live_places = (~dead[p]).nonzero()[:, 0]
    U = torch.eye(len(p), dtype=R.dtype, device=R.device)
    U[live_places[:, None], live_places] = root / lengths
    d = torch.full_like(diagonal, shift or 1.0)  # inputs that were always 0: any length is equally good
    d[live_places] = lengths.square()
    return Factor(order=p, U=U, d=d, damp=damping, shift=shift, dead=dead)


def _order(A: Tensor, diagonal: Tensor, order: Order, shift: float) -> Tensor:
    if order != "pivoted":
        return order_by(diagonal, order)
    H = A.T @ A
    H.diagonal().add_(torch.where(diagonal == 0, shift or 1.0, shift))
    return pivoted_order(H)


def _reverse_root(A: Tensor, shift: float) -> Tensor:
    """Return the upper triangular L with `A^T A + shift I = L L^T` and a diagonal that is not negative."""
    if shift:
        A = torch.cat([A, torch.eye(A.shape[1], dtype=A.dtype, device=A.device).mul_(shift**0.5)])
    return _triangle(A.flip(1)).T.flip(0, 1)


def _triangle(A: Tensor) -> Tensor:
    """Return R (in, in) of `A = Q R`, upper triangular with diagonal >= 0; rows of 0 are added if A has fewer rows."""
    n = A.shape[1]
    with one_thread():
        T: Tensor = torch.linalg.qr(A, mode="r").R  # (min(rows, in), in)
    T = T * torch.where(T.diagonal() < 0, -1, 1)[:, None]
    return T if len(T) == n else torch.cat([T, T.new_zeros(n - len(T), n)])

"""Optimal Brain Quantization: each row has its own order, in which the weight with the least cost is rounded next.

With n inputs a row costs n^3/6 multiplications, as many as the one factorization that all rows of `lattice/solvers.py`
share; here the whole inverse is downdated at every step, as published, at six times the cost. The order is exactly the
greedy one, without the rule of the OBQ program that rounds weights far outside the grid first; that rule reduces the
loss on clipping grids considerably.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice.factor import one_thread
from nearplane.lattice.grid import Grid, QuantizedMatrix, Weights

MAX_INPUTS = 4096  # the inverse of a row then takes 128 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedySweep:
    """A greedily rounded matrix and the order of every row.

    Args:
        matrix: Codes and grid.
        order: (out, in) int64 columns of each row in the order of rounding; dead inputs come last.
    """

    matrix: QuantizedMatrix[Grid]
    order: Tensor


def greedy_sweep(
    W: Tensor, grid: Grid, H: Tensor, *, shift: float = 0.0, dead: Tensor | None = None, memory: int = 1 << 30
) -> GreedySweep:
    """Round each row of `W` in its own order; the free weight with the least cost is rounded next.

    With F the columns still free, P = (H_FF + shift I)^-1 and err_j = w_j - value_j, until F is empty:

        j = argmin_{F} err_j^2 / P_jj ;  w_F -= err_j / P_jj P_Fj ;  P -= P_:j P_j: / P_jj

    The chosen column is that with the hyperplane {code_j = z} nearest to the target, among all free columns. Given the
    order, the codes equal those of `nearest_plane`. Ties go to the lowest column.

    Args:
        W: (out, in) weights; the sweep runs in float64 whatever their dtype.
        grid: Steps and limits of every column; see `Grid`.
        H: (in, in) symmetric positive semi-definite, undamped.
        shift: Number that damping adds to the diagonal of `H`, see `Factor.shift`.
        dead: (in,) bool, True for inputs that were always 0; None: those with `H_jj == 0`. They get the codes nearest
            to 0.
        memory: Limit in bytes for the inverses of the rows in work at a time (at least one row is).

    Raises:
        NumericalError: More than 4,096 inputs, `W` or `H` not finite, or `H + shift I` not positive definite.

    Frantar and Alistarh (2022), OBQ; the geometry is Corollary 4 of Chen et al. (2025).
    """
    n = W.shape[1]
    if n > MAX_INPUTS:
        raise NumericalError(
            f"The greedy order of {n} inputs takes {n}^3/6 multiplications per row; the limit is {MAX_INPUTS} inputs. "
            "Use nearest_plane with the pivoted order."
        )
    if not bool(torch.isfinite(W).all()):
        raise NumericalError("A weight is NaN or Inf.")
    dead = H.diagonal() == 0 if dead is None else dead
    live = (~dead).nonzero()[:, 0]
    codes = grid.round(torch.zeros_like(W))[0].to(torch.int32)
    order = torch.cat([live, dead.nonzero()[:, 0]]).expand(len(W), -1).clone()
    if len(live) and len(W):
        P, floor = _inverse(H, shift, live)
        scale, zero = (part.double().expand(len(W), -1).contiguous() for part in grid.columns(live))
        w = W[:, live].double()
        rows = max(1, memory // (8 * len(live) ** 2))  # rows at a time
        live_codes, sequence = sweep_rows(Weights(w, scale, zero, grid.codebook), P, floor, rows)
        codes[:, live] = live_codes
        order[:, : len(live)] = live[sequence]
    return GreedySweep(matrix=QuantizedMatrix(codes=codes, grid=grid), order=order)


def _inverse(H: Tensor, shift: float, live: Tensor) -> tuple[Tensor, Tensor]:
    """Return (live, live) `(H + shift I)^-1` of the live columns, and (live,) `1 / (H_jj + shift)`.

    The second is a lower bound of the diagonal of the inverse for any set of free columns.
    """
    A = H.double()[live[:, None], live]
    A.diagonal().add_(shift)
    if not bool(torch.isfinite(A).all()):
        raise NumericalError("The Hessian contains NaN or Inf: the calibration inputs of this layer are not finite.")
    with one_thread():
        L, info = torch.linalg.cholesky_ex(A)
    if int(info):
        raise NumericalError(
            f"The Hessian is not positive definite: the pivot of column {int(live[int(info) - 1])} is not positive "
            f"with {shift:g} added to the diagonal. Use more calibration tokens, or a larger --damp or --sweep-damp."
        )
    with one_thread():
        return torch.cholesky_inverse(L), 1 / A.diagonal()


def sweep_rows(weights: Weights, P: Tensor, floor: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Sweep all rows, `rows` at a time, each with its own inverse.

    Args:
        weights: (out, in) float64 weights and grid.
        P: (in, in) inverse of the damped Hessian.
        floor: (in,) lower bound of the diagonal of the inverse for fewer columns, against rounding errors.

    Returns:
        (out, in) int32 codes, and (out, in) int64 order.
    """
    W, scale, zero, codebook = weights
    codes, order = torch.empty_like(W, dtype=torch.int32), torch.empty_like(W, dtype=torch.int64)
    for a in range(0, len(W), rows):
        part = slice(a, a + rows)
        w, s, z = W[part].clone(), scale[part], zero[part]
        inverse = P.repeat(len(w), 1, 1)  # (rows, in, in), since each row has its own free columns
        rounded = torch.zeros_like(w, dtype=torch.bool)
        row = torch.arange(len(w), device=w.device)
        for step in range(W.shape[1]):
            code = codebook.nearest(w / s + z)
            error = w - s * (codebook.position(code) - z)
            length = torch.maximum(inverse.diagonal(dim1=1, dim2=2), floor)
            j = (error.square() / length).masked_fill_(rounded, torch.inf).argmin(1)
            column = inverse[row, :, j] / length[row, j].sqrt()[:, None]  # (rows, in)
            w -= (error[row, j] / length[row, j].sqrt())[:, None] * column
            inverse.sub_(column[:, :, None] * column[:, None, :])
            codes[part][row, j] = code[row, j].to(torch.int32)
            order[part][:, step] = j
            rounded[row, j] = True
    return codes, order

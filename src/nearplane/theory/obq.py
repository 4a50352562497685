"""Optimal Brain Quantization: every row rounds next the weight that costs least, in an order of its own.

With n inputs a row costs n^3/6 multiplications, as much as the factorization that all rows of `lattice/solvers.py` share. The
torch form here, with the downdate as published, is the readable twin and serves every other device; on the CPU a compiled kernel
keeps the factor of what was taken away instead of the inverse. The order is exactly the greedy one: without the rule of OBQ's own
program that weights far outside the grid go first, which mends much of its loss on clipping grids. It does not know how `H` was
damped.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice.codebook import Table
from nearplane.lattice.factor import one_thread
from nearplane.lattice.grid import Grid, QuantizedMatrix, Weights
from nearplane.lattice.kernels_cpu import position_of, round_code

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]

MAX_INPUTS = 4096  # there a row takes seconds, and 128 MiB that no cache holds


class Rows(NamedTuple):
    """What the compiled sweep reads, and `codes` and `order`, which it writes; see `sweep_rows_torch`."""

    W: Floats
    scale: Floats
    zero: Floats
    table: Table
    P: Floats
    floor: Floats
    codes: Integers
    order: Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedySweep:
    """A matrix rounded greedily, and the order in which every row was.

    Args:
        matrix: codes and grid.
        order: (out, in) int64, the column of each row that was rounded first, second, ...; dead inputs stand last.
    """

    matrix: QuantizedMatrix[Grid]
    order: Tensor


def greedy(
    W: Tensor, grid: Grid, H: Tensor, *, shift: float = 0.0, dead: Tensor | None = None, memory: int = 1 << 30
) -> QuantizedMatrix[Grid]:
    """Round each row of `W` in its own greedy order: `greedy_sweep` without the orders."""
    return greedy_sweep(W, grid, H, shift=shift, dead=dead, memory=memory).matrix


def greedy_sweep(
    W: Tensor, grid: Grid, H: Tensor, *, shift: float = 0.0, dead: Tensor | None = None, memory: int = 1 << 30
) -> GreedySweep:
    """Round each row of `W` in its own order: next is always the free weight whose rounding costs least.

    With F the columns still free, P = (H_FF + shift I)^-1 and err_j = w_j - value_j, until F is empty:

        j = argmin_{F} err_j^2 / P_jj ;  w_F -= err_j / P_jj P_Fj ;  P -= P_:j P_j: / P_jj

    The column chosen is that of the hyperplane {code_j = z} nearest to the target among those of all free columns. Given the
    order, the codes are those of `nearest_plane`. Of equal costs the lowest column goes first.

    Args:
        W: (out, in) weights; the sweep runs in float64 whatever their dtype.
        grid: steps and limits of every column; see `Grid`.
        H: (in, in) symmetric positive semi-definite, undamped.
        shift: what damping adds to its diagonal, in the units of `H`: `Factor.shift`.
        dead: (in,) bool, inputs that were always 0; None takes those with `H_jj == 0`. They decode to what is nearest to 0.
        memory: bytes that the inverses, or factors, of the rows worked on at a time may take. At least one row is.

    Raises:
        NumericalError: more than 4,096 inputs, something not finite, or `H + shift I` not positive definite.

    Frantar and Alistarh (2022), OBQ; the geometry is Corollary 4 of Chen et al. (2025).
    """
    n = W.shape[1]
    if n > MAX_INPUTS:
        raise NumericalError(
            f"The greedy order of {n} inputs takes {n}^3/6 multiplications a row; at most {MAX_INPUTS} inputs are taken. "
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
        rows = max(1, memory // (8 * len(live) ** 2))  # at a time
        sweep = sweep_rows if w.device.type == "cpu" else sweep_rows_torch
        found, sequence = sweep(Weights(w, scale, zero, grid.codebook), P, floor, rows)
        codes[:, live] = found
        order[:, : len(live)] = live[sequence]
    return GreedySweep(matrix=QuantizedMatrix(codes=codes, grid=grid), order=order)


def _inverse(H: Tensor, shift: float, live: Tensor) -> tuple[Tensor, Tensor]:
    """Return (live, live) `(H + shift I)^-1` of the live columns, and (live,) `1 / (H_jj + shift)`.

    The second is what no diagonal entry of the inverse falls below, whichever columns are still free.
    """
    A = H.double()[live[:, None], live]
    A.diagonal().add_(shift)
    if not bool(torch.isfinite(A).all()):
        raise NumericalError("The Hessian holds NaN or Inf: the calibration inputs of this layer are not finite.")
    with one_thread():
        L, info = torch.linalg.cholesky_ex(A)
    if int(info):
        raise NumericalError(
            f"The Hessian is not positive definite: the pivot of column {int(live[int(info) - 1])} is not positive with "
            f"{shift:g} added to the diagonal. Use more calibration tokens, or a larger --damp or --sweep-damp."
        )
    with one_thread():
        return torch.cholesky_inverse(L), 1 / A.diagonal()


def sweep_rows_torch(weights: Weights, P: Tensor, floor: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Sweep all rows, `rows` at a time with one inverse each; the oracle of the compiled kernel, and the form for every device.

    Args:
        weights: (out, in) float64.
        P: (in, in) inverse of the damped Hessian.
        floor: (in,) least possible diagonal of the inverse for fewer columns; rounding errors do not get below it.

    Returns:
        (out, in) codes int32, and (out, in) the order.
    """
    W, scale, zero, codebook = weights
    codes, order = torch.empty_like(W, dtype=torch.int32), torch.empty_like(W, dtype=torch.int64)
    for a in range(0, len(W), rows):
        part = slice(a, a + rows)
        w, s, z = W[part].clone(), scale[part], zero[part]
        inverse = P.repeat(len(w), 1, 1)  # (rows, in, in), one for every row's own set of free columns
        taken = torch.zeros_like(w, dtype=torch.bool)
        row = torch.arange(len(w), device=w.device)
        for step in range(W.shape[1]):
            code = codebook.nearest(w / s + z)
            error = w - s * (codebook.position(code) - z)
            length = torch.maximum(inverse.diagonal(dim1=1, dim2=2), floor)
            j = (error.square() / length).masked_fill_(taken, torch.inf).argmin(1)
            column = inverse[row, :, j] / length[row, j].sqrt()[:, None]  # (rows, in)
            w -= (error[row, j] / length[row, j].sqrt())[:, None] * column
            inverse.sub_(column[:, :, None] * column[:, None, :])
            codes[part][row, j] = code[row, j].to(torch.int32)
            order[part][:, step] = j
            taken[row, j] = True
    return codes, order


def sweep_rows(
    weights: Weights, P: Tensor, floor: Tensor, rows: int, *, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sweep all rows on the CPU, compiled, a row in every thread and at most `rows` at a time. As `sweep_rows_torch`.

    What the downdates took from the inverse is kept as a factor, `P_t = P - L^T L` with a row of `L` for every step, so that only
    its diagonal and the chosen column are ever computed. Columns that are done leave: a row costs in^3/6 multiplications.
    """
    W, scale, zero, codebook = weights
    codes, order = torch.empty_like(W, dtype=torch.int32), torch.empty_like(W, dtype=torch.int64)
    w, s, z = (x.contiguous().numpy() for x in (W, scale, zero))
    kernel: Any = _sweep_rows
    table = codebook.table(W.dtype)
    work = Rows(w, s, z, table, P.contiguous().numpy(), floor.numpy(), codes.numpy(), order.numpy())
    threads = min(threads or torch.get_num_threads(), rows, len(W))
    share = -(-len(W) // threads)
    with ThreadPoolExecutor(threads) as pool:
        for part in [pool.submit(kernel, a, min(a + share, len(W)), work) for a in range(0, len(W), share)]:
            part.result()
    return codes, order


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _take(v: Floats, L: Floats, j: int, steps: int, m: int) -> None:
    """Subtract `L^T L` of `steps` rows from the column `v` of position `j`, whose m positions are still free."""
    k = 0
    while k + 4 <= steps:
        a, b, c, d = L[k, j], L[k + 1, j], L[k + 2, j], L[k + 3, j]
        p, q, r, s = L[k], L[k + 1], L[k + 2], L[k + 3]
        for i in range(m):
            v[i] -= p[i] * a + q[i] * b + r[i] * c + s[i] * d
        k += 4
    while k < steps:
        a = L[k, j]
        for i in range(m):
            v[i] -= L[k, i] * a
        k += 1


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _cheapest(w: Floats, s: Floats, z: Floats, table: Table, length: Floats, index: Indices) -> int:
    """Return the position whose rounding costs least; of equal ones that of the lowest column."""
    best, least = 0, np.inf
    for i in range(len(index)):
        code = round_code(w[i] / s[i] + z[i], table)
        error = w[i] - s[i] * (position_of(code, table) - z[i])
        cost = error * error / length[i]
        if cost < least or (cost == least and index[i] < index[best]):
            best, least = i, cost
    return best


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _sweep_rows(start: int, stop: int, rows: Rows) -> None:
    """Sweep the rows from `start` to `stop`. Positions 0..m-1 hold the free columns; the last takes the place of one done."""
    W, scale, zero, table, P, floor, codes, order = rows
    n = W.shape[1]
    L, v = np.empty((n, n)), np.empty(n)
    for row in range(start, stop):
        w, s, z = W[row].copy(), scale[row].copy(), zero[row].copy()
        length, least = np.diag(P).copy(), floor.copy()
        index = np.arange(n)
        for step in range(n):
            m = n - step
            j = _cheapest(w, s, z, table, length, index[:m])
            code = round_code(w[j] / s[j] + z[j], table)
            error = w[j] - s[j] * (position_of(code, table) - z[j])
            codes[row, index[j]] = np.int32(code)
            order[row, step] = index[j]
            column = P[index[j]]
            for i in range(m):
                v[i] = column[index[i]]
            _take(v, L, j, step, m)
            root = np.sqrt(length[j])
            for i in range(m):
                x = v[i] / root
                L[step, i] = x
                w[i] -= error / root * x
                length[i] = max(length[i] - x * x, least[i])
            last = m - 1
            for x in (w, s, z, length, least):
                x[j] = x[last]
            index[j] = index[last]
            for k in range(step + 1):
                L[k, j] = L[k, last]

"""Solvers that round a matrix to a grid: nearest-plane (Babai, equal to GPTQ), rounding to nearest, and their table.

To add one, write a function and one line of the table at the end, which states its needs and guarantees.

The sweep runs in rounding order on the transposed matrix (columns first, so that blocks of columns are contiguous).
Blocks are swept one by one; the errors of earlier blocks enter a block as one matrix product. Inside a block a kernel
of the device does the work (`kernels.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice.beam import k_best
from nearplane.lattice.factor import Factor, read
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.kernels import kernels_of
from nearplane.lattice.kernels_torch import Columns, Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Result of a solver, with losses and clipping counts of its sweep.

    Args:
        matrix: Codes and grid.
        losses: (out,) float64 loss of every row under the damped Hessian, `sum_j d_j (t_j - values_j)^2`; None if
            unknown.
        outside: (out,) count of targets more than half a step beyond the codes of the grid, in the nearest-plane sweep
            from which the codes start; None if there was no such sweep on this grid.
    """

    matrix: QuantizedMatrix[Grid]
    losses: Tensor | None = None
    outside: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Input of a solver.

    Args:
        W: (out, in) target to round, float32 or float64.
        grid: Grid to round to.
        factor: Factor of `H + shift I`, in rounding order.
        H: (in, in) undamped Hessian.
        shift: Number that damping added to the diagonal of H.
        beam: Number of candidates of every row, if a solver keeps several.
    """

    W: Tensor
    grid: Grid
    factor: Factor
    H: Tensor
    shift: float
    beam: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Solver:
    """Entry of the table of solvers.

    Args:
        round: Function from a problem to a solution on its grid.
        bounded: Whether the solver starts from the codes of `nearest_plane` and never increases the loss, so that
            Babai's bounds hold.
        needs_inputs: Whether the solver uses the Hessian or its factor.
    """

    round: Callable[[Problem], Solution]
    bounded: bool
    needs_inputs: bool = True


def round_to_nearest(W: Tensor, grid: Grid) -> QuantizedMatrix[Grid]:
    """Round every weight of `W` (out, in) to the nearest value of the grid.

    Raises:
        NumericalError: `W` is not finite.
    """
    if not bool(torch.isfinite(W).all()):
        raise NumericalError("A weight is NaN or Inf.")
    codes, _ = grid.round(W)
    return QuantizedMatrix(codes=codes.to(torch.int32), grid=grid)


def nearest_plane(W: Tensor, grid: Grid, factor: Factor, *, block: int = 128) -> QuantizedMatrix[Grid]:
    """Round each row of `W` to the lattice of `grid` by Babai's nearest-plane algorithm.

    Column by column, in `factor.order`, the error already made is fed forward:

        codes_j = round((W_j + E_{<j} U_{<j,j}) / scale_j + zero_j)

    Args:
        W: (out, in) weights, float32 or float64; the sweep runs in their dtype.
        grid: Steps and limits of every column; see `Grid`.
        factor: Factored Hessian of the layer; see `factorize`.
        block: Columns swept before the error is propagated as one matrix product.

    Returns:
        (out, in) int32 codes in the column order of `W`, with the grid.

    Raises:
        NumericalError: `W` or the factor is not finite.

    Babai (1986); equal to GPTQ (Frantar et al., 2022) with the same order (Chen et al., 2025, Theorem 1).
    """
    return sweep_planes(W, grid, factor, block=block).matrix


def sweep_planes(W: Tensor, grid: Grid, factor: Factor, *, block: int = 128) -> Solution:
    """Round as `nearest_plane` does, and add up the loss and the number of clipped targets of every row."""
    d = factor.d.masked_fill(factor.dead[factor.order], factor.shift)  # a dead input has no length
    *extremes, mean = read(*W.aminmax(), *factor.d.aminmax(), d.mean())
    if not all(map(math.isfinite, extremes)):
        raise NumericalError("A weight or the factor of the Hessian is NaN or Inf.")
    _, octave = math.frexp(mean)  # large weights times large inputs overflow float32
    loss, outside = W.new_zeros(len(W)), torch.zeros(len(W), dtype=torch.int32, device=W.device)
    tally = Tally(d * 2.0**-octave, loss, outside, moves=False)
    order = factor.order
    columns = Columns(W.T.contiguous().index_select(0, order), *grid.columns_first(W), grid.group[order], grid.codebook)
    if (solve_pass := kernels_of(W).solve_pass) is None:
        codes = _sweep_blocks(columns, factor.U, tally, block)
    else:
        codes, _ = solve_pass(columns, factor.U.to(W.dtype), tally)
    matrix = QuantizedMatrix(codes=codes.index_select(0, order.argsort()).T.contiguous(), grid=grid)
    return Solution(matrix=matrix, losses=loss.double() * 2.0**octave, outside=outside)


def _sweep_blocks(columns: Columns, U: Tensor, tally: Tally, block: int) -> Tensor:
    """Sweep block after block, errors fed forward; return the codes (in, out)."""
    WT, scale, zero, group, codebook = columns
    target = WT.clone()
    codes = target.view(torch.int32)[:, : WT.shape[1]]  # in the memory of targets, which are read before
    E = torch.empty_like(WT[:block])  # weight minus value, of one block
    sweep = kernels_of(WT).sweep
    for a in range(0, len(WT), block):
        b = min(a + block, len(WT))
        part, sums = Columns(WT[a:b], scale, zero, group[a:b], codebook), tally._replace(d=tally.d[a:b])
        U_part = U[a:b, a:].to(WT.dtype)  # (b - a, columns left)
        sweep(target[a:b], part, U_part[:, : b - a], codes[a:b], E[: b - a], sums)
        target[b:].addmm_(U_part[:, b - a :].T, E[: b - a])
    return codes


SOLVERS: Mapping[str | None, Solver] = {
    "nearest-plane": Solver(round=lambda p: sweep_planes(p.W, p.grid, p.factor), bounded=True),
    "round-to-nearest": Solver(
        round=lambda p: Solution(matrix=round_to_nearest(p.W, p.grid)), bounded=False, needs_inputs=False
    ),
    "k-best": Solver(round=lambda p: Solution(matrix=k_best(p.W, p.grid, p.factor, beam=p.beam)), bounded=True),
}

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
    order, out = factor.order, len(W)
    d = factor.d.masked_fill(factor.dead[order], factor.shift)  # a dead input has no length
    *extremes, mean = read(*W.aminmax(), *factor.d.aminmax(), d.mean())
    if not all(map(math.isfinite, extremes)):
        raise NumericalError("A weight or the factor of the Hessian is NaN or Inf.")
    target = W.T.clone(memory_format=torch.contiguous_format)
    WT = target.index_select(0, order)  # (in, out), in rounding order
    scale, zero = (
        part.to(W.dtype).expand(out, -1).T.clone(memory_format=torch.contiguous_format)
        for part in (grid.scale, grid.zero)
    )
    group = grid.group[order]  # (in,)
    _, octave = math.frexp(mean)
    d = d * 2.0**-octave  # large weights times large inputs overflow float32
    codebook, loss, outside = grid.codebook, W.new_zeros(out), torch.zeros(out, dtype=torch.int32, device=W.device)
    columns, tally = Columns(WT, scale, zero, group, codebook), Tally(d, loss, outside, moves=False)
    solve_pass = kernels_of(WT).solve_pass
    # codes take the memory of what is read before: targets, or the weights of a pass that needs no targets
    codes, free = (part.view(torch.int32)[:, :out] for part in ((WT, target) if solve_pass else (target, WT)))
    if solve_pass is None:
        target.copy_(WT)
        _sweep_blocks(columns, factor.U, target, codes, tally, block)
    else:
        solve_pass(columns, factor.U.to(W.dtype), codes, target, tally)
    # reuses memory again: the first access to new memory costs most
    codes_by_column = free.index_copy_(0, order, codes)
    matrix = QuantizedMatrix(codes=codes_by_column.T.clone(memory_format=torch.contiguous_format), grid=grid)
    return Solution(matrix=matrix, losses=loss.double() * 2.0**octave, outside=outside)


def _sweep_blocks(columns: Columns, U: Tensor, target: Tensor, codes: Tensor, tally: Tally, block: int) -> None:
    """Sweep block after block; `target` (in, out) are the weights at first, `codes` may share its memory."""
    WT, scale, zero, group, codebook = columns
    E = torch.empty_like(WT[:block])  # weight minus value, of one block
    sweep = kernels_of(WT).sweep
    for a in range(0, len(WT), block):
        b = min(a + block, len(WT))
        part, sums = Columns(WT[a:b], scale, zero, group[a:b], codebook), tally._replace(d=tally.d[a:b])
        U_part = U[a:b, a:].to(WT.dtype)  # (b - a, columns left)
        sweep(target[a:b], part, U_part[:, : b - a], codes[a:b], E[: b - a], sums)
        target[b:].addmm_(U_part[:, b - a :].T, E[: b - a])


SOLVERS: Mapping[str | None, Solver] = {
    "nearest-plane": Solver(round=lambda p: sweep_planes(p.W, p.grid, p.factor), bounded=True),
    "round-to-nearest": Solver(
        round=lambda p: Solution(matrix=round_to_nearest(p.W, p.grid)), bounded=False, needs_inputs=False
    ),
    "k-best": Solver(round=lambda p: Solution(matrix=k_best(p.W, p.grid, p.factor, beam=p.beam)), bounded=True),
}

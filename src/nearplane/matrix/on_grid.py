"""Quantization of a layer, or of some of its rows, on a fixed grid: steps are searched, rounded to, refined, and measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from nearplane.errors import RecipeError
from nearplane.lattice.factor import Factor, solved_strips
from nearplane.lattice.fits import FITS, check_steps
from nearplane.lattice.grid import Grid, QuantizedMatrix, stacked
from nearplane.lattice.polish import polish, refine
from nearplane.lattice.scale import Search, Steps, StepStorage
from nearplane.lattice.solvers import SOLVERS, Problem, Solution
from nearplane.matrix.certificate import MeasuredRows, SolvedMatrix, measured_rows, record_of
from nearplane.matrix.inputs import LayerInput, Target, named
from nearplane.recipe.block_scheme import BlockScheme
from nearplane.recipe.scheme import Scheme, check_apart
from nearplane.recipe.schemes import AnyScheme, GridScheme
from nearplane.record.record import LayerRecord
from nearplane.system.memory import release

STEP_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of steps in files


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedRows:
    """Some rows of a layer after their solve, or all.

    Args:
        matrix: Codes and grid.
        measured: Figures for the layer's record.
        seconds: Time that they took.
        asked: Rate that the search was for; None on a fixed grid.
    """

    matrix: QuantizedMatrix
    measured: MeasuredRows
    seconds: float
    asked: float | None = None


def check_rows(
    W: Tensor, scheme: GridScheme | BlockScheme, storage: torch.dtype | StepStorage, name: str
) -> StepStorage:
    """Return how the steps of a layer (out, in) will be stored; for errors see `quantize_matrix`."""
    if getattr(scheme, "entropy_coded", True):
        raise RecipeError(
            f"{name}: found a {type(scheme).__name__}, expected a GridScheme. Use quantize_matrix_to_rate for a rate."
        )
    check_apart(scheme)
    stored = storage if isinstance(storage, StepStorage) else StepStorage(storage)
    if stored.dtype not in (*STEP_DTYPES, W.dtype):
        raise RecipeError(f"storage is {stored.dtype}; expected torch.float16, torch.bfloat16 or torch.float32.")
    if scheme.default_allocation == "slope":
        raise RecipeError(
            f"{name}: the scheme has bits for each layer of a model chosen by measuring ({scheme}). For one matrix, pass a whole "
            f"number of bits, or the grid of a type."
        )
    scheme = scheme.grouped([W.shape[1]])
    if scheme.grid not in (None, scheme.number_format.name) or W.shape[1] % scheme.number_format.run:
        raise RecipeError(f"{name}: {W.shape[1]} inputs {scheme.misfit}")
    if len(W) % (shared := scheme.number_format.rows):
        raise RecipeError(
            f"{name}: {len(W)} outputs are not a multiple of the {shared} rows that share steps. Use another --grid."
        )
    if stored.peak is None and scheme.number_format.global_scale:
        return stored._replace(peak=float(W.abs().max()))
    return stored


def solve_rows(
    W: Tensor,
    rows: slice,
    target: Target,
    inputs: LayerInput,
    scheme: GridScheme | BlockScheme,
    *,
    storage: StepStorage,
    name: str = "matrix",
) -> SolvedRows:
    """Solve some rows of a layer on a fixed grid, to the same bits as with all others; see `quantize_matrix`.

    Args:
        W: (out, in) weights of all rows.
        rows: Whole strips of rows, see `solved_strips`.
        target: Target of these rows.
        inputs, scheme, name: See `quantize_matrix`.
        storage: How steps are stored, see `check_rows`.
    """
    scheme = scheme.grouped([W.shape[1]])
    with named(name, inputs.moments.tokens):
        wide = target.values.to(torch.promote_types(W.dtype, torch.float32))
        solution = solve(wide, inputs, scheme, storage)
        check_steps(solution.matrix.grid, wide, W, importance_of(inputs, scheme), steps_of(scheme, storage))
        known = SolvedMatrix(matrix=solution.matrix, outside=solution.outside)
        measured = measured_rows(W, rows, target, known, inputs, scheme)
    return SolvedRows(matrix=solution.matrix, measured=measured, seconds=time.perf_counter() - target.began)


def joined(
    parts: Sequence[SolvedRows], inputs: LayerInput, scheme: AnyScheme, *, name: str
) -> tuple[QuantizedMatrix, LayerRecord]:
    """Return codes and grid of a layer, and its record, from all its rows in their order."""
    began = time.perf_counter()
    matrix: QuantizedMatrix = stacked([cast("QuantizedMatrix[Grid]", part.matrix) for part in parts])
    scheme = scheme.grouped([matrix.codes.shape[1]])
    record = record_of(name, [part.measured for part in parts], matrix, inputs, scheme)
    seconds = sum(part.seconds for part in parts) + time.perf_counter() - began
    return matrix, replace(record, asked=parts[0].asked, seconds=round(seconds, 6))


def solve(target: Tensor, inputs: LayerInput, scheme: GridScheme | BlockScheme, storage: StepStorage) -> Solution:
    """Fit a grid to the target, round the target to it, and refine both, strip by strip."""
    factor = inputs.factor_of_the_sweep(scheme)
    importance = importance_of(inputs, scheme)
    H, rounds, sweeps = None, scheme.rounds or 0, scheme.polish or 0
    if rounds or sweeps:
        H = inputs.damped(factor, target.dtype)
        mean = H.diagonal().mean()
        # a power of two that keeps float32 from overflowing and changes no code; 1 if all inputs are 0
        unit = (torch.frexp(mean).mantissa / mean).nan_to_num(nan=1.0).clamp(2.0**-126, 2.0**126)
        H.mul_(unit)

    def of_strip(strip: Tensor, steps: Steps) -> Solution:
        grid, fit = FITS[steps.format.fit](strip, importance, steps)
        release()  # memory of the factorization and of the search for steps
        if H is None:
            return rounded(strip, grid, factor, scheme, inputs.moments.H)

        def once(now: Grid) -> Solution:
            solution = rounded(strip, now, factor, scheme, inputs.moments.H)
            return solution if solution.losses is None else replace(solution, losses=solution.losses * unit)

        solution = refine(strip, H, grid, fit, once, rounds=rounds)
        polished = polish(strip, solution.matrix, H, sweeps=sweeps) if sweeps else solution.matrix
        return replace(solution, matrix=polished, losses=None)

    peak = storage.peak
    if peak is None and scheme.number_format.global_scale:
        peak = float(target.abs().max())
    steps = steps_of(scheme, storage._replace(peak=peak))
    solutions = [of_strip(target[rows], steps) for rows in solved_strips(len(target), target.device)]
    outside = [each.outside for each in solutions if each.outside is not None]
    return Solution(
        matrix=stacked([each.matrix for each in solutions]), outside=torch.cat(outside) if outside else None
    )


def importance_of(inputs: LayerInput, scheme: Scheme) -> Tensor:
    """Return (in,) the importance of the errors of each column when steps are fitted: the root mean square of its input."""
    H = inputs.moments.H
    return H.diagonal().sqrt() if scheme.calibrated else torch.ones_like(H.diagonal())


def steps_of(scheme: GridScheme | BlockScheme, storage: StepStorage) -> Steps:
    """Return the settings for the initial fit of steps."""
    search: Search = getattr(scheme, "scale", "mse")
    return Steps(format=scheme.number_format, search=search, storage=storage.dtype, peak=storage.peak)


def rounded(target: Tensor, grid: Grid, factor: Factor, scheme: Scheme, H: Tensor) -> Solution:
    """Round the target to a grid with the solver of the scheme; `factor` is the factor of the damped `H`."""
    problem = Problem(W=target, grid=grid, factor=factor, H=H, shift=factor.shift, beam=scheme.beam or 1)
    return SOLVERS[scheme.solver].round(problem)

"""Quantization of one matrix on a fixed grid, without a model.

    matrix, record = quantize_matrix(W, X.T @ X / len(X), GridScheme(bits=3))

Rows may compensate each other's errors too: the second side of a two-sided lattice problem. Errors E (out, in) of a
layer cost the network about `tr(G E H E^T)`, with H of its inputs and `G = E[g g^T]` of the gradients by its outputs.
With `G = U diag(d) U^T`, U unit upper triangular, the cost is

    sum_i d_i |e_i + sum_{k<i} U_ki e_k|_H^2

Each row is therefore solved for its target plus the errors that the rows before it pass on, as columns in a sweep.
Rows are solved part by part. Runs of rows, between which G is not known, are solved at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor

from nearplane.errors import NumericalError, RecipeError
from nearplane.lattice.factor import Factor, factorize, one_thread, solved_strips
from nearplane.lattice.fits import FITS, check_steps
from nearplane.lattice.grid import Grid, QuantizedMatrix, stacked
from nearplane.lattice.moments import Moments
from nearplane.lattice.polish import polish, refine
from nearplane.lattice.scale import Search, Steps, StepStorage
from nearplane.lattice.solvers import SOLVERS, Problem, Solution
from nearplane.matrix.certificate import MeasuredRows, SolvedMatrix, measured_rows, record_of
from nearplane.matrix.inputs import LayerInput, Target, corrected, lattice_problem, named
from nearplane.recipe.block_scheme import BlockScheme
from nearplane.recipe.scheme import Scheme
from nearplane.recipe.schemes import AnyScheme, GridScheme
from nearplane.record.record import LayerRecord
from nearplane.system.arguments import checked
from nearplane.system.memory import release

ROW_DAMP = 0.1  # damping of G, relative to the mean of its diagonal
MAX_PARTS, MIN_ROWS = 16, 16  # a run of rows is solved in at most 16 parts, of at least 16 rows
STEP_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of steps in files


@checked("W", "statistics", "scheme", verb=False)
def quantize_matrix(
    W: Tensor | NDArray[Any],
    statistics: Tensor | NDArray[Any] | Moments | LayerInput,
    scheme: GridScheme | BlockScheme,
    *,
    storage: torch.dtype | StepStorage = torch.float16,
    name: str = "matrix",
    together: Sequence[Tensor] = (),
) -> tuple[QuantizedMatrix, LayerRecord]:
    """Quantize one matrix on a fixed grid.

    Args:
        W: (out, in) weights of torch or numpy; the results are of torch.
        statistics: (in, in) Hessian `X^T X / tokens` of torch or numpy, or `Moments`, or `LayerInput`.
        scheme: Grid, order and solver.
        storage: Dtype in which steps will be stored, maybe with the peak of matrices that share a global scale; steps are
            rounded before the solve.
        name: Name of the matrix in the record and in error messages.
        together: (rows, rows) moments of gradients for each run of rows, for a two-sided scheme; see `solve_joined`.

    Returns:
        Codes and grid, and the layer's record.

    Raises:
        RecipeError: The group size does not divide the inputs, or the scheme is of another kind.
        NumericalError: A weight is not finite, `storage` does not have the steps of the weights, or the Hessian is not positive
            definite, not symmetric or of a wrong size.
    """
    W, inputs = lattice_problem(W, statistics, name)
    stored = check_rows(W, scheme, storage, name)
    with named(name, inputs.moments.tokens):
        target = corrected(W, inputs, scheme)
    rows = solve_rows(W, slice(None), target, inputs, scheme, storage=stored, name=name, together=together)
    return joined([rows], inputs, scheme, name=name)


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
    together: Sequence[Tensor] = (),
) -> SolvedRows:
    """Solve some rows of a layer on a fixed grid, to the same bits as with all others; see `quantize_matrix`.

    Args:
        W: (out, in) weights of all rows.
        rows: Whole strips of rows, see `solved_strips`; all rows if a two-sided scheme joins them.
        target: Target of these rows.
        inputs, scheme, name, together: See `quantize_matrix`.
        storage: How steps are stored, see `check_rows`.
    """
    scheme = scheme.grouped([W.shape[1]])
    with named(name, inputs.moments.tokens):
        wide = target.values.to(torch.promote_types(W.dtype, torch.float32))
        if scheme.joins_rows and together:
            solution = solve_joined(wide, together, lambda part: solve(part, inputs, scheme, storage))
        else:
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
    if storage.peak is None and scheme.number_format.global_scale:
        storage = storage._replace(peak=float(target.abs().max()))
    steps = steps_of(scheme, storage)
    H, rounds, sweeps = None, scheme.rounds or 0, scheme.polish or 0
    if rounds or sweeps:
        H = inputs.damped(factor, target.dtype)
        mean = H.diagonal().mean()
        # a power of two that keeps float32 from overflowing and changes no code; 1 if all inputs are 0
        unit = (torch.frexp(mean).mantissa / mean).nan_to_num(nan=1.0).clamp(2.0**-126, 2.0**126)
        H.mul_(unit)

    def of_strip(strip: Tensor) -> Solution:
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

    solutions = [of_strip(target[rows]) for rows in solved_strips(len(target), target.device)]
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


def solve_joined(target: Tensor, together: Sequence[Tensor], solve: Callable[[Tensor], Solution]) -> Solution:
    """Solve rows part by part, each for its target plus the errors that the parts before it pass on.

    Args:
        target: (out, in) target of all rows.
        together: (rows, rows) `E[g g^T]` of the outputs of each run of rows; the runs make up `out`, in order.
        solve: Function that fits a grid to some rows (rows, in) and rounds them to it.

    Raises:
        NumericalError: The runs do not make up the rows, or a G cannot be factored.
    """
    if sum(map(len, together)) != len(target):
        raise NumericalError(f"Found gradients of {sum(map(len, together))} outputs; expected {len(target)}.")
    feedback, parts, starts = [], [], [0, *accumulate(map(len, together))]
    for G in together:
        factor = factorize(G.double(), "natural", damp=ROW_DAMP)
        feedback.append((factor.d.sqrt()[:, None] * factor.U.T).to(target))  # M of G = M^T M, lower triangular
        size = max(MIN_ROWS, -(-len(G) // MAX_PARTS))
        parts.append([range(len(G))[a : a + size] for a in range(0, len(G), size)])
    errors = torch.zeros_like(target)  # errors of the rows that are solved already
    solved: list[tuple[Tensor, QuantizedMatrix[Grid]]] = []
    for step in range(max(map(len, parts))):
        targets, current = [], []
        for M, each, start in zip(feedback, parts, starts, strict=False):
            if step < len(each):
                rows = torch.arange(start + each[step].start, start + each[step].stop, device=target.device)
                targets.append(target[rows] + _passed_on(M, errors[start : start + len(M)], each[step]))
                current.append(rows)
        rows = torch.cat(current)
        matrix = solve(torch.cat(targets)).matrix
        errors[rows] = target[rows] - matrix.decode().to(target)
        solved.append((rows, matrix))
    return Solution(matrix=_assembled(solved))


def _passed_on(M: Tensor, errors: Tensor, rows: range) -> Tensor:
    """Return (rows, in) errors that these rows take over from the errors (run, in) of the rows before them."""
    first, end = rows.start, rows.stop
    if not first:
        return errors[:end]  # all 0
    carried = M[first:end, :first] @ errors[:first]
    with one_thread():
        passed: Tensor = torch.linalg.solve_triangular(M[first:end, first:end], carried, upper=False)
    return passed


def _assembled(solved: Sequence[tuple[Tensor, QuantizedMatrix[Grid]]]) -> QuantizedMatrix[Grid]:
    """Return the matrix of all rows from parts that were solved separately."""
    inverse = torch.cat([rows for rows, _ in solved]).argsort()
    matrix = stacked([matrix for _, matrix in solved])
    return QuantizedMatrix(codes=matrix.codes[inverse], grid=matrix.grid.of_rows(inverse))


def with_tensors(record: LayerRecord, name: str, size: int, checksum: str) -> LayerRecord:
    """Return the record with the name, size in bytes and checksum of the layer's tensors in the file."""
    return replace(record, stored=name, bytes=size, checksum=checksum)

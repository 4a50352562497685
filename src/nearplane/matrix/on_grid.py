"""One matrix, no model: the unit of study, of tests and of the record.

    matrix, record = quantize_matrix(W, X.T @ X / len(X), GridScheme(bits=3))

Rows may make up for each other's errors too: the second side of a two-sided lattice problem. A layer's errors E (out, in) cost the
network about `tr(G E H E^T)`: H of its inputs, which the solver knows, and `G = E[g g^T]` of the gradients by its outputs. With
`G = U diag(d) U^T`, U unit upper triangular, that is

    sum_i d_i |e_i + sum_{k<i} U_ki e_k|_H^2

so that a row is best solved for its target plus what the rows before it leave to it, as columns are in a sweep. Here rows are
taken some at a time, each with one solve of its own; runs of rows, between which nothing is known, at the same time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from nearplane.errors import NumericalError, RecipeError
from nearplane.lattice.factor import Factor, factorize, one_thread
from nearplane.lattice.fits import FITS
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.moments import Moments
from nearplane.lattice.polish import polish, refine
from nearplane.lattice.scale import Steps
from nearplane.lattice.solvers import SOLVERS, Problem, Solution
from nearplane.matrix.certificate import Known, measure
from nearplane.matrix.inputs import Inputs, corrected, lattice_problem
from nearplane.recipe.scheme import Scheme
from nearplane.recipe.schemes import BlockScheme, GridScheme
from nearplane.record.record import LayerRecord

DAMP = 0.1  # of G, relative to the mean of its diagonal
PARTS, LEAST_ROWS = 16, 16  # of a run, that are solved one after the other; rows of a part at least


def quantize_matrix(
    W: Tensor | NDArray[Any],
    statistics: Tensor | NDArray[Any] | Moments | Inputs,
    scheme: GridScheme | BlockScheme,
    *,
    storage: torch.dtype = torch.float16,
    name: str = "matrix",
    together: Sequence[Tensor] = (),
) -> tuple[QuantizedMatrix, LayerRecord]:
    """Quantize one matrix.

    Args:
        W: (out, in) weights, of torch or numpy; results are of torch.
        statistics: (in, in) Hessian `X^T X / tokens`, likewise, or all that calibration saw of the layer's inputs; `Inputs` where
            several matrices share them.
        scheme: grid, order, solver.
        storage: dtype in which steps will be stored; they are rounded to it before the solve.
        name: for the record and for errors.
        together: of a two-sided scheme, what errors of outputs cost together, of runs of rows; see `solve_joined`.

    Returns:
        Codes and grid, and what was lost.

    Raises:
        RecipeError: the group size does not divide the inputs, or the scheme is of another kind.
        NumericalError: a weight is not finite, or the Hessian not positive definite, symmetric or of W's inputs.
    """
    began = time.perf_counter()
    if getattr(scheme, "entropy_coded", True):
        raise RecipeError(
            f"{name}: a {type(scheme).__name__} found, expected a GridScheme. Entropy-coded weights are quantize_matrix_to_rate's."
        )
    W, inputs = lattice_problem(W, statistics, name)
    scheme = scheme.grouped([W.shape[1]])
    if scheme.mixed or W.shape[1] % scheme.number_format.run:
        raise RecipeError(f"{name}: {W.shape[1]} inputs {scheme.unfit}")
    try:
        aim = corrected(W, inputs, scheme)
        wide = aim[0].to(torch.promote_types(W.dtype, torch.float32))
        if scheme.joins_rows and together:
            found = solve_joined(wide, together, lambda part: solve(part, inputs, scheme, storage))
        else:
            found = solve(wide, inputs, scheme, storage)
        record = measure(name, W, aim, Known(matrix=found.matrix, outside=found.outside), inputs, scheme)
    except NumericalError as error:
        raise NumericalError(f"{name} ({inputs.moments.tokens} tokens): {error}") from error
    return found.matrix, replace(record, seconds=round(time.perf_counter() - began, 6))


def solve(target: Tensor, inputs: Inputs, scheme: GridScheme | BlockScheme, storage: torch.dtype) -> Solution:
    """Fit a grid to the target, round the target to it, and refine both."""
    factor = inputs.factor_of_the_sweep(scheme)
    importance = inputs.moments.H.diagonal().sqrt() if scheme.calibrated else target.new_ones(target.shape[1])
    steps = Steps(format=scheme.number_format, search=getattr(scheme, "scale", "mse"), storage=storage)
    grid, fit = FITS[steps.format.fit](target, importance, steps)
    rounds, sweeps = scheme.rounds or 0, scheme.polish or 0
    if not rounds and not sweeps:
        return rounded(target, grid, factor, scheme, inputs.moments.H)
    H = inputs.damped(factor, target.dtype)
    _, octave = math.frexp(float(H.diagonal().mean()))
    unit = 2.0 ** -min(126, max(-126, octave))  # changes no code; large weights times large inputs overflow float32
    H.mul_(unit)

    def once(now: Grid) -> Solution:
        found = rounded(target, now, factor, scheme, inputs.moments.H)
        return found if found.losses is None else replace(found, losses=found.losses * unit)

    found = refine(target, H, grid, fit, once, rounds=rounds)
    return replace(found, matrix=polish(target, found.matrix, H, sweeps=sweeps), losses=None) if sweeps else found


def rounded(target: Tensor, grid: Grid, factor: Factor, scheme: Scheme, H: Tensor) -> Solution:
    """Round the target to a grid by the solver of the scheme; `factor` is that of the damped `H`."""
    problem = Problem(W=target, grid=grid, factor=factor, H=H, shift=factor.shift, beam=scheme.beam or 1)
    return SOLVERS[scheme.solver].round(problem)


def solve_joined(target: Tensor, together: Sequence[Tensor], solve: Callable[[Tensor], Solution]) -> Solution:
    """Solve rows part by part, each for its target plus what the parts before leave to it.

    Args:
        target: (out, in).
        together: (rows, rows) `E[g g^T]` of the outputs of each run of rows, which make up `out`, in order.
        solve: rounds some rows (rows, in) to a grid that it fits to them.

    Raises:
        NumericalError: the runs do not make up the rows, or one cannot be factored.
    """
    if sum(map(len, together)) != len(target):
        raise NumericalError(f"Gradients of {sum(map(len, together))} outputs are given; expected {len(target)}.")
    feedback, parts, first = [], [], 0
    for G in together:
        factor = factorize(G.double(), "natural", damp=DAMP)
        feedback.append((factor.d.sqrt()[:, None] * factor.U.T).to(target))  # M of G = M^T M, lower triangular
        size = max(LEAST_ROWS, -(-len(G) // PARTS))
        parts.append(torch.arange(first, first + len(G), device=target.device).split(size))
        first += len(G)
    left = torch.zeros_like(target)  # errors of the rows that are solved
    starts = [int(each[0][0]) for each in parts]
    found: list[tuple[Tensor, QuantizedMatrix[Grid]]] = []
    for step in range(max(map(len, parts))):
        here = [each[step] if step < len(each) else each[0][:0] for each in parts]
        wanted = [
            target[rows] + _passed_on(M, left[start : start + len(M)], rows - start)
            for M, rows, start in zip(feedback, here, starts, strict=True)
        ]
        rows = torch.cat(here)
        matrix = solve(torch.cat(wanted)).matrix
        left[rows] = target[rows] - matrix.decode().to(target)
        found.append((rows, matrix))
    return Solution(matrix=_together(found))


def _passed_on(M: Tensor, errors: Tensor, rows: Tensor) -> Tensor:
    """Return (rows, in) what the errors (run, in) of the rows before some leave to these."""
    if not len(rows) or not rows[0]:
        return errors[rows]  # all 0
    first, end = int(rows[0]), int(rows[-1]) + 1
    left = M[first:end, :first] @ errors[:first]
    with one_thread():
        passed: Tensor = torch.linalg.solve_triangular(M[first:end, first:end], left, upper=False)
    return passed


def _together(found: Sequence[tuple[Tensor, QuantizedMatrix[Grid]]]) -> QuantizedMatrix[Grid]:
    """Return the matrix whose rows were found apart."""
    back = torch.cat([rows for rows, _ in found]).argsort()
    codes = torch.cat([matrix.codes for _, matrix in found])[back]

    def of_all(name: str) -> Tensor:
        return torch.cat([getattr(m.grid, name).expand(len(m.codes), -1) for _, m in found])[back]

    return QuantizedMatrix(codes=codes, grid=replace(found[0][1].grid, scale=of_all("scale"), zero=of_all("zero")))


def with_tensors(record: LayerRecord, name: str, size: int, checksum: str) -> LayerRecord:
    """Return the record with the name, the bytes and the checksum of the layer's tensors in the file."""
    return replace(record, stored=name, bytes=size, checksum=checksum)

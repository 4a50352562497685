"""One matrix, no model: the unit of study, of tests and of the record.

matrix, record = quantize_matrix(W, X.T @ X / len(X), GridScheme(bits=3))
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
from nearplane.lattice.factor import Factor
from nearplane.lattice.fits import FITS
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.moments import Moments
from nearplane.lattice.polish import Fit, polish, refine
from nearplane.lattice.scale import Steps
from nearplane.lattice.solvers import SOLVERS, Problem, Solution
from nearplane.matrix.certificate import measure
from nearplane.matrix.inputs import Inputs, corrected, lattice_problem
from nearplane.matrix.joined_rows import solve_joined
from nearplane.recipe.grids import BlockScheme, GridScheme
from nearplane.recipe.scheme import Scheme
from nearplane.record.record import LayerRecord


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
        together: of a two-sided scheme, what errors of outputs cost together, of runs of rows; see `joined.py`.

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
        target, rho = corrected(W, inputs, scheme)
        wide = target.to(torch.promote_types(W.dtype, torch.float32))
        if scheme.joins_rows and together:
            found = solve_joined(wide, together, lambda part: solve(part, inputs, scheme, storage))
        else:
            found = solve(wide, inputs, scheme, storage)
        record = measure(name, W, target, found.matrix, inputs, scheme, correction=rho, outside=found.outside)
    except NumericalError as error:
        raise NumericalError(f"{name} ({inputs.moments.tokens} tokens): {error}") from error
    return found.matrix, replace(record, seconds=round(time.perf_counter() - began, 6))


def solve(target: Tensor, inputs: Inputs, scheme: GridScheme | BlockScheme, storage: torch.dtype) -> Solution:
    """Fit a grid to the target, round the target to it, and refine both."""
    factor = inputs.factor_of_the_sweep(scheme)
    grid, fit = fitted(target, inputs, scheme, storage)
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


def fitted(
    target: Tensor, inputs: Inputs, scheme: GridScheme | BlockScheme, storage: torch.dtype
) -> tuple[Grid, Callable[[Grid], Fit]]:
    """Return the grid to begin with, and what fits its steps to codes."""
    importance = inputs.moments.H.diagonal().sqrt() if scheme.calibrated else target.new_ones(target.shape[1])
    format = scheme.number_format
    steps = Steps(format=format, search=getattr(scheme, "scale", "mse"), storage=storage)
    return FITS[format.fit](target, importance, steps)


def rounded(target: Tensor, grid: Grid, factor: Factor, scheme: Scheme, H: Tensor) -> Solution:
    """Round the target to a grid by the solver of the scheme; `factor` is that of the damped `H`."""
    problem = Problem(W=target, grid=grid, factor=factor, H=H, shift=factor.shift, beam=scheme.beam or 1)
    return SOLVERS[scheme.solver].round(problem)


def with_tensors(record: LayerRecord, name: str, size: int, checksum: str) -> LayerRecord:
    """Return the record with the name, the bytes and the checksum of the layer's tensors in the file."""
    return replace(record, stored=name, bytes=size, checksum=checksum)

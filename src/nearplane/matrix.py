"""One matrix, no model: the unit of study, of tests and of the record.

matrix, record = quantize_matrix(W, X.T @ X / len(X), Rule(bits=3))
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from nearplane.certificate import measure
from nearplane.errors import NumericalError, RecipeError
from nearplane.inputs import Inputs, corrected, damp_of_the_sweep, lattice_problem
from nearplane.lattice.factor import Factor
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.polish import refine
from nearplane.lattice.scale import Steps
from nearplane.lattice.solve import Refit, nearest_plane
from nearplane.lattice.solvers import SOLVERS, Problem
from nearplane.models.statistics import Statistics
from nearplane.recipe import BEAM, Rule
from nearplane.record import LayerRecord


def quantize_matrix(
    W: Tensor | NDArray[Any],
    statistics: Tensor | NDArray[Any] | Statistics | Inputs,
    rule: Rule,
    *,
    storage: torch.dtype = torch.float16,
    name: str = "matrix",
) -> tuple[QuantizedMatrix, LayerRecord]:
    """Quantize one matrix.

    Args:
        W: (out, in) weights, of torch or numpy; results are of torch.
        statistics: (in, in) Hessian `X^T X / tokens`, likewise, or all that calibration saw of the layer's inputs; `Inputs` where
            several matrices share them.
        rule: grid, order, solver.
        storage: dtype in which steps will be stored; they are rounded to it before the solve.
        name: for the record and for errors.

    Returns:
        Codes and grid, and what was lost.

    Raises:
        RecipeError: the group size does not divide the inputs.
        NumericalError: a weight is not finite, or the Hessian not positive definite, symmetric or of W's inputs.
    """
    began = time.perf_counter()
    W, inputs = lattice_problem(W, statistics, name)
    rule = rule.resolved(None).grouped([W.shape[1]])
    if rule.group_size is not None and W.shape[1] % rule.group_size:
        raise RecipeError(
            f"{name}: {W.shape[1]} inputs are not a multiple of --group-size {rule.group_size}. Use one that divides them, or "
            f"none for one step a row."
        )
    try:
        target, rho = corrected(W, inputs, rule)
        matrix = solve(target.to(torch.promote_types(W.dtype, torch.float32)), inputs, rule, storage)
        record = measure(name, W, target, matrix, inputs, rule, correction=rho)
    except NumericalError as error:
        raise NumericalError(f"{name} ({inputs.moments.tokens} tokens): {error}") from error
    return matrix, replace(record, seconds=time.perf_counter() - began)


def solve(target: Tensor, inputs: Inputs, rule: Rule, storage: torch.dtype) -> QuantizedMatrix[Grid]:
    """Fit a grid to the target, round the target to it, and refine both."""
    factor = inputs.factor(rule.order, damp_of_the_sweep(inputs, rule))
    steps = Steps(bits=rule.bits, symmetric=rule.symmetric, search=rule.scale, storage=storage)
    importance = torch.empty_like(factor.d)
    importance[factor.order] = factor.d  # (in,), back in the order of the weight
    grid = steps.grid(target, rule.group_size, importance)
    current = rule.groups == "current" and rule.solver == "nearest-plane"
    refit = _refit(steps, grid, importance) if current else None
    rounds, sweeps = rule.rounds or 0, rule.polish or 0

    def once(now: Grid) -> QuantizedMatrix[Grid]:
        return rounded(target, now, factor, rule, inputs.moments.H, factor.shift, refit=refit if now is grid else None)

    if not rounds and not sweeps:
        return once(grid)
    return refine(target, inputs.damped(factor, target.dtype), grid, storage, once, rounds=rounds, sweeps=sweeps)


def rounded(
    target: Tensor, grid: Grid, factor: Factor, rule: Rule, H: Tensor, shift: float, *, refit: Refit | None = None
) -> QuantizedMatrix[Grid]:
    """Round the target to a grid by the solver of the rule; `factor` is that of `H + shift I`."""
    if refit is not None:
        return nearest_plane(target, grid, factor, refit=refit)
    return SOLVERS[rule.solver].round(
        Problem(W=target, grid=grid, factor=factor, H=H, shift=shift, beam=rule.beam or BEAM)
    )


def _refit(steps: Steps, grid: Grid, importance: Tensor) -> Refit:
    def refit(weights: Tensor, group: int) -> tuple[Tensor, Tensor]:
        return steps.fit(weights, importance[grid.group == group].to(weights.dtype))

    return refit


def with_tensors(record: LayerRecord, name: str, size: int, checksum: str) -> LayerRecord:
    """Return the record with the name, the bytes and the checksum of the layer's tensors in the file."""
    return replace(record, stored=name, bytes=size, checksum=checksum)

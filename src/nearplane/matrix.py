"""One matrix, no model: the unit of study, of tests and of the record.

matrix, record = quantize_matrix(W, X.T @ X / len(X), Rule(bits=3))
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Literal

import torch
from torch import Tensor

from nearplane.errors import NumericalError, RecipeError
from nearplane.lattice.bounds import certify, quadratic
from nearplane.lattice.factor import Factor, factorize
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.scale import Steps
from nearplane.lattice.solve import nearest_plane, round_to_nearest
from nearplane.lattice.target import correction, mismatch, trust, weighted_difference
from nearplane.models.statistics import Statistics
from nearplane.recipe import Order, Rule
from nearplane.record import LayerRecord


class Inputs:
    """What is known of one layer input, with its factors: each is made on first use and shared by all layers that see it."""

    def __init__(self, statistics: Statistics | Tensor) -> None:
        self.moments = statistics if isinstance(statistics, Statistics) else Statistics(H=statistics, tokens=0)
        self._factors: dict[tuple[str, float | str, bool], Factor] = {}
        self._eigenvalues: list[Tensor] = []

    def of(self, statistics: Statistics) -> Inputs:
        """Return the same input as another layer sees it: its own residual mismatch, the factors in common."""
        if statistics.H is not self.moments.H:
            raise NumericalError("Factors are shared between layers whose inputs differ.")
        other = Inputs(statistics)
        other._factors, other._eigenvalues = self._factors, self._eigenvalues
        return other

    def eigenvalues(self) -> Tensor:
        """Return (in,) the eigenvalues of H, none below 0."""
        if not self._eigenvalues:
            H = self.moments.H
            diagonal = int(H.count_nonzero()) == int(H.diagonal().count_nonzero())
            self._eigenvalues.append((H.diagonal() if diagonal else torch.linalg.eigvalsh(H)).clamp(min=0))
        return self._eigenvalues[0]

    def factor(self, order: Order, damp: float | Literal["auto"], *, fitting: bool = False) -> Factor:
        """Factor H in an order; with `fitting`, of the tokens that are not held out."""
        key = (order, damp, fitting)
        if key not in self._factors:
            H, held_out = self.moments.H, self.moments.held_out
            if fitting and held_out is not None:
                H = weighted_difference(H, self.moments.tokens, held_out.H, held_out.tokens)
            self._factors[key] = factorize(H, order, damp=damp)
        return self._factors[key]


def quantize_matrix(
    W: Tensor,
    statistics: Tensor | Statistics | Inputs,
    rule: Rule,
    *,
    storage: torch.dtype = torch.float16,
    name: str = "matrix",
) -> tuple[QuantizedMatrix, LayerRecord]:
    """Quantize one matrix.

    Args:
        W: (out, in) weights.
        statistics: (in, in) Hessian `X^T X / tokens`, or all that calibration saw of the layer's inputs; `Inputs` where
            several matrices share them.
        rule: grid, order, solver.
        storage: dtype in which steps will be stored; they are rounded to it before the solve.
        name: for the record and for errors.

    Returns:
        Codes and grid, and what was lost.

    Raises:
        RecipeError: the group size does not divide the inputs.
        NumericalError: a weight is not finite, or the Hessian not positive definite.
    """
    began = time.perf_counter()
    if rule.group_size is not None and W.shape[1] % rule.group_size:
        raise RecipeError(f"{name}: {W.shape[1]} inputs are not a multiple of --group-size {rule.group_size}.")
    inputs = statistics if isinstance(statistics, Inputs) else Inputs(statistics)
    try:
        factor = inputs.factor(rule.order, rule.damp)
        target, rho = corrected(W, inputs, rule)
        target = target.masked_fill(factor.dead, 0).to(torch.promote_types(W.dtype, torch.float32))
        matrix = solve(target, factor, rule, storage)
    except NumericalError as error:
        raise NumericalError(f"{name} ({inputs.moments.tokens} tokens): {error}") from error
    H = inputs.moments.H
    nearest = round_to_nearest(target, matrix.grid)
    record = LayerRecord(
        name=name,
        out_features=W.shape[0],
        in_features=W.shape[1],
        nearest_loss=float(quadratic((target - nearest.decode()).to(H.dtype), H).sum() / W.numel()),
        **asdict(certify(W, target, matrix, H, factor, swept=rule.solver == "nearest-plane")),
        correction=rho,
        damp=factor.damp,
        dead=int(factor.dead.sum()),
        tokens=inputs.moments.tokens,
        order=rule.order,
        bits=rule.bits,
        group_size=rule.group_size,
        symmetric=rule.symmetric,
        seconds=time.perf_counter() - began,
    )
    return matrix, record


def corrected(W: Tensor, inputs: Inputs, rule: Rule) -> tuple[Tensor, float]:
    """Return the target of the lattice problem and how far it went towards the full correction.

    The correction is fitted on four fifths of the windows, trusted as far as it helps on the others, and fitted again on all.
    """
    moments = inputs.moments
    held_out = moments.held_out
    if not rule.correct or moments.C is None or held_out is None:
        return W, 0.0
    lost = mismatch(W, moments.H, moments.C, moments.S)
    lost_held_out = mismatch(W, held_out.H, held_out.C, held_out.S)
    lost_fitting = weighted_difference(lost, moments.tokens, lost_held_out, held_out.tokens)
    trial = correction(lost_fitting, inputs.factor(rule.order, rule.damp, fitting=True))
    rho = trust(lost_held_out, held_out.H, trial)
    if rho == 0.0:
        return W, 0.0
    return W + rho * correction(lost, inputs.factor(rule.order, rule.damp)), rho


def solve(target: Tensor, factor: Factor, rule: Rule, storage: torch.dtype) -> QuantizedMatrix:
    """Fit a grid to the target and round the target to it."""
    steps = Steps(bits=rule.bits, symmetric=rule.symmetric, search=rule.scale, storage=storage)
    importance = torch.empty_like(factor.d)
    importance[factor.order] = factor.d  # (in,), back in the order of the weight
    grid = steps.grid(target, rule.group_size, importance)
    if rule.solver == "round-to-nearest":
        return round_to_nearest(target, grid)
    return nearest_plane(
        target, grid, factor, refit=_refit(steps, grid, importance) if rule.groups == "current" else None
    )


def _refit(steps: Steps, grid: Grid, importance: Tensor) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    def refit(weights: Tensor, group: int) -> tuple[Tensor, Tensor]:
        return steps.fit(weights, importance[grid.group == group].to(weights.dtype))

    return refit


def with_bytes(record: LayerRecord, size: int) -> LayerRecord:
    """Return the record with the size of the layer's tensors in the file."""
    return replace(record, bytes=size)

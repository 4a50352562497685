"""Lattice problem of a layer: shared factors of its inputs' Hessian, and the corrected target.

`on_grid.py` and `to_rate.py` solve this problem, and `certificate.py` measures the result. Nothing is rounded here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice.factor import Factor, factorize, one_thread, read, solved_strips
from nearplane.lattice.moments import Moments, moment_difference, trust, weighted_difference
from nearplane.recipe.scheme import Order, Scheme

TRIED_ROWS = 256  # rows on which the correction is tried to choose its weight, which is one number for all rows


class SharedInput:
    """Hessian of an input that layers share, with its factors and eigenvalues, each computed once, on first use.

    Args:
        H: (in, in) Hessian.

    Attributes:
        factors: Factors by order, damping, and whether only of tokens that are not held out; `Stage` drops them.
    """

    def __init__(self, H: Tensor) -> None:
        self.H = H
        self.factors: dict[tuple[str, float | str, bool], Factor] = {}
        self._reached = math.inf  # a level that an eigenvalue does not exceed

    @cached_property
    def eigenvalues(self) -> Tensor:
        """(in,) eigenvalues of H, clipped at 0 from below."""
        H = self.H
        diagonal = bool(H.count_nonzero() == H.diagonal().count_nonzero())
        with one_thread():
            return (H.diagonal() if diagonal else torch.linalg.eigvalsh(H)).clamp(min=0)

    def mean_log_eigenvalue(self, level: float) -> float | None:
        """Return the mean of the base-2 logarithms of H's eigenvalues if all are above `level`, else None.

        Two Cholesky decompositions, of `H - level I` in float32 and of H, cost a third of computing the
        eigenvalues. float32 is enough: `level` is far below the eigenvalues or among them. A failing one fails early.
        """
        if not 0 < level < min(self._least_diagonal, self._reached):
            return None
        with one_thread():
            if int(torch.linalg.cholesky_ex(_lowered(self.H, level)).info):
                self._reached = level
                return None
            return self._mean_log

    @cached_property
    def _least_diagonal(self) -> float:
        return float(self.H.diagonal().min())

    @cached_property
    def _mean_log(self) -> float | None:
        L, info = torch.linalg.cholesky_ex(self.H)
        failed, mean_log = read(info, L.diagonal().double().log2().mean())
        return None if failed else 2 * mean_log


def _lowered(H: Tensor, level: float) -> Tensor:
    """Return (in, in) `H - level I` in float32."""
    lower = H.to(torch.float32, copy=True)
    lower.diagonal().sub_(level)
    return lower


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Statistics of a layer's inputs: its own moments, and what it shares with the layers of the same input.

    Args:
        moments: Second moments; once the target is made, those that only it needs may be missing.
        shared: Hessian of these moments with its factors.
        corrects: Whether the moments for the target hold the difference between original and quantized inputs.
    """

    moments: Moments
    shared: SharedInput
    corrects: bool

    @classmethod
    def of(cls, statistics: Moments | Tensor, shared: SharedInput | None = None) -> LayerInput:
        """Return the input of a layer from second moments or (in, in) H alone, maybe with what others computed of H."""
        moments = statistics if isinstance(statistics, Moments) else Moments(H=statistics, tokens=0)
        if shared is not None and moments.H is not shared.H:
            raise NumericalError("Factors are shared between layers whose inputs differ.")
        return cls(moments, shared or SharedInput(moments.H), moments.corrects)

    def with_a_target(self) -> LayerInput:
        """Return what is needed once the target is made: half of the moments or less."""
        return replace(self, moments=replace(self.moments, C=None, lost=None, held_out=None))

    def damped(self, factor: Factor, dtype: torch.dtype) -> Tensor:
        """Return (in, in) the damped Hessian that was factored, as a copy."""
        H = self.moments.H.to(dtype, copy=True)
        H.diagonal().add_(factor.shift)
        return H

    def factor_of_the_sweep(self, scheme: Scheme) -> Factor:
        """Factor H with the scheme's damping of the sweep."""
        return self.factor(scheme.order, scheme.damp_of_the_sweep(self.corrects))

    def factor_of_the_correction(self, scheme: Scheme, *, fitting: bool = False) -> Factor:
        """Factor H with the scheme's damping of the correction; with `fitting`, H of the tokens that are not held out.

        The factor is float32 if the inputs were and it is good to 1/1000, unless the sweep shares it.
        """
        shared = not fitting and scheme.damp == scheme.damp_of_the_sweep(self.corrects)
        held_out = self.moments.held_out
        rough = not shared and held_out is not None and held_out.H.dtype == torch.float32
        return self.factor(scheme.order, scheme.damp, fitting=fitting, dtype="auto" if rough else None)

    def factor(
        self,
        order: Order,
        damp: float | Literal["auto"],
        *,
        fitting: bool = False,
        dtype: Literal["auto"] | None = None,
    ) -> Factor:
        """Factor H in an order; with `fitting`, H of the tokens not held out; `dtype` as in `factorize`."""
        key = (order, damp, fitting)
        if key not in self.shared.factors:
            moments, held_out = self.moments, self.moments.held_out if fitting else None
            H = moments.H
            if held_out is not None:
                H = weighted_difference(H.to(held_out.H.dtype), moments.tokens, held_out.H, held_out.tokens)
            self.shared.factors[key] = factorize(H, order, damp=damp, dtype=dtype)
        return self.shared.factors[key]


class Target(NamedTuple):
    """Target of the lattice problem of a layer.

    Args:
        values: (rows, in) weights to round, 0 for dead inputs.
        correction: Weight (0 to 1) of the correction in them.
        damp: Damping of the correction's factor.
        dead: (in,) mask of the inputs that were always 0.
        began: Time at which it was begun.
    """

    values: Tensor
    correction: float
    damp: float
    dead: Tensor
    began: float


@contextmanager
def named(name: str, tokens: int) -> Iterator[None]:
    """Let numerical errors name the layer, and the tokens on which its inputs were observed."""
    try:
        yield
    except NumericalError as error:
        raise NumericalError(f"{name} ({tokens} tokens): {error}") from error


def corrected(W: Tensor, inputs: LayerInput, scheme: Scheme, rows: slice = slice(None)) -> Target:
    """Return the target of the lattice problem.

    The weight of its correction is measured: a correction of `TRIED_ROWS` rows, fitted on four fifths of the windows, is
    scaled for the least error on the other windows. The correction of all rows is fitted on all windows. The target has
    the dtype of `W`; in float32 it is off by less than a thousandth of a step.

    Args:
        W: (out, in) weights of all rows.
        inputs, scheme: Statistics of the inputs, and whether and how to correct.
        rows: Rows of the target, from the first row of a strip on; see `solved_strips`.
    """
    began, moments = time.perf_counter(), inputs.moments
    if inputs.corrects and not moments.corrects:
        raise NumericalError("These inputs have a target already, and their moments are freed. Make a new LayerInput.")
    factor = inputs.factor_of_the_correction(scheme)
    weights, rho = W[rows], 0.0
    target = weights.clone()
    if scheme.correct and moments.corrects and moments.held_out is not None and moments.held_out.corrects:
        rho = _correction_weight(W, inputs, scheme)
        if rho != 0.0:
            first, lost_outputs = rows.start or 0, _lost_outputs(W, moments)
            for part in solved_strips(len(target), target.device):
                lost = lost_outputs(weights[part], slice(first + part.start, first + part.stop))
                target[part].add_(factor.solve(lost), alpha=rho)
    return Target(target.masked_fill_(factor.dead, 0), rho, factor.damp, factor.dead, began)


def _lost_outputs(W: Tensor, moments: Moments) -> Callable[[Tensor, Tensor | slice], Tensor]:
    """Return a function of some rows of the weights and their places: `Moments.lost` of them, or the same from C and H."""
    if (lost := moments.lost) is not None:
        return lambda weights, rows: lost[rows].to(weights.dtype)
    assert moments.C is not None, "moments have C or lost outputs"
    difference = moment_difference(moments.H, moments.C, W.dtype)
    return lambda weights, rows: weights @ difference


def _correction_weight(W: Tensor, inputs: LayerInput, scheme: Scheme) -> float:
    """Return the weight of the correction, see `trust`, from the gain of some evenly spread rows on held-out tokens."""
    moments, held_out = inputs.moments, inputs.moments.held_out
    assert held_out is not None
    rows = torch.linspace(0, len(W) - 1, min(TRIED_ROWS, len(W)), dtype=torch.float64).round().long().to(W.device)
    lost = _lost_outputs(W, moments)(W[rows], rows)
    lost_held_out = _lost_outputs(W, held_out)(W[rows], rows)
    lost_fitting = weighted_difference(lost, moments.tokens, lost_held_out, held_out.tokens)
    trial = inputs.factor_of_the_correction(scheme, fitting=True).solve(lost_fitting)
    return trust(lost_held_out, held_out.H, trial)

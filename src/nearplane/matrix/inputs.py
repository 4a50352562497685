"""The lattice problem of one layer: factors of its inputs' Hessian, made once and shared, and the corrected target.

What `on_grid.py` and `to_rate.py` solve and `certificate.py` measures; it rounds nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice.factor import Factor, factorize, one_thread
from nearplane.lattice.moments import Moments, correction, mismatch, trust, weighted_difference
from nearplane.recipe.scheme import Order, Scheme
from nearplane.system.memory import release

SYMMETRIC = 1e-4  # of the largest entry: what the two halves of a product in float32 may differ by
TRIED_ROWS = 256  # that tell how far a correction is to be trusted: one number for all rows


class Damped(NamedTuple):
    """What a factor says without its triangle: how much H was damped, and (in,) which inputs were always 0."""

    damp: float
    dead: Tensor


class Inputs:
    """What is known of one layer input, with its factors: each is made on first use and shared by all layers that see it.

    Those of the correction are let go when the last of the layers has its target.

    Args:
        statistics: second moments, or (in, in) H alone.

    Attributes:
        moments: the second moments, as far as they are not let go.
        corrects: whether the moments told what the quantized inputs have lost.
        spent: whether they were used once, and gave a target.
    """

    def __init__(self, statistics: Moments | Tensor) -> None:
        self.moments = statistics if isinstance(statistics, Moments) else Moments(H=statistics, tokens=0)
        self.corrects, self._once, self.spent = self.moments.corrects, False, False
        held_out = self.moments.held_out
        # whether float32 may do where no code or loss hangs on the last digits: rows were no better
        self._rough = held_out is not None and held_out.H.dtype == torch.float32
        self._last = True  # no layer behind this one sees the same
        self._factors: dict[tuple[str, float | str, bool], Factor] = {}
        self._damped: dict[tuple[str, float | str, bool], Damped] = {}
        self._eigenvalues: list[Tensor] = []
        self._mean_log: list[float | None] = []

    def of(self, statistics: Moments) -> Inputs:
        """Return the same input as another layer sees it: its own residual mismatch, the factors in common."""
        if statistics.H is not self.moments.H:
            raise NumericalError("Factors are shared between layers whose inputs differ.")
        other = Inputs(statistics)
        other._factors, other._eigenvalues = self._factors, self._eigenvalues
        other._mean_log, other._damped, self._last = self._mean_log, self._damped, False
        return other

    def used_once(self) -> Inputs:
        """Let go of moments that only a target needs as soon as it is made: half of them or more; return these inputs."""
        self._once = True
        return self

    def eigenvalues(self) -> Tensor:
        """Return (in,) the eigenvalues of H, none below 0."""
        if not self._eigenvalues:
            H = self.moments.H
            diagonal = int(H.count_nonzero()) == int(H.diagonal().count_nonzero())
            with one_thread():
                self._eigenvalues.append((H.diagonal() if diagonal else torch.linalg.eigvalsh(H)).clamp(min=0))
        return self._eigenvalues[0]

    def mean_log_eigenvalue(self, level: float) -> float | None:
        """Return the mean of the base-2 logarithms of H's eigenvalues if all are above `level`, else None.

        By two Cholesky decompositions, of `H - level I` in float32 and of H, a third of what eigenvalues cost: `level` is far below
        the eigenvalues or among them, and what float32 cannot tell changes no figure. The first fails early where it fails.
        """
        H = self.moments.H
        if self._eigenvalues or not 0 < level < float(H.diagonal().min()):
            return None
        lower = H.to(torch.float32, copy=True)
        lower.diagonal().sub_(level)
        with one_thread():
            if int(torch.linalg.cholesky_ex(lower).info):
                return None
            L, info = (None, 0) if self._mean_log else torch.linalg.cholesky_ex(H)
        if L is not None:
            self._mean_log.append(None if int(info) else 2 * float(L.diagonal().double().log2().mean()))
        return self._mean_log[0]

    def damped(self, factor: Factor, dtype: torch.dtype) -> Tensor:
        """Return (in, in) the Hessian that was factored, of its own memory."""
        H = self.moments.H.to(dtype, copy=True)
        H.diagonal().add_(factor.shift)
        return H

    def factor_of_the_sweep(self, scheme: Scheme) -> Factor:
        """Factor H as the sweep of a scheme does."""
        return self.factor(scheme.order, scheme.damp_of_the_sweep(self.corrects))

    def factor_of_the_correction(self, scheme: Scheme, *, fitting: bool = False) -> Factor:
        """Factor H as the target's correction does; with `fitting`, of the tokens that are not held out.

        In float32 where rows were and where that is good to a thousandth, unless the sweep has the same: targets are rounded.
        """
        own = not fitting and scheme.damp == scheme.damp_of_the_sweep(self.corrects)
        rough = self._rough and not own
        return self.factor(scheme.order, scheme.damp, fitting=fitting, dtype="auto" if rough else None)

    def damped_for_the_correction(self, scheme: Scheme) -> Damped:
        """Return what the factor of the correction says without its triangle, which need not be there any more."""
        key = (scheme.order, scheme.damp, False)
        if key not in self._damped:
            self.factor_of_the_correction(scheme)
        return self._damped[key]

    def corrected(self, scheme: Scheme) -> None:
        """Let go of what only the target needed: factors if no other layer needs them, and moments that are used once."""
        if self._last:
            own = (scheme.order, scheme.damp_of_the_sweep(self.corrects), False)
            for key in {(scheme.order, scheme.damp, False), (scheme.order, scheme.damp, True)} - {own}:
                self._factors.pop(key, None)
        if self._once:
            self.moments = replace(self.moments, C=None, lost=None, held_out=None)
            self.spent = True

    def factor(
        self,
        order: Order,
        damp: float | Literal["auto"],
        *,
        fitting: bool = False,
        dtype: Literal["auto"] | None = None,
    ) -> Factor:
        """Factor H in an order; with `fitting`, of the tokens that are not held out; `dtype` as for `factorize`."""
        key = (order, damp, fitting)
        if key not in self._factors:
            moments, held_out = self.moments, self.moments.held_out if fitting else None
            H = moments.H
            if held_out is not None:
                H = weighted_difference(H.to(held_out.H.dtype), moments.tokens, held_out.H, held_out.tokens)
            made = factorize(H, order, damp=damp, dtype=dtype)
            self._factors[key], self._damped[key] = made, Damped(made.damp, made.dead)
        return self._factors[key]


def lattice_problem(
    W: Tensor | NDArray[Any], statistics: Tensor | NDArray[Any] | Moments | Inputs, name: str
) -> tuple[Tensor, Inputs]:
    """Return weights and inputs as the solvers take them.

    Args:
        W: (out, in) of torch or numpy.
        statistics: (in, in) Hessian `X^T X / tokens` of either, or what calibration saw, or `Inputs`.
        name: for errors.

    Raises:
        NumericalError: one of them is no such matrix; the message says how it differs.
    """
    W = _floating(W, f"{name}: W", "(out, in) weights")
    if isinstance(statistics, Inputs):
        inputs = statistics
    elif isinstance(statistics, Moments):
        inputs = Inputs(statistics)
    else:
        H = _floating(statistics, f"{name}: H", "the (in, in) Hessian X^T X / tokens")
        if not bool(torch.isfinite(H).all()):
            raise NumericalError(f"{name}: H holds NaN or Inf. Check the rows of X that it was made of.")
        if H.shape[0] == H.shape[1]:
            lopsided, largest = float((H - H.T).abs().max()), float(H.abs().max())
            if lopsided > SYMMETRIC * largest:
                raise NumericalError(
                    f"{name}: H is not symmetric: entries across the diagonal differ by up to {lopsided:.3g}, the largest is "
                    f"{largest:.3g}. Expected X^T X / tokens."
                )
        inputs = Inputs(H)
    H = inputs.moments.H
    if tuple(H.shape) != (W.shape[1], W.shape[1]):
        raise NumericalError(
            f"{name}: H is {' x '.join(map(str, H.shape))}, W has {W.shape[1]} inputs (columns). Expected {W.shape[1]} x "
            f"{W.shape[1]}: X^T X / tokens, with W as (out, in)."
        )
    if H.device != W.device:
        raise NumericalError(f"{name}: W is on {W.device}, H on {H.device}. Move one of them.")
    return W, inputs


def _floating(given: Any, called: str, expected: str) -> Tensor:
    """Return a matrix of floating-point numbers, at least float32, as a tensor."""
    if isinstance(given, np.ndarray) and given.dtype.kind in "fiub":
        given = torch.from_numpy(np.array(given, dtype=given.dtype.newbyteorder("=")))  # in memory of its own
    if not isinstance(given, Tensor):
        kind = f"an array of {given.dtype}" if isinstance(given, np.ndarray) else f"a {type(given).__name__}"
        raise NumericalError(f"{called} is {kind}; expected {expected} as a tensor of torch or an array of numpy.")
    if given.ndim != 2 or 0 in given.shape:
        raise NumericalError(f"{called} has the shape {tuple(given.shape)}; expected {expected}, at least 1 x 1.")
    if not given.is_floating_point():
        found = str(given.dtype).removeprefix("torch.")
        raise NumericalError(
            f"{called} is of {found}; expected {expected} in floating point: make it float32 or float64."
        )
    return given.detach().to(torch.promote_types(given.dtype, torch.float32))


def corrected(W: Tensor, inputs: Inputs, scheme: Scheme) -> tuple[Tensor, float]:
    """Return the target of the lattice problem, 0 for dead inputs, and how far it went towards the full correction.

    The correction of `TRIED_ROWS` rows is fitted on four fifths of the windows, and that of all, fitted on all windows, is trusted
    as far as it would have helped these rows on the other windows. In the dtype of `W`: in float32 targets are off by less than a
    thousandth of a step.
    """
    if inputs.spent:
        raise NumericalError("These inputs gave a target already and let go of what it was made of. Make them anew.")
    moments, dead = inputs.moments, inputs.damped_for_the_correction(scheme).dead
    target, rho = W, 0.0
    if scheme.correct and moments.corrects and moments.held_out is not None and moments.held_out.corrects:
        lost = _lost(W, moments)
        rho = _trusted(W, lost, inputs, scheme)
        if rho != 0.0:
            target = torch.add(W, correction(lost, inputs.factor_of_the_correction(scheme)), alpha=rho)
        del lost
    del moments
    inputs.corrected(scheme)
    release()  # what correcting took: solving takes as much
    return W.masked_fill(dead, 0) if target is W else target.masked_fill_(dead, 0), rho


def _lost(W: Tensor, moments: Moments) -> Tensor:
    """Return (out, in) what the outputs have lost before the layer is quantized, against its inputs; in the dtype of `W`."""
    if moments.lost is not None:
        return moments.lost.to(W.dtype)
    assert moments.C is not None, "these moments tell nothing of the original network"
    return mismatch(W, moments.H, moments.C, None)


def _trusted(W: Tensor, lost: Tensor, inputs: Inputs, scheme: Scheme) -> float:
    """Return how far to go, see `trust`, by what some of the rows, evenly spread, would have gained on the tokens held out."""
    moments, held_out = inputs.moments, inputs.moments.held_out
    assert held_out is not None
    rows = torch.linspace(0, len(W) - 1, min(TRIED_ROWS, len(W)), dtype=torch.float64).round().long().to(W.device)
    only = held_out if held_out.lost is None else replace(held_out, lost=held_out.lost[rows])
    lost_held_out = _lost(W[rows], only)
    lost_fitting = weighted_difference(lost[rows], moments.tokens, lost_held_out, held_out.tokens)
    trial = correction(lost_fitting, inputs.factor_of_the_correction(scheme, fitting=True))
    return trust(lost_held_out, held_out.H, trial)

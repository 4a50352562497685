"""The lattice problem of one layer: factors of its inputs' Hessian, made once and shared, and the corrected target.

What `on_grid.py` and `to_rate.py` solve and `certificate.py` measures; it rounds nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice.factor import Factor, factorize
from nearplane.lattice.moments import Moments
from nearplane.lattice.root import factorize_root
from nearplane.lattice.target import correction, mismatch, trust, weighted_difference
from nearplane.schemes import Order, Scheme

SYMMETRIC = 1e-4  # of the largest entry: what the two halves of a product in float32 may differ by


class Inputs:
    """What is known of one layer input, with its factors: each is made on first use and shared by all layers that see it."""

    def __init__(self, statistics: Moments | Tensor) -> None:
        self.moments = statistics if isinstance(statistics, Moments) else Moments(H=statistics, tokens=0)
        self._factors: dict[tuple[str, float | str, bool], Factor] = {}
        self._eigenvalues: list[Tensor] = []
        self._mean_log: list[float | None] = []

    def of(self, statistics: Moments) -> Inputs:
        """Return the same input as another layer sees it: its own residual mismatch, the factors in common."""
        if statistics.H is not self.moments.H:
            raise NumericalError("Factors are shared between layers whose inputs differ.")
        other = Inputs(statistics)
        other._factors, other._eigenvalues = self._factors, self._eigenvalues
        other._mean_log = self._mean_log
        return other

    def eigenvalues(self) -> Tensor:
        """Return (in,) the eigenvalues of H, none below 0."""
        if not self._eigenvalues:
            H = self.moments.H
            diagonal = int(H.count_nonzero()) == int(H.diagonal().count_nonzero())
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
        lower = H.float()
        lower.diagonal().sub_(level)
        if int(torch.linalg.cholesky_ex(lower).info):
            return None
        if not self._mean_log:
            L, info = torch.linalg.cholesky_ex(H)
            self._mean_log.append(None if int(info) else 2 * float(L.diagonal().double().log2().mean()))
        return self._mean_log[0]

    def damped(self, factor: Factor, dtype: torch.dtype) -> Tensor:
        """Return (in, in) the Hessian that was factored, of its own memory."""
        H = self.moments.H.to(dtype, copy=True)
        H.diagonal().add_(factor.shift)
        return H

    def factor_of_the_sweep(self, scheme: Scheme) -> Factor:
        """Factor H as the sweep of a scheme does."""
        return self.factor(scheme.order, scheme.damp_of_the_sweep(self.moments.C is not None))

    def lengths(self, order: Order, scheme: Scheme) -> Tensor:
        """Return (in,) squared lengths of the factor that the sweep would have in an order; only its own is kept."""
        if order == scheme.order:
            return self.factor_of_the_sweep(scheme).d
        return self._factorized(order, scheme.damp_of_the_sweep(self.moments.C is not None), fitting=False).d

    def factor(self, order: Order, damp: float | Literal["auto"], *, fitting: bool = False) -> Factor:
        """Factor H in an order; with `fitting`, of the tokens that are not held out."""
        key = (order, damp, fitting)
        if key not in self._factors:
            self._factors[key] = self._factorized(order, damp, fitting and self.moments.held_out is not None)
        return self._factors[key]

    def _factorized(self, order: Order | Tensor, damp: float | Literal["auto"], fitting: bool) -> Factor:
        moments, held_out = self.moments, self.moments.held_out
        tokens = moments.tokens - held_out.tokens if fitting and held_out is not None else moments.tokens
        root = moments.fitting_root if fitting else moments.root
        if root is not None:
            return factorize_root(root, tokens, order, damp=damp)
        H = moments.H
        if fitting and held_out is not None:
            H = weighted_difference(H, moments.tokens, held_out.H, held_out.tokens)
        return factorize(H, order, damp=damp)


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

    The correction is fitted on four fifths of the windows, trusted as far as it helps on the others, and fitted again on all.
    In the dtype of `W`: in float32 targets are off by less than a thousandth of a step.
    """
    moments = inputs.moments
    held_out, factor = moments.held_out, inputs.factor(scheme.order, scheme.damp)
    if not scheme.correct or moments.C is None or held_out is None or held_out.C is None:
        return W.masked_fill(factor.dead, 0), 0.0
    lost = mismatch(W, moments.H, moments.C, moments.S)
    lost_held_out = mismatch(W, held_out.H, held_out.C, held_out.S)
    lost_fitting = weighted_difference(lost, moments.tokens, lost_held_out, held_out.tokens)
    trial = correction(lost_fitting, inputs.factor(scheme.order, scheme.damp, fitting=True))
    rho = trust(lost_held_out, held_out.H, trial)
    if rho == 0.0:
        return W.masked_fill(factor.dead, 0), 0.0
    return torch.add(W, correction(lost, factor), alpha=rho).masked_fill_(factor.dead, 0), rho

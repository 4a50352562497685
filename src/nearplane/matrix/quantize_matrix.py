"""Quantization of one matrix that is passed as an array with the Hessian of its inputs, without a model.

    matrix, record = quantize_matrix(W, X.T @ X / len(X), GridScheme(bits=3))

Arrays are checked here; `on_grid.py` and `to_rate.py` solve the problem.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice.factor import read
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.moments import Moments
from nearplane.lattice.scale import StepStorage
from nearplane.matrix.inputs import LayerInput, corrected, named
from nearplane.matrix.on_grid import check_rows, joined, solve_rows
from nearplane.matrix.to_rate import solve_to_rate
from nearplane.recipe.block_scheme import BlockScheme
from nearplane.recipe.rate_scheme import RateScheme
from nearplane.recipe.schemes import GridScheme
from nearplane.record.record import LayerRecord
from nearplane.system.arguments import checked

MAX_ASYMMETRY = 1e-4  # relative to the largest entry: rounding errors of a product in float32
MAX_PEAK = 1e36  # largest entry of a Hessian, and one over the smallest: sums of squares in float32 have some room left


@checked("W", "statistics", "scheme", verb=False)
def quantize_matrix(
    W: Tensor | NDArray[Any],
    statistics: Tensor | NDArray[Any] | Moments | LayerInput,
    scheme: GridScheme | BlockScheme,
    *,
    storage: torch.dtype | StepStorage = torch.float16,
    name: str = "matrix",
) -> tuple[QuantizedMatrix, LayerRecord]:
    """Quantize one matrix on a fixed grid.

    Args:
        W: (out, in) weights of torch or numpy; the results are of torch.
        statistics: (in, in) Hessian `X^T X / tokens` of torch or numpy, or `Moments`, or `LayerInput`.
        scheme: Grid, order and solver.
        storage: Dtype in which steps will be stored, maybe with the peak of matrices that share a global scale; steps are
            rounded before the solve.
        name: Name of the matrix in the record and in error messages.

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
    rows = solve_rows(W, slice(None), target, inputs, scheme, storage=stored, name=name)
    return joined([rows], inputs, scheme, name=name)


@checked("W", "statistics", verb=False)
def quantize_matrix_to_rate(
    W: Tensor | NDArray[Any],
    statistics: Tensor | NDArray[Any] | Moments | LayerInput,
    scheme: RateScheme,
    rate: float | None = None,
    *,
    sensitivity: Tensor | None = None,
    max_loss: float | None = None,
    name: str = "matrix",
) -> tuple[QuantizedMatrix, LayerRecord]:
    """Quantize one matrix to `rate` bits per weight, with every byte of its tensor counted.

    Args:
        W, statistics: Weights and statistics of inputs, see `quantize_matrix`.
        scheme: Order, solver, damping and correction.
        rate: Bits per weight of this matrix; None: the rate of the scheme.
        sensitivity: (out,) weight of each output's errors, see `calibration/sensitivity.py`; None: all equal.
        max_loss: Upper limit of the relative loss; the rate is raised to meet it, to at most 7 bits. None: no limit.
        name: Name of the matrix in the record and in error messages.

    Raises:
        NumericalError: The matrix or its statistics cannot be solved, see `quantize_matrix`.
    """
    W, inputs = lattice_problem(W, statistics, name)
    with named(name, inputs.moments.tokens):
        target = corrected(W, inputs, scheme)
    rows = solve_to_rate(W, target, inputs, scheme, rate, sensitivity=sensitivity, max_loss=max_loss, name=name)
    return joined([rows], inputs, scheme, name=name)


def lattice_problem(
    W: Tensor | NDArray[Any], statistics: Tensor | NDArray[Any] | Moments | LayerInput, name: str
) -> tuple[Tensor, LayerInput]:
    """Return weights and inputs in the form that the solvers take.

    Args:
        W: (out, in) weights of torch or numpy.
        statistics: (in, in) Hessian `X^T X / tokens` of torch or numpy, or `Moments`, or `LayerInput`.
        name: Name of the matrix in error messages.

    Raises:
        NumericalError: `W` or the Hessian has a wrong type, shape or value.
    """
    W = _floating(W, f"{name}: W", "(out, in) weights")
    if isinstance(statistics, LayerInput):
        inputs = statistics
    elif isinstance(statistics, Moments):
        inputs = LayerInput.of(statistics)
    else:
        H = _floating(statistics, f"{name}: H", "the (in, in) Hessian X^T X / tokens")
        if not bool(torch.isfinite(H).all()):
            raise NumericalError(f"{name}: H contains NaN or Inf. Check the rows of X from which H was computed.")
        if not bool(torch.isfinite(W).all()):
            raise NumericalError(f"{name}: W contains NaN or Inf. Check the checkpoint from which it was read.")
        (peak,) = read(H.abs().max())
        if peak and not 1 / MAX_PEAK <= peak <= MAX_PEAK:
            raise NumericalError(
                f"{name}: the largest entry of H is {peak:.3g}; expected {1 / MAX_PEAK:.0e} to {MAX_PEAK:.0e}, which float32 "
                f"holds with room for sums. Compute H in other units: a factor of H changes no code."
            )
        if H.shape[0] == H.shape[1]:
            asymmetry, largest = read((H - H.T).abs().max(), H.abs().max())
            if asymmetry > MAX_ASYMMETRY * largest:
                raise NumericalError(
                    f"{name}: H is not symmetric: entries across the diagonal differ by up to {asymmetry:.3g}, "
                    f"the largest is {largest:.3g}. Expected X^T X / tokens."
                )
        inputs = LayerInput.of(H)
    H = inputs.moments.H
    if tuple(H.shape) != (W.shape[1], W.shape[1]):
        raise NumericalError(
            f"{name}: H is {' x '.join(map(str, H.shape))}, W has {W.shape[1]} inputs (columns). "
            f"Expected {W.shape[1]} x {W.shape[1]}: X^T X / tokens, with W as (out, in)."
        )
    if H.device != W.device:
        raise NumericalError(f"{name}: W is on {W.device}, but H is on {H.device}. Move one of them.")
    return W, inputs


def _floating(array: Any, called: str, expected: str) -> Tensor:
    """Return a matrix of floating-point numbers as a tensor of at least float32; `called` names it in errors."""
    if isinstance(array, np.ndarray) and array.dtype.kind in "fiub" and array.itemsize <= 8:  # no longdouble
        array = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))  # in memory of its own
    if not isinstance(array, Tensor):
        kind = f"an array of {array.dtype}" if isinstance(array, np.ndarray) else f"a {type(array).__name__}"
        raise NumericalError(f"{called} is {kind}; expected {expected} as a tensor of torch or an array of numpy.")
    if array.layout != torch.strided or array.is_meta:
        kind = "has no values (meta device)" if array.is_meta else "is sparse: convert it with to_dense()"
        raise NumericalError(f"{called} {kind}; expected {expected}.")
    if array.ndim != 2 or 0 in array.shape:
        raise NumericalError(f"{called} has the shape {tuple(array.shape)}; expected {expected}, at least 1 x 1.")
    if not array.is_floating_point():
        dtype = str(array.dtype).removeprefix("torch.")
        raise NumericalError(f"{called} is of {dtype}; expected {expected} in float32 or float64.")
    return array.detach().to(torch.promote_types(array.dtype, torch.float32))

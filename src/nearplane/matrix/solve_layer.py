"""One matrix, no model: from weights and what is known of their inputs to codes and what was lost.

`solve_layer` decides by the scheme: on a grid (`on_grid.py`) or entropy-coded at a rate (`to_rate.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearplane.lattice.grid import QuantizedMatrix
from nearplane.matrix.inputs import Inputs
from nearplane.matrix.on_grid import quantize_matrix
from nearplane.matrix.to_rate import quantize_matrix_to_rate
from nearplane.recipe.schemes import AnyScheme, BlockScheme, GridScheme, RateScheme
from nearplane.record.record import LayerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One layer to be solved.

    Args:
        name: of the layer, for the record and for errors.
        W: (out, in) weights.
        inputs: what calibration saw, shared by layers with the same input; if `used_once`, the task can be solved once.
        scheme: the layer's own; bits are a whole number.
        rate: bits per weight that entropy-coded weights are to take; None: that of the scheme.
        storage: dtype in which steps of grids are stored.
        sensitivity: (out,) how much the network minds errors of every output; None: equally.
        max_loss: relative loss that entropy-coded weights may not exceed.
        together: what errors of outputs cost together, of runs of rows; see `solve_joined`. Empty: not known.
    """

    name: str
    W: Tensor
    inputs: Inputs
    scheme: AnyScheme
    storage: torch.dtype
    rate: float | None = None
    sensitivity: Tensor | None = None
    max_loss: float | None = None
    together: tuple[Tensor, ...] = ()


def solve_layer(task: Task) -> tuple[QuantizedMatrix, LayerRecord]:
    """Quantize one layer by its scheme: the same task gives the same codes. `Inputs` keep factors for the layers that share them.

    Raises:
        NumericalError: a weight is not finite, or the Hessian not positive definite.
    """
    match task.scheme:
        case RateScheme():
            return quantize_matrix_to_rate(
                task.W,
                task.inputs,
                task.scheme,
                task.rate,
                sensitivity=task.sensitivity,
                max_loss=task.max_loss,
                name=task.name,
            )
        case GridScheme() | BlockScheme():
            return quantize_matrix(
                task.W, task.inputs, task.scheme, storage=task.storage, name=task.name, together=task.together
            )

"""Quantization of one layer: from its weights and the statistics of its inputs to codes and a record, without a model.

`solve_layer` chooses by the scheme: on a fixed grid (`on_grid.py`) or entropy-coded at a rate (`to_rate.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from nearplane.coding.blob import Contents, size
from nearplane.lattice.grid import ProductGrid, QuantizedMatrix
from nearplane.lattice.scale import StepStorage
from nearplane.matrix.inputs import Inputs, lattice_problem
from nearplane.matrix.on_grid import SolvedRows, quantize_matrix, solve_rows
from nearplane.matrix.to_rate import quantize_matrix_to_rate
from nearplane.recipe.scheme import Solver
from nearplane.recipe.schemes import AnyScheme, BlockScheme, GridScheme, RateScheme
from nearplane.record.record import LayerRecord

ROWS, COLUMNS = 128, 512  # shape of the layer that loads the libraries


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One layer to solve.

    Args:
        name: Full name of the layer, for the record and for error messages.
        W: (out, in) weights.
        inputs: Statistics of the layer's inputs, shared by layers of the same input; if `used_once`, solve only once.
        scheme: The layer's own scheme, with a whole number of bits.
        rate: Rate of entropy-coded weights in bits per weight; None: the rate of the scheme.
        storage: How steps of grids are stored.
        sensitivity: (out,) sensitivity of the network to errors of each output; None: equal.
        max_loss: Upper limit of the relative loss of entropy-coded weights.
        together: (rows, rows) moments of gradients for each run of rows, see `solve_joined`; empty: not measured.
    """

    name: str
    W: Tensor
    inputs: Inputs
    scheme: AnyScheme
    storage: StepStorage
    rate: float | None = None
    sensitivity: Tensor | None = None
    max_loss: float | None = None
    together: tuple[Tensor, ...] = ()


def solve_layer(task: Task) -> tuple[QuantizedMatrix, LayerRecord]:
    """Quantize one layer by its scheme, deterministically. `Inputs` keep factors for the layers that share them.

    Raises:
        NumericalError: A weight is not finite, or the Hessian is not positive definite.
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


def solve_some_rows(task: Task, rows: slice) -> SolvedRows:
    """Quantize whole strips of rows of a layer on a fixed grid; `joined` makes the layer of all rows.

    Raises:
        NumericalError: As for `solve_layer`.
    """
    assert isinstance(task.scheme, GridScheme | BlockScheme), "rows of layers at a rate are not solved apart"
    W, inputs = lattice_problem(task.W, task.inputs, task.name)
    return solve_rows(W, rows, inputs, task.scheme, storage=task.storage, name=task.name)


@cache
def load_libraries(solver: Solver, beam: int | None, *, entropy_coded: bool) -> None:
    """Solve a small random layer, so that compiled kernels and libraries are part of the resident memory from now on."""
    generator = torch.Generator().manual_seed(0)
    W, X = torch.randn(ROWS, COLUMNS, generator=generator), torch.randn(2 * COLUMNS, COLUMNS, generator=generator)
    matrix, _ = quantize_matrix(W, (X.T @ X / len(X)).double(), GridScheme(solver=solver, beam=beam))
    if entropy_coded:
        columns, rows = torch.zeros(COLUMNS, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
        grid = ProductGrid(base=1.0, columns=columns, column_resolution=1, rows=rows, row_resolution=1)
        size(Contents.of(matrix.codes, grid))

"""HPTQ: GPTQ with one step per matrix and unbounded codes, entropy-coded by one Huffman code per matrix.

Rounding to nearest is available too. The step is searched until the coded matrix has the given rate. No file is
written: `compare` puts the values into the model and measures it, and sizes follow from code lengths (`huffman.py`).

Chen et al., "The Geometry of LLM Quantization: GPTQ as Babai's Nearest Plane Algorithm" (2025), Table 1.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearplane.calibration.one_forward import MemorySetting
from nearplane.calibration.walk import walk
from nearplane.calibration.windows import Windows
from nearplane.errors import NumericalError, RecipeError
from nearplane.lattice.grid import ProductGrid, QuantizedMatrix
from nearplane.lattice.moments import Moments
from nearplane.matrix.inputs import Inputs, corrected, lattice_problem
from nearplane.matrix.to_rate import search
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.recipe.recipe import Calibration, Recipe
from nearplane.recipe.scheme import Solver
from nearplane.recipe.schemes import AnyScheme, RateScheme
from nearplane.system.device import Device
from nearplane.theory.huffman import coded_bytes, estimated_size

MIN_RATE = 1.1  # bits per weight; every code word has at least one bit
MAX_CARRYOVER = 0.02  # limit on the relative change of a layer's rate to use up the surplus bits of earlier blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """A matrix with one step, and its size in bytes with one Huffman code."""

    matrix: QuantizedMatrix[ProductGrid]
    bytes: int


def hptq_recipe(rate: float, calibration: Calibration, *, calibrated: bool = True) -> Recipe:
    """Return the recipe of HPTQ: GPTQ in the natural order of columns, without corrected targets.

    Args:
        rate: Bits per weight.
        calibration: Settings of the calibration windows.
        calibrated: Whether errors are fed forward; otherwise weights are rounded to nearest without using the inputs.

    Raises:
        RecipeError: The rate is too low for a Huffman code.
    """
    if rate < MIN_RATE:
        raise RecipeError(
            f"{rate:.3f} bits per weight are too few: a Huffman code needs at least one bit per code. Use {MIN_RATE} "
            f"bits or more."
        )
    solver: Solver = "nearest-plane" if calibrated else "round-to-nearest"
    scheme = RateScheme(rate=rate, rows="equal", order="natural", solver=solver, correct=False)
    return Recipe(scheme=scheme, allocate="uniform", calibration=calibration)


def hptq(
    W: Tensor,
    statistics: Tensor | Moments | Inputs,
    scheme: AnyScheme,
    rate: float | None = None,
    *,
    name: str = "matrix",
) -> Coded:
    """Round a matrix with the one step for which its Huffman code has `rate` bits per weight.

    Args:
        W: (out, in) weights.
        statistics: (in, in) Hessian `X^T X / tokens`, or moments or inputs from calibration.
        scheme: Solver, order and damping; see `hptq_recipe`.
        rate: Bits per weight; None: the rate of the scheme.
        name: Name of the matrix for error messages.

    Raises:
        NumericalError: A weight is not finite, or the Hessian not positive definite, symmetric or of W's inputs.
    """
    W, inputs = lattice_problem(W, statistics, name)
    rate = scheme.average if rate is None else rate
    assert rate is not None, "one matrix has a rate"
    zeros = torch.zeros(max(W.shape), dtype=torch.int32, device=W.device)
    out, columns = W.shape
    one_step = ProductGrid(base=1.0, columns=zeros[:columns], column_resolution=1, rows=zeros[:out], row_resolution=1)
    try:
        T, _ = corrected(W, inputs, scheme)
        trial = search(
            T, inputs, scheme, rate, one_step, lambda matrix: estimated_size(_numbers(matrix)).bits / W.numel()
        )
    except NumericalError as error:
        raise NumericalError(f"{name} ({inputs.moments.tokens} tokens): {error}") from error
    return Coded(matrix=trial.matrix, bytes=coded_bytes(_numbers(trial.matrix)))


def _numbers(matrix: QuantizedMatrix[ProductGrid]) -> NDArray[np.int32]:
    return matrix.codes.cpu().numpy()


def hptq_layers(model: Model, recipe: Recipe, windows: Windows, device: Device) -> Generator[tuple[Layer, Coded]]:
    """Walk through a model and yield each layer with its matrix; inputs come from the quantized layers before it.

    Surplus bits of a block go to later blocks, as `quantize` does for a given rate.

    Args:
        model: The original model.
        recipe: Recipe of `hptq_recipe`.
        windows: Calibration windows.
        device: Device for the computation.

    Raises:
        NearplaneError: Any error of `walk` or `hptq`.
    """
    scheme, target = recipe.scheme, recipe.scheme.average
    assert target is not None, "HPTQ is for a rate"
    remaining = sum(math.prod(layer.shape) for layer in model.layers)
    rate, surplus = target, 0.0  # bits
    with walk(model, recipe, windows, MemorySetting.usual(windows.seqlen, device)) as stages:
        for stage in stages:
            if stage.first:
                rate = min(
                    max(target + surplus / remaining, (1 - MAX_CARRYOVER) * target), (1 + MAX_CARRYOVER) * target
                )
            values = []
            for layer, inputs in zip(stage.layers, stage.inputs, strict=True):
                coded = hptq(layer.read(), inputs.used_once(), scheme, rate, name=layer.name)
                weights = math.prod(layer.shape)
                surplus, remaining = surplus + target * weights - 8 * coded.bytes, remaining - weights
                values.append(coded.matrix.decode())
                yield layer, coded
            stage.write(values)

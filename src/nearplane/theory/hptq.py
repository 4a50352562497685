"""HPTQ: GPTQ with one step a matrix and codes without limits, which one Huffman code a matrix makes small. And the same rounded
to nearest.

The step is searched until the coded matrix has the size that was asked for. Nothing is written: `compare` puts the values into
the network and measures it, and sizes follow from the lengths of the code words (`huffman.py`).

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
from nearplane.recipe.schemes import RateScheme
from nearplane.system.device import Device
from nearplane.theory.huffman import coded_bytes, foretold_size

LEAST_RATE = 1.1  # bits per weight: every code word has at least one
CARRIED = 0.02  # of its rate, by which a layer takes up what the blocks before it left over


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """A matrix with one step, and what it takes behind one Huffman code."""

    matrix: QuantizedMatrix[ProductGrid]
    bytes: int


def hptq_recipe(rate: float, calibration: Calibration, *, calibrated: bool = True) -> Recipe:
    """Return what the walk is to show of the inputs, and how they are damped: GPTQ in its natural order, targets not corrected.

    Args:
        rate: bits per weight.
        calibration: tokens.
        calibrated: whether errors are fed forward; without, weights are rounded to nearest and no input is looked at.

    Raises:
        RecipeError: a Huffman code does not get there.
    """
    if rate < LEAST_RATE:
        raise RecipeError(
            f"{rate:.3f} bits per weight asked for; a Huffman code takes at least one bit for every code. Ask for {LEAST_RATE} "
            f"bits or more."
        )
    solver: Solver = "nearest-plane" if calibrated else "round-to-nearest"
    scheme = RateScheme(rate=rate, rows="equal", order="natural", solver=solver, correct=False)
    return Recipe(scheme=scheme, allocate="uniform", calibration=calibration)


def hptq(
    W: Tensor,
    statistics: Tensor | Moments | Inputs,
    scheme: RateScheme,
    rate: float | None = None,
    *,
    name: str = "matrix",
) -> Coded:
    """Round a matrix with the one step at which it takes `rate` bits a weight behind one Huffman code.

    Args:
        W: (out, in) weights.
        statistics: (in, in) Hessian `X^T X / tokens`, or what calibration saw.
        scheme: solver, order, damping; see `hptq_recipe`.
        rate: bits per weight; None: that of the scheme.
        name: for errors.

    Raises:
        NumericalError: a weight is not finite, or the Hessian not positive definite, symmetric or of W's inputs.
    """
    W, inputs = lattice_problem(W, statistics, name)
    rate = scheme.rate if rate is None else rate
    assert rate is not None, "one matrix has a rate"
    zeros = torch.zeros(max(W.shape), dtype=torch.int32, device=W.device)
    out, columns = W.shape
    one_step = ProductGrid(base=1.0, columns=zeros[:columns], column_resolution=1, rows=zeros[:out], row_resolution=1)
    try:
        T, _ = corrected(W, inputs, scheme)
        found = search(
            T, inputs, scheme, rate, one_step, lambda matrix: foretold_size(_numbers(matrix)).bits / W.numel()
        )
    except NumericalError as error:
        raise NumericalError(f"{name} ({inputs.moments.tokens} tokens): {error}") from error
    return Coded(matrix=found.matrix, bytes=coded_bytes(_numbers(found.matrix)))


def _numbers(matrix: QuantizedMatrix[ProductGrid]) -> NDArray[np.int32]:
    return matrix.codes.cpu().numpy()


def hptq_layers(model: Model, recipe: Recipe, windows: Windows, device: Device) -> Generator[tuple[Layer, Coded]]:
    """Walk through a network and yield its layers, each with its matrix; layers behind see the quantized ones before them.

    Bits that a block leaves over go to those after it, as where `quantize` keeps to a rate.

    Args:
        model: the original.
        recipe: see `hptq_recipe`.
        windows: calibration.
        device: where to compute.

    Raises:
        NearplaneError: as `walk` and `hptq`.
    """
    assert isinstance(recipe.scheme, RateScheme)
    assert recipe.scheme.rate is not None
    scheme, asked = recipe.scheme, recipe.scheme.rate
    to_come = sum(math.prod(layer.shape) for layer in model.layers)
    rate, left = asked, 0.0  # bits
    with walk(model, recipe, windows, MemorySetting.usual(windows.seqlen, device)) as stages:
        for stage in stages:
            if stage.first:
                rate = min(max(asked + left / to_come, (1 - CARRIED) * asked), (1 + CARRIED) * asked)
            values = []
            for layer, inputs in zip(stage.layers, stage.inputs, strict=True):
                coded = hptq(layer.read(), inputs.used_once(), scheme, rate, name=layer.name)
                weights = math.prod(layer.shape)
                left, to_come = left + asked * weights - 8 * coded.bytes, to_come - weights
                values.append(coded.matrix.decode())
                yield layer, coded
            stage.write(values)

"""HPTQ: GPTQ with one step per matrix and unbounded codes, entropy-coded by one Huffman code per matrix.

Rounding to nearest is available too. The step is searched until the coded matrix has the given rate. No file is
written: the values are put into a network in memory, and sizes follow from code lengths (`theory/huffman.py`).

Chen et al., "The Geometry of LLM Quantization: GPTQ as Babai's Nearest Plane Algorithm" (2025), Table 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nearplane.calibration.one_forward import MemorySetting
from nearplane.calibration.walk import walk
from nearplane.calibration.windows import Windows, calibration_windows, check_tokens
from nearplane.errors import RecipeError
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.moments import Moments
from nearplane.lattice.product_grid import ProductGrid
from nearplane.matrix.inputs import LayerInput, corrected, named
from nearplane.matrix.quantize_matrix import lattice_problem
from nearplane.matrix.to_rate import search
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.recipe.rate_scheme import RateScheme
from nearplane.recipe.recipe import Calibration, Recipe
from nearplane.recipe.scheme import Solver
from nearplane.recipe.schemes import AnyScheme
from nearplane.system.device import Device
from nearplane.system.matmul_library import chosen_library
from nearplane.system.progress import Progress, Tracked, silent
from nearplane.theory.huffman import coded_bytes, estimated_size
from nearplane.verbs.evaluate import load_dense

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
    statistics: Tensor | Moments | LayerInput,
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
    one_step = ProductGrid.of_one_step(W.shape, W.device)
    with named(name, inputs.moments.tokens):
        T = corrected(W, inputs, scheme).values
        trial = search(
            T, inputs, scheme, rate, one_step, lambda matrix: estimated_size(_numbers(matrix)).bits / W.numel()
        )
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
                coded = hptq(layer.read(), inputs, scheme, rate, name=layer.name)
                weights = math.prod(layer.shape)
                surplus, remaining = surplus + target * weights - 8 * coded.bytes, remaining - weights
                values.append(coded.matrix.decode())
                yield layer, coded
            stage.write(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class HuffmanCoded:
    """A network in memory whose layers have the values of their Huffman codes.

    Args:
        network: The network in float32.
        tokenizer: Its tokenizer.
        rate: Bits per quantized weight.
        bytes: Size of all tensors if they were written.
        seconds: Time that it took.
    """

    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rate: float
    bytes: int
    seconds: float


def huffman_coded(
    source: str | Path,
    opened: Model,
    recipe: Recipe,
    *,
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> HuffmanCoded:
    """Quantize a model with Huffman codes in one walk through the network, in memory; see `hptq_layers`.

    Args:
        source: Folder or hub id of the model.
        opened: The same model, opened.
        recipe: Recipe of `hptq_recipe`, in any order of columns.
        device: Device to compute on.
        trust_remote_code: Whether to run model code that comes with the checkpoint.
        progress: Display that wraps the iterator over layers.
    """
    began, place, layers = time.perf_counter(), Device.named(device), opened.layers
    windows = calibration_windows(opened, recipe, None, place, progress)
    check_tokens(opened, recipe, windows)
    network, tokenizer = load_dense(source, place.place, trust_remote_code=trust_remote_code)
    size = 0
    with (
        chosen_library([layer.shape for layer in layers], windows.count * windows.seqlen, place),
        closing(hptq_layers(opened, recipe, windows, place)) as walked,
    ):
        for layer, coded in progress(Tracked(walked, "quantizing", len(layers)), "quantizing", len(layers)):
            layer.under(network, "").write(coded.matrix.decode())
            size += coded.bytes
    reader, layer_tensors = opened.reader, {name for layer in layers for name in layer.copies(opened.weights)}
    others = sum(reader.nbytes(name) for name in reader.names() if name not in layer_tensors)
    rate = 8 * size / sum(math.prod(layer.shape) for layer in layers)
    seconds = round(time.perf_counter() - began, 6)
    return HuffmanCoded(network=network, tokenizer=tokenizer, rate=rate, bytes=size + others, seconds=seconds)

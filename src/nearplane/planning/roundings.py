"""Weights of a layer in a format or at a rate that it may get, by one sweep: rounded without the slow refinements of the solve."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from nearplane.formats.gguf.mixes import fitting
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.product_grid import ProductGrid
from nearplane.lattice.rounded_inputs import rounded
from nearplane.lattice.scale import StepStorage
from nearplane.lattice.shared_grid import divisor_of
from nearplane.matrix.inputs import LayerInput
from nearplane.matrix.on_grid import solve
from nearplane.matrix.to_rate import Search, waterfilled_steps
from nearplane.number_formats import E2M1, BlockType, InputRounding
from nearplane.recipe.block_scheme import BlockScheme
from nearplane.recipe.format_mix import Offer
from nearplane.recipe.rate_scheme import RateScheme
from nearplane.recipe.scheme import Solver
from nearplane.recipe.schemes import GridScheme

UNSEARCHED_BITS = 8  # bits of codes from which steps are not searched, which would gain at most 2 % of a small loss
COUNTED_COLUMNS = 256  # columns whose codes are counted at a time


class Rounded(NamedTuple):
    """Rounded weights of a layer.

    Args:
        values: (out, in) weights; the original ones if the format does not fit their shape.
        rate: Bits per weight of entropy-coded codes with a table for every column; 0 on a grid.
        inputs: How inputs of the layer are rounded; None: they are not.
    """

    values: Tensor
    rate: float = 0.0
    inputs: InputRounding | None = None


# of weights (out, in), their inputs, and (out,) mean squared gradients of their outputs if these are known
Rounding: TypeAlias = Callable[[Tensor, LayerInput, Tensor | None], Rounded]


def at_rate(rate: float, scheme: RateScheme) -> Rounding:
    """Return a rounding to entropy-coded codes without limits, with steps by water-filling for about `rate` bits per weight."""
    solver: Solver = "nearest-plane" if scheme.calibrated else "round-to-nearest"
    return partial(_coded, rate, replace(scheme, solver=solver, beam=None))


def _coded(rate: float, scheme: RateScheme, W: Tensor, inputs: LayerInput, gradients: Tensor | None) -> Rounded:
    factor = inputs.factor(scheme.order, scheme.damp)
    W = W.masked_fill(factor.dead, 0)
    steps = waterfilled_steps(W, factor, gradients if scheme.weighs_rows else None)
    search = Search(T=W, H=inputs.moments.H, factor=factor, grid=steps, scheme=scheme, sized=_coded_bits)
    trial = search.attempt(search.first_step(rate))
    return Rounded(trial.matrix.decode(), trial.rate)


def _coded_bits(matrix: QuantizedMatrix[ProductGrid]) -> float:
    return entropy(matrix.codes)


def offered(offer: Offer, storage: torch.dtype) -> Rounding:
    """Return a rounding to a format of a mix, whose steps have this dtype in the file."""
    return partial(_offered, offer, storage)


def _offered(offer: Offer, storage: torch.dtype, W: Tensor, inputs: LayerInput, gradients: Tensor | None) -> Rounded:
    del gradients
    scheme, (out, columns) = offer.scheme, W.shape
    assert isinstance(scheme, GridScheme | BlockScheme), "formats of a mix are on grids"
    how = None if offer.activations == "none" else scheme.number_format.inputs
    if not fits(offer, (out, columns)):
        return Rounded(W, inputs=how)
    if isinstance(scheme, BlockScheme):
        scheme = scheme.stored_in(fitting(scheme.number_format.name, columns))
    plain: GridScheme | BlockScheme = replace(scheme, polish=0, rounds=0)
    if isinstance(plain, GridScheme) and plain.number_format.bits >= UNSEARCHED_BITS:
        plain = replace(plain, scale="minmax")
    dead = inputs.factor(plain.order, plain.damp).dead
    return Rounded(solve(W.masked_fill(dead, 0), inputs, plain, StepStorage(storage)).matrix.decode(), inputs=how)


def fits(offer: Offer, shape: tuple[int, int]) -> bool:
    """Return whether weights (out, in) of this shape can be stored in a format of a mix."""
    if offer.scheme is None:
        return True
    format, (out, columns) = offer.scheme.number_format, shape
    if isinstance(format, BlockType):
        format = fitting(format.name, columns)
    return columns % format.run == 0 and out % format.rows == 0


def rounded_inputs(x: Tensor, how: InputRounding) -> Tensor:
    """Return inputs as runtimes round them; a global scale is that of these inputs, not of all text."""
    if not x.numel():
        return x
    return rounded(x, how, divisor_of(float(x.abs().max()), E2M1[-1]) if how.global_scale else None)


def entropy(codes: Tensor) -> float:
    """Return the mean over columns of the entropy of `codes` (out, in) in bits, corrected for few rows (Miller-Madow)."""
    out, columns = codes.shape
    total = 0.0
    for strip in codes.split(COUNTED_COLUMNS, dim=1):
        low, high = strip.aminmax(dim=0)
        spans = high.long() - low + 1
        places = strip + (spans.cumsum(0) - spans - low)  # disjoint ranges, one per column
        if int(spans.sum()) > 4 * strip.numel():  # a few codes far from all others
            _, frequencies = places.unique(return_counts=True)
        else:
            frequencies = torch.bincount(places.flatten())
        counts = frequencies[frequencies > 0].double()  # of each code of each column, column after column
        plug_in = strip.shape[1] * math.log2(out) - float((counts * counts.log2()).sum()) / out
        total += plug_in + (len(counts) - strip.shape[1]) / (2 * out * math.log(2))
    return total / columns

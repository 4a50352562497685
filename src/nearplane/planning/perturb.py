"""How layers are perturbed to see what the network loses: as they would be quantized, without what takes long."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from nearplane.formats.gguf.mixes import type_of
from nearplane.lattice.factor import Factor
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.scale import high_rate_step
from nearplane.lattice.solvers import sweep_planes
from nearplane.matrix.inputs import Inputs
from nearplane.matrix.on_grid import solve
from nearplane.recipe.grids import BlockScheme, GridScheme
from nearplane.recipe.scheme import Scheme

COUNTED_COLUMNS = 256  # whose codes are counted at a time


class Perturbed(NamedTuple):
    """Other weights for a layer.

    Args:
        rate: bits per weight.
        values: (out, in).
        shape: (rate, loss in multiples of that of these weights) of others that are not measured, as the layer's own outputs tell.
    """

    rate: float
    values: Tensor
    shape: tuple[tuple[float, float], ...] = ()


Perturb = Callable[[Tensor, Inputs], Iterator[Perturbed]]
"""From the weights (out, in) of a layer and what is known of its inputs to perturbed weights, rates ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Perturbations:
    """What is done to each layer alone, to see what the network loses by it.

    Args:
        of: makes them.
        points: how many of a layer are measured.
        together: layers with the same input, experts of a kind and tied weights are perturbed together and share a curve, as
            runtimes fuse them. Experts that lie in one parameter share one in any case: gate and up of all, down of all.
        at: makes one of them by its number; None: `of` makes those before it too.
    """

    of: Perturb
    points: int
    together: bool = False
    at: Callable[[Tensor, Inputs, int], Perturbed] | None = None

    def one(self, W: Tensor, inputs: Inputs, point: int) -> Perturbed:
        """Return one of the perturbed weights."""
        return next(islice(self.of(W, inputs), point, None)) if self.at is None else self.at(W, inputs, point)


def to_rates(rates: Sequence[float], scheme: Scheme) -> Perturbations:
    """Perturb as entropy-coded weights: codes without limits, steps by water-filling, one sweep each.

    A point's rate is what its codes take with a table for every column. What the network loses is measured at the rate in the
    middle alone; at the others it is to that as the errors of the layer's outputs are, `tr(E H E^T)` with H damped. This follows
    the bend of the curve at low rates, and without the noise of a measurement: rates so given are better than with all three
    measured.
    """

    def perturb(W: Tensor, inputs: Inputs) -> Iterator[Perturbed]:
        factor = inputs.factor(scheme.order, scheme.damp)
        W = W.masked_fill(factor.dead, 0)
        found = [waterfilled(W, factor, rate) for rate in rates]
        middle = found[len(found) // 2]
        shape = tuple((one.rate, one.loss / middle.loss) for one in found if one is not middle and middle.loss > 0)
        yield Perturbed(middle.rate, middle.matrix.decode(), shape)

    return Perturbations(of=perturb, points=1)


class Waterfilled(NamedTuple):
    """Weights (out, in) with water-filling steps: entropy of the codes in bits, damped loss of the outputs, codes and grid."""

    rate: float
    loss: float
    matrix: QuantizedMatrix[Grid]


def waterfilled(W: Tensor, factor: Factor, rate: float) -> Waterfilled:
    """Round `W` (out, in) with steps `c / sqrt(d_j)`, c by the high-rate formula for `rate` bits per weight."""
    lengths = torch.empty_like(factor.d)
    lengths[factor.order] = factor.d.sqrt()  # (in,), in the order of the columns
    step = high_rate_step(W.double().square().mean(0).sqrt(), lengths, rate)
    scale = (2.0**step / lengths)[None].to(W.dtype)
    columns = torch.arange(W.shape[1], device=W.device)
    grid = Grid(scale=scale, zero=torch.zeros_like(scale), group=columns)
    swept = sweep_planes(W, grid, factor)
    assert swept.losses is not None, "a sweep knows them"
    return Waterfilled(entropy(swept.matrix.codes), float(swept.losses.sum()), swept.matrix)


def entropy(codes: Tensor) -> float:
    """Return the mean over columns of the entropy of `codes` (out, in) in bits, corrected for few rows (Miller-Madow)."""
    out, columns = codes.shape
    total = 0.0
    for strip in codes.split(COUNTED_COLUMNS, dim=1):
        counts = _counts(strip)
        plug_in = strip.shape[1] * math.log2(out) - float((counts * counts.log2()).sum()) / out
        total += plug_in + (len(counts) - strip.shape[1]) / (2 * out * math.log(2))
    return total / columns


def _counts(codes: Tensor) -> Tensor:
    """Return how often each code of each column of (out, columns) occurs, float64: one column's after the other."""
    low, high = codes.aminmax(dim=0)
    spans = high.long() - low + 1
    places = codes + (spans.cumsum(0) - spans - low)  # a column's codes lie behind those of the columns before it
    if int(spans.sum()) > 4 * codes.numel():  # a few codes far from all others
        _, often = places.unique(return_counts=True)
    else:
        often = torch.bincount(places.flatten())
    counts: Tensor = often[often > 0].double()
    return counts


def to_widths(widths: Sequence[int], scheme: GridScheme, storage: torch.dtype) -> Perturbations:
    """Perturb as weights on the fixed grids of a scheme, at these widths instead of its own; codes and steps are not refined."""
    plain = replace(scheme, polish=0, rounds=0)

    def at(W: Tensor, inputs: Inputs, point: int) -> Perturbed:
        factor = inputs.factor(scheme.order, scheme.damp)
        found = solve(W.masked_fill(factor.dead, 0), inputs, replace(plain, bits=widths[point]), storage)
        return Perturbed(float(widths[point]), found.matrix.decode())

    def perturb(W: Tensor, inputs: Inputs) -> Iterator[Perturbed]:
        return (at(W, inputs, point) for point in range(len(widths)))

    return Perturbations(of=perturb, points=len(widths), together=True, at=at)


def to_types(names: Sequence[str], scheme: BlockScheme) -> Perturbations:
    """Perturb as weights in blocks of llama.cpp's types; codes and steps are not refined. A point's rate is that of its blocks."""
    plain = replace(scheme, polish=0, rounds=0)

    def perturb(W: Tensor, inputs: Inputs) -> Iterator[Perturbed]:
        factor = inputs.factor(scheme.order, scheme.damp)
        kinds = {type_of(name, "other", 0, 1, W.shape[1]) for name in names}
        for kind in sorted(kinds, key=lambda kind: kind.rate):
            found = solve(W.masked_fill(factor.dead, 0), inputs, plain.storing(kind), torch.float16)
            yield Perturbed(kind.rate, found.matrix.decode())

    return Perturbations(of=perturb, points=len(names))

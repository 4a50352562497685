"""How layers are perturbed to see what the network loses: as they would be quantized, without what takes long.

And of a deep network, in which blocks they are, and what that tells of the layers of the others. Knows losses and what
perturbations change in their own block; not how either is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearplane.formats.gguf.mixes import fitting
from nearplane.lattice.factor import Factor
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.scale import high_rate_step
from nearplane.lattice.solvers import sweep_planes
from nearplane.matrix.inputs import Inputs
from nearplane.matrix.on_grid import solve
from nearplane.models.model import Block
from nearplane.recipe.scheme import Scheme
from nearplane.recipe.schemes import BlockScheme, GridScheme

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Perturbations:
    """What is done to each layer alone, to see what the network loses by it.

    Args:
        of: from the weights (out, in) of a layer and what is known of its inputs to what makes perturbed weights, rates ascending.
        points: how many of a layer are measured.
        together: layers with the same input, experts of a kind and tied weights are perturbed together and share a curve, as
            runtimes fuse them. Experts that lie in one parameter share one in any case: gate and up of all, down of all.
        sensitivity: (out,) how much the network minds errors of a layer's outputs, by layer, as far as it is known.
    """

    of: Callable[[Tensor, Inputs], Sequence[Callable[[], Perturbed]]]
    points: int
    together: bool = False
    sensitivity: Mapping[str, Tensor] = field(default_factory=dict)

    def expected(self, name: str, W: Tensor, perturbed: Perturbed, inputs: Inputs) -> float:
        """Return what the network should lose by the errors of a layer's weights, nats per token; 0 where that is not known."""
        if name not in self.sensitivity:
            return 0.0
        return expected_loss(W, perturbed.values, inputs.moments.H, self.sensitivity[name])


def to_rates(rates: Sequence[float], scheme: Scheme) -> Perturbations:
    """Perturb as entropy-coded weights: codes without limits, steps by water-filling, one sweep each.

    A point's rate is what its codes take with a table for every column. What the network loses is measured at the rate in the
    middle alone; at the others it is to that as the errors of the layer's outputs are, `tr(E H E^T)` with H damped. This follows
    the bend of the curve at low rates, and without the noise of a measurement: rates so given are better than with all three
    measured.
    """

    def middle(W: Tensor, inputs: Inputs) -> Perturbed:
        factor = inputs.factor(scheme.order, scheme.damp)
        W = W.masked_fill(factor.dead, 0)
        found = [waterfilled(W, factor, rate) for rate in rates]
        measured = found[len(found) // 2]
        others = [one for one in found if one is not measured and measured.loss > 0]
        shape = tuple((one.rate, one.loss / measured.loss) for one in others)
        return Perturbed(measured.rate, measured.matrix.decode(), shape)

    return Perturbations(of=lambda W, inputs: [partial(middle, W, inputs)], points=1)


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
        low, high = strip.aminmax(dim=0)
        spans = high.long() - low + 1
        places = strip + (spans.cumsum(0) - spans - low)  # a column's codes lie behind those of the columns before it
        if int(spans.sum()) > 4 * strip.numel():  # a few codes far from all others
            _, often = places.unique(return_counts=True)
        else:
            often = torch.bincount(places.flatten())
        counts = often[often > 0].double()  # of each code of each column, one column's after the other
        plug_in = strip.shape[1] * math.log2(out) - float((counts * counts.log2()).sum()) / out
        total += plug_in + (len(counts) - strip.shape[1]) / (2 * out * math.log(2))
    return total / columns


def to_widths(widths: Sequence[int], scheme: GridScheme, storage: torch.dtype) -> Perturbations:
    """Perturb as weights on the fixed grids of a scheme, at these widths instead of its own; codes and steps are not refined."""
    plain = replace(scheme, polish=0, rounds=0)
    schemes = {float(width): replace(plain, bits=width) for width in widths}

    def perturb(W: Tensor, inputs: Inputs) -> Sequence[Callable[[], Perturbed]]:
        return [partial(_on_grid, W, inputs, rate, scheme, storage) for rate, scheme in schemes.items()]

    return Perturbations(of=perturb, points=len(widths), together=True)


def to_types(names: Sequence[str], scheme: BlockScheme) -> Perturbations:
    """Perturb as weights in blocks of llama.cpp's types; codes and steps are not refined. A point's rate is that of its blocks."""
    plain = replace(scheme, polish=0, rounds=0)

    def perturb(W: Tensor, inputs: Inputs) -> Sequence[Callable[[], Perturbed]]:
        kinds = sorted({fitting(name, W.shape[1]) for name in names}, key=lambda kind: kind.rate)
        return [partial(_on_grid, W, inputs, kind.rate, plain.storing(kind), torch.float16) for kind in kinds]

    return Perturbations(of=perturb, points=len(names))


def _on_grid(
    W: Tensor, inputs: Inputs, rate: float, scheme: GridScheme | BlockScheme, storage: torch.dtype
) -> Perturbed:
    factor = inputs.factor(scheme.order, scheme.damp)
    found = solve(W.masked_fill(factor.dead, 0), inputs, scheme, storage)
    return Perturbed(rate, found.matrix.decode())


class Change(NamedTuple):
    """What a perturbation does.

    Args:
        block: number of the block that its layers are in.
        layers: their names within the block.
        estimate: what its loss is about proportional to, see `expected_loss` and `relative_energy`.
        loss: of the network; None where that was not measured.
    """

    block: int
    layers: tuple[str, ...]
    estimate: float
    loss: float | None


def within(layer: str, block: str) -> str:
    """Return the name of a layer within its block."""
    return layer.removeprefix(f"{block}.")


def measured_blocks(blocks: Sequence[Block], most: int) -> frozenset[int]:
    """Return the numbers of blocks whose layers are measured: all, or about `most`.

    From the first to the last, closer to each other at both ends (Chebyshev's points), where blocks differ most. Blocks with other
    layers (attention here, convolution there) are chosen by themselves: of every sort at least two, or all.
    """
    if len(blocks) <= most:
        return frozenset(range(len(blocks)))
    sorts: dict[tuple[str, ...], list[int]] = {}
    for number, block in enumerate(blocks):
        if block.layers:
            sorts.setdefault(tuple(sorted(within(layer.name, block.name) for layer in block.layers)), []).append(number)
    chosen: set[int] = set()
    for numbers in sorts.values():
        count = max(min(2, len(numbers)), most * len(numbers) // len(blocks))
        places = (1 - np.cos(np.linspace(0, np.pi, count))) / 2 * (len(numbers) - 1)  # of one it is the first
        chosen.update(numbers[round(place)] for place in places)
    return frozenset(chosen)


def expected_loss(W: Tensor, perturbed: Tensor, H: Tensor, sensitivity: Tensor) -> float:
    """Return `1/2 sum_i s_i (E H E^T)_ii`, what the network should lose by errors E of weights, nats per token.

    Args:
        W, perturbed: (out, in).
        H: (in, in) second moments of the inputs.
        sensitivity: (out,) of the network to squared errors of each output.
    """
    E = (W - perturbed).float()
    return float(((E @ H.float()) * E).sum(1).double() @ sensitivity.double()) / 2


def relative_energy(differences: Sequence[Tensor], states: Sequence[Tensor]) -> float:
    """Return the sum over tokens of `|difference|^2 / |state|^2`, of batches (windows, seqlen, hidden)."""
    return sum(
        float((d.double().square().sum(-1) / x.double().square().sum(-1).clamp(min=1e-30)).sum())
        for d, x in zip(differences, states, strict=True)
    )


def told_losses(changes: Sequence[Change]) -> list[float]:
    """Return the loss of every change: its estimate times what estimates of its layers are off by, interpolated over depth.

    That is the loss over the estimate, of the layers of the same name in the blocks where it was measured; its logarithm is linear
    between them and constant beyond. Of names whose measured changes were nothing it is the mean of all.
    """
    least = min((one.loss for one in changes if one.loss), default=0.0)
    known: dict[str, dict[int, float]] = {}  # logarithms by name and block
    for one in changes:
        if one.loss is not None and one.estimate > 0 and least > 0:
            for name in one.layers:
                known.setdefault(name, {})[one.block] = math.log(max(one.loss, least) / one.estimate)
    if not known:
        return [0.0] * len(changes)
    mean = float(np.mean([log for logs in known.values() for log in logs.values()]))

    def interpolated(name: str, block: int) -> float:
        logs = known.get(name, {block: mean})
        return float(np.interp(block, sorted(logs), [logs[place] for place in sorted(logs)]))

    return [one.estimate * math.exp(np.mean([interpolated(name, one.block) for name in one.layers])) for one in changes]

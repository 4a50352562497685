"""Perturbations of layers that measure the network's loss: quantization without the slow refinements.

Also chooses the blocks of a deep network in which perturbations are measured, and interpolates the losses of the other blocks. How
losses and changes are measured is in `probe.py`.
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
from nearplane.lattice.product_grid import high_rate_step
from nearplane.lattice.scale import StepStorage
from nearplane.lattice.solvers import sweep_planes
from nearplane.matrix.inputs import LayerInput
from nearplane.matrix.on_grid import solve
from nearplane.models.model import Block
from nearplane.recipe.block_scheme import BlockScheme
from nearplane.recipe.scheme import Scheme
from nearplane.recipe.schemes import GridScheme

COUNTED_COLUMNS = 256  # columns whose codes are counted at a time


class Perturbed(NamedTuple):
    """Perturbed weights of a layer.

    Args:
        rate: Bits per weight.
        values: (out, in) weights.
        shape: (rate, loss relative to that of `values`) of other rates, computed from the layer's own outputs, not measured.
    """

    rate: float
    values: Tensor
    shape: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Perturbations:
    """Perturbations of each layer alone, for measuring the network's loss.

    Args:
        of: Function from weights (out, in) and their inputs to makers of perturbed weights, with rates ascending. On several
            processes it must be possible to pickle it.
        points: Number of perturbations of each layer that are measured.
        together: Whether layers that runtimes fuse (same input, experts of a kind, tied weights) are perturbed together and share
            a curve. Experts in one parameter always share one: gate and up of all experts, down of all experts.
        sensitivity: (out,) sensitivity of the network to errors of each output, by layer; may lack layers.
    """

    of: Callable[[Tensor, LayerInput], Sequence[Callable[[], Perturbed]]]
    points: int
    together: bool = False
    sensitivity: Mapping[str, Tensor] = field(default_factory=dict)

    def expected(self, name: str, W: Tensor, perturbed: Perturbed, inputs: LayerInput) -> float:
        """Return the expected loss of the network in nats per token by the errors of a layer; 0 without its sensitivity."""
        if name not in self.sensitivity:
            return 0.0
        return expected_loss(W, perturbed.values, inputs.moments.H, self.sensitivity[name])

    def to(self, device: torch.device | str) -> Perturbations:
        """Return the perturbations with sensitivities on another device."""
        return replace(self, sensitivity={name: each.to(device) for name, each in self.sensitivity.items()})


def to_rates(rates: Sequence[float], scheme: Scheme) -> Perturbations:
    """Return perturbations like entropy-coded weights: codes without limits, steps by water-filling, one sweep each.

    A point's rate is the size of its codes with a table for every column. The network's loss is measured only at the middle rate.
    Losses at the other rates are in proportion to the errors of the layer's outputs, `tr(E H E^T)` with H damped. This follows the
    bend of the curve at low rates without the noise of a measurement, and gives better rates than measuring all three points.
    """
    return Perturbations(of=partial(_at_rates, rates, scheme), points=1)


def _at_rates(rates: Sequence[float], scheme: Scheme, W: Tensor, inputs: LayerInput) -> list[Callable[[], Perturbed]]:
    return [partial(_at_the_middle, rates, scheme, W, inputs)]


def _at_the_middle(rates: Sequence[float], scheme: Scheme, W: Tensor, inputs: LayerInput) -> Perturbed:
    factor = inputs.factor(scheme.order, scheme.damp)
    W = W.masked_fill(factor.dead, 0)
    points = [waterfilled(W, factor, rate) for rate in rates]
    measured = points[len(points) // 2]
    others = [one for one in points if one is not measured and measured.loss > 0]
    shape = tuple((one.rate, one.loss / measured.loss) for one in others)
    return Perturbed(measured.rate, measured.matrix.decode(), shape)


class Waterfilled(NamedTuple):
    """Weights (out, in) with water-filling steps: entropy of the codes in bits, damped output loss, codes and grid."""

    rate: float
    loss: float
    matrix: QuantizedMatrix[Grid]


def waterfilled(W: Tensor, factor: Factor, rate: float) -> Waterfilled:
    """Round `W` (out, in) with steps `c / sqrt(d_j)`, with c from the high-rate formula for `rate` bits per weight."""
    lengths = torch.empty_like(factor.d)
    lengths[factor.order] = factor.d.sqrt()  # (in,), in the order of the columns
    step = high_rate_step(W.double().square().mean(0).sqrt(), lengths, rate)
    scale = (2.0**step / lengths)[None].to(W.dtype)
    columns = torch.arange(W.shape[1], device=W.device)
    grid = Grid(scale=scale, zero=torch.zeros_like(scale), group=columns)
    swept = sweep_planes(W, grid, factor)
    assert swept.losses is not None, "a sweep computes losses"
    return Waterfilled(entropy(swept.matrix.codes), float(swept.losses.sum()), swept.matrix)


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


def to_widths(widths: Sequence[int], scheme: GridScheme, storage: torch.dtype) -> Perturbations:
    """Return perturbations like weights on a scheme's fixed grids with these bits per code; nothing is refined."""
    plain = replace(scheme, polish=0, rounds=0)
    schemes = [replace(plain, bits=width) for width in widths]
    return Perturbations(of=partial(_at_widths, schemes, storage), points=len(widths), together=True)


def _at_widths(
    schemes: Sequence[GridScheme], storage: torch.dtype, W: Tensor, inputs: LayerInput
) -> list[Callable[[], Perturbed]]:
    return [partial(_on_grid, W, inputs, float(scheme.bits), scheme, storage) for scheme in schemes]


def to_types(names: Sequence[str], scheme: BlockScheme) -> Perturbations:
    """Return perturbations like weights in blocks of llama.cpp's types, with the types' rates; nothing is refined."""
    return Perturbations(of=partial(_at_types, names, replace(scheme, polish=0, rounds=0)), points=len(names))


def _at_types(
    names: Sequence[str], scheme: BlockScheme, W: Tensor, inputs: LayerInput
) -> list[Callable[[], Perturbed]]:
    kinds = sorted({fitting(name, W.shape[1]) for name in names}, key=lambda kind: kind.rate)
    return [partial(_on_grid, W, inputs, kind.rate, scheme.stored_in(kind), torch.float16) for kind in kinds]


def _on_grid(
    W: Tensor, inputs: LayerInput, rate: float, scheme: GridScheme | BlockScheme, storage: torch.dtype
) -> Perturbed:
    factor = inputs.factor(scheme.order, scheme.damp)
    solution = solve(W.masked_fill(factor.dead, 0), inputs, scheme, StepStorage(storage))
    return Perturbed(rate, solution.matrix.decode())


class Change(NamedTuple):
    """Effect of a perturbation.

    Args:
        block: Number of the block with the perturbed layers.
        layers: Names of these layers within the block.
        estimate: Value proportional to the expected loss, see `expected_loss` and `relative_energy`.
        loss: Measured loss of the network; None if it was not measured.
    """

    block: int
    layers: tuple[str, ...]
    estimate: float
    loss: float | None


def name_in_block(layer: str, block: str) -> str:
    """Return the name of a layer within its block."""
    return layer.removeprefix(f"{block}.")


def measured_blocks(blocks: Sequence[Block], most: int) -> frozenset[int]:
    """Return the numbers of the blocks whose layers are measured: all blocks, or about `most`.

    The choice includes the first and the last and is denser at both ends (Chebyshev points), where blocks differ most. Blocks with
    other layers (attention or convolution) are chosen separately: of each sort at least two, or all.
    """
    if len(blocks) <= most:
        return frozenset(range(len(blocks)))
    kinds: dict[tuple[str, ...], list[int]] = {}
    for number, block in enumerate(blocks):
        if block.layers:
            kinds.setdefault(tuple(sorted(name_in_block(layer.name, block.name) for layer in block.layers)), []).append(
                number
            )
    chosen: set[int] = set()
    for numbers in kinds.values():
        count = max(min(2, len(numbers)), most * len(numbers) // len(blocks))
        places = (1 - np.cos(np.linspace(0, np.pi, count))) / 2 * (len(numbers) - 1)  # the first if count is 1
        chosen.update(numbers[round(place)] for place in places)
    return frozenset(chosen)


def expected_loss(W: Tensor, perturbed: Tensor, H: Tensor, sensitivity: Tensor) -> float:
    """Return `1/2 sum_i s_i (E H E^T)_ii`, the expected loss by errors E of weights, nats per token.

    Args:
        W, perturbed: (out, in) weights.
        H: (in, in) second moments of the inputs.
        sensitivity: (out,) sensitivity of the network to squared errors of each output.
    """
    E = (W - perturbed).float()
    return float(((E @ H.float()) * E).sum(1).double() @ sensitivity.double()) / 2


def relative_energy(differences: Sequence[Tensor], states: Sequence[Tensor]) -> float:
    """Return the sum over tokens of `|difference|^2 / |state|^2`, for batches (windows, seqlen, hidden)."""
    return sum(
        float((d.double().square().sum(-1) / x.double().square().sum(-1).clamp(min=1e-30)).sum())
        for d, x in zip(differences, states, strict=True)
    )


def corrected_losses(changes: Sequence[Change]) -> list[float]:
    """Return the loss of every change: its estimate times a factor that is interpolated over depth.

    The factor is the ratio of loss and estimate of layers with the same name in measured blocks; its logarithm is linear between
    these blocks and constant beyond. Names without a measured effect get the mean factor.
    """
    smallest = min((one.loss for one in changes if one.loss), default=0.0)
    known: dict[str, dict[int, float]] = {}  # logarithms by name and block
    for one in changes:
        if one.loss is not None and one.estimate > 0 and smallest > 0:
            for name in one.layers:
                known.setdefault(name, {})[one.block] = math.log(max(one.loss, smallest) / one.estimate)
    if not known:
        return [0.0] * len(changes)
    mean = float(np.mean([log for logs in known.values() for log in logs.values()]))

    def interpolated(name: str, block: int) -> float:
        logs = known.get(name, {block: mean})
        return float(np.interp(block, sorted(logs), [logs[place] for place in sorted(logs)]))

    return [one.estimate * math.exp(np.mean([interpolated(name, one.block) for name in one.layers])) for one in changes]

"""Bits for every layer: how much worse the network gets if one layer alone is quantized, and the best use of a budget.

`probe` measures a curve for every layer, the divergence of the network's predictions at a few rates. `allocate` and
`allocate_widths` spend a budget along such curves; they know no network.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from nearplane.divergence import Divergence, divergence
from nearplane.errors import CalibrationError, RecipeError
from nearplane.lattice.factor import Factor
from nearplane.lattice.grid import Grid
from nearplane.lattice.scale import high_rate_step
from nearplane.lattice.solve import nearest_plane
from nearplane.matrix.inputs import Inputs
from nearplane.matrix.on_grid import solve
from nearplane.models.activations import Stream, readout, skeleton
from nearplane.models.calibrate import stages
from nearplane.models.layers import Layer
from nearplane.models.model import Block, Model
from nearplane.observe import observe
from nearplane.progress import logged
from nearplane.schemes import GridScheme, Scheme

LOW, HIGH = 0.5, 7.5  # rates that a layer may get
RESOLUTION = 32  # rates per bit between which `allocate` chooses
SEQLEN = 512  # most tokens of a window: the more windows, the more even the sample
FORWARDS = 4.3  # of every block on all calibration tokens, which the quantization itself takes
HELD = 1 << 26  # logits that are held at a time
SHARE = 0.25  # of the time of the forwards of the quantization itself that a probe takes
MEMORY = 4 << 30  # bytes that travelling hidden states may take
UNITS = 1 << 26  # most steps of the exact search for widths

Perturb = Callable[[Tensor, Inputs], Iterator[tuple[float, Tensor]]]
"""From the weights (out, in) of a layer and what is known of its inputs to (rate, perturbed weights), rates ascending."""
Progress = Callable[[Iterable[Block], str, int], Iterable[Block]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Perturbations:
    """What is done to each layer alone, to see what the network loses by it.

    Args:
        of: makes them.
        points: how many of a layer.
        together: layers with the same input, experts of a kind and tied weights are perturbed together and share a curve, as
            runtimes fuse them.
    """

    of: Perturb
    points: int
    together: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What it costs the network to quantize one layer, or several that must have the same width, and nothing else.

    Args:
        layers: full names.
        weights: of them together.
        rates: bits per weight at which it was measured, ascending.
        losses: KL(original || perturbed) in nats per scored token at these rates.
    """

    layers: tuple[str, ...]
    weights: int
    rates: tuple[float, ...]
    losses: tuple[float, ...]

    def __call__(self, rate: float) -> float:
        """Return the loss at any rate: log2 of it is linear between the points that were measured.

        Beyond the highest it falls by the high-rate law, 2 bits for every bit. Below the lowest it rises as between the
        lowest two, but no slower than by that law: there the law fails, to the worse.
        """
        logs = [math.log2(max(loss, 1e-12)) for loss in self.losses]
        if rate >= self.rates[-1]:
            return float(2.0 ** (logs[-1] - 2 * (rate - self.rates[-1])))
        if rate < self.rates[0]:
            first = -2.0 if len(logs) == 1 else min(-2.0, (logs[1] - logs[0]) / (self.rates[1] - self.rates[0]))
            return float(2.0 ** (logs[0] + first * (rate - self.rates[0])))
        return float(2.0 ** np.interp(rate, self.rates, logs))


def allocate(curves: Sequence[Curve], budget: float, *, low: float = LOW, high: float = HIGH) -> dict[str, float]:
    """Give every layer the rate at which one more bit would help the network as much as anywhere else.

    The sum of the curves is least, over the lower convex hulls of the curves, with rates that average `budget` over the
    weights exactly.

    Args:
        curves: of all layers.
        budget: bits per weight.
        low, high: least and most that a layer may get.

    Returns:
        {layer: rate}.

    Raises:
        RecipeError: the budget is not from `low` to `high`.
    """
    if not low <= budget <= high:
        raise RecipeError(f"{budget:g} bits per weight asked for; layers can be given {low:g} to {high:g}.")
    grid = np.linspace(low, high, round((high - low) * RESOLUTION) + 1)
    given = [low] * len(curves)
    left = (budget - low) * sum(curve.weights for curve in curves)
    for _, index, a, b in sorted(_segments(curves, grid), key=lambda segment: -segment[0]):
        weights = curves[index].weights
        taken = min((b - a) * weights, left)
        left -= taken
        given[index] = a + taken / weights
        if left <= 0:
            break
    return {layer: rate for curve, rate in zip(curves, given, strict=True) for layer in curve.layers}


def _segments(curves: Sequence[Curve], grid: np.ndarray) -> Iterator[tuple[float, int, float, float]]:
    """Yield (gain per bit, curve, from rate, to rate) of the lower convex hulls of curves: of each, gains descend."""
    for index, curve in enumerate(curves):
        hull: list[tuple[float, float]] = []
        for x, y in ((float(rate), curve(float(rate))) for rate in grid):
            while len(hull) > 1 and _above(hull[-2], hull[-1], (x, y)):
                hull.pop()
            hull.append((x, y))
        for (a, worse), (b, better) in pairwise(hull):
            yield (worse - better) / ((b - a) * curve.weights), index, a, b


def _above(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Return whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def allocate_widths(curves: Sequence[Curve], budget: float, widths: Sequence[int]) -> dict[str, int]:
    """Give every layer one of the widths so that the sum of the curves is least and the average at most the budget.

    The exact optimum, by dynamic programming over the bits spent.

    Args:
        curves: of all layers; layers of one curve get the same width.
        budget: bits of a code, averaged over the weights.
        widths: to choose from.

    Returns:
        {layer: width}.

    Raises:
        RecipeError: the budget is less than the least width.
    """
    if budget < min(widths):
        raise RecipeError(f"{budget:g} bits asked for; the least that this format has is {min(widths)}.")
    total = sum(curve.weights for curve in curves)
    bits = math.floor(budget * total + 1e-6)
    unit = max(math.gcd(*(curve.weights for curve in curves)), -(-bits * len(curves) // UNITS))
    least = min(widths)
    room = (bits - least * total) // unit  # to spend on top of the least width everywhere
    best = np.zeros(room + 1)  # [units spent]: least loss so far
    choices = np.empty((len(curves), room + 1), dtype=np.int8)
    for index, curve in enumerate(curves):
        options = np.full((len(widths), room + 1), np.inf)
        for option, width in enumerate(widths):
            cost = -(-(width - least) * curve.weights // unit)
            if cost <= room:
                options[option, cost:] = best[: room + 1 - cost] + curve(width)
        choices[index] = options.argmin(0)
        best = options.min(0)
    given = [least] * len(curves)
    for index in range(len(curves) - 1, -1, -1):
        given[index] = widths[choices[index, room]]
        room -= -(-(given[index] - least) * curves[index].weights // unit)
    return {layer: width for curve, width in zip(curves, given, strict=True) for layer in curve.layers}


def probed_widths(budget: float, widths: Sequence[int]) -> tuple[int, ...]:
    """Return the widths at which to measure for a budget: the nearest three, the budget between the first and the last.

    Wider ones follow by the high-rate law; a narrower one than any that was measured must not be given to any layer.
    """
    below = [width for width in sorted(widths) if width <= budget]
    above = [width for width in sorted(widths) if width > budget]
    return tuple(below[-2:] + above[: 3 - len(below[-2:])])


def probed_rates(budget: float) -> tuple[float, ...]:
    """Return the rates at which to measure for a budget: well below it, a bit below, and a little above.

    From 2 bits on the logarithm of the loss falls by 2 with every bit, from two points one knows all; below it is steeper and bent,
    and takes a third.
    """
    low = max(0.25, budget - 1.75)
    return (low, low + 0.75, low + 2) if low < 2 else (low, low + 2)


def to_rates(rates: Sequence[float], scheme: Scheme) -> Perturbations:
    """Perturb as entropy-coded weights: codes without limits, steps by water-filling, one sweep each.

    A point's rate is what its codes take with a table for every column.
    """

    def perturb(W: Tensor, inputs: Inputs) -> Iterator[tuple[float, Tensor]]:
        factor = inputs.factor(scheme.order, scheme.damp)
        for rate in rates:
            yield waterfilled(W.masked_fill(factor.dead, 0), factor, rate)

    return Perturbations(of=perturb, points=len(rates))


def waterfilled(W: Tensor, factor: Factor, rate: float) -> tuple[float, Tensor]:
    """Round `W` (out, in) with steps `c / sqrt(d_j)`, c by the high-rate formula: (entropy of the codes, values)."""
    lengths = torch.empty_like(factor.d)
    lengths[factor.order] = factor.d.sqrt()  # (in,), in the order of the columns
    step = high_rate_step(W.double().square().mean(0).sqrt(), lengths, rate)
    scale = (2.0**step / lengths)[None].to(W.dtype)
    columns = torch.arange(W.shape[1], device=W.device)
    grid = Grid(scale=scale, zero=torch.zeros_like(scale), group=columns)
    matrix = nearest_plane(W, grid, factor)
    return entropy(matrix.codes), matrix.decode()


def entropy(codes: Tensor) -> float:
    """Return the mean over columns of the entropy of `codes` (out, in) in bits, corrected for few rows (Miller-Madow)."""
    out, columns = codes.shape
    counts = torch.diff(_runs(codes.T.sort(dim=1).values))  # how often each code of each column occurs
    plug_in = columns * math.log2(out) - float((counts * counts.double().log2()).sum()) / out
    return (plug_in + (len(counts) - columns) / (2 * out * math.log(2))) / columns


def _runs(ascending: Tensor) -> Tensor:
    """Return where runs of equal codes begin in the rows of (columns, out), rows one after the other, and the end."""
    new = torch.ones_like(ascending, dtype=torch.bool)
    new[:, 1:] = ascending[:, 1:] != ascending[:, :-1]
    return torch.cat([new.flatten().nonzero().flatten(), torch.tensor([ascending.numel()], device=ascending.device)])


def to_widths(widths: Sequence[int], scheme: GridScheme, storage: torch.dtype) -> Perturbations:
    """Perturb as weights on the fixed grids of a scheme, at these widths instead of its own; codes and steps are not refined."""
    plain = replace(scheme, polish=0, rounds=0)

    def perturb(W: Tensor, inputs: Inputs) -> Iterator[tuple[float, Tensor]]:
        factor = inputs.factor(scheme.order, scheme.damp)
        for width in widths:
            yield (
                float(width),
                solve(W.masked_fill(factor.dead, 0), inputs, replace(plain, bits=width), storage).decode(),
            )

    return Perturbations(of=perturb, points=len(widths), together=True)


@dataclass(slots=True, kw_only=True)
class _Traveller:
    """What one perturbation does to the hidden states, on its way through the blocks behind it."""

    layers: tuple[str, ...]
    weights: int
    rate: float
    difference: list[Tensor] = field(default_factory=list)  # from the original, by batch, bfloat16


@torch.no_grad()
def probe(
    model: Model,
    tokens: Tensor,
    perturbations: Perturbations,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    progress: Progress = lambda blocks, label, total: blocks,
) -> list[Curve]:
    """Measure what the network loses if one layer alone is quantized.

    One block is in memory at a time. Moments come from the original network, on a quarter of the tokens (more if that
    were fewer than four for every input of a layer). Each layer of a block is perturbed at each rate, and the hidden states
    that come out travel on through the blocks behind it, beside those of all others, up to the logits. As they are many, they
    do so on fewer tokens: so many that this takes `SHARE` of the forwards that the quantization takes, at least
    1024, and no more than fit in `MEMORY` bytes as bfloat16 differences from the original's.

    Args:
        model: to be quantized.
        tokens: (windows, seqlen) calibration tokens; cut into windows of at most 512.
        perturbations: what is done to each layer.
        device, dtype: where and in what to compute.
        progress: wraps the iterator over blocks.

    Raises:
        CalibrationError: what comes out is not finite, or layers did not run.
    """
    windows, size = _plan(model, tokens, perturbations.points)
    batch = min(8, size)
    stream = skeleton(model, windows, device=device, dtype=dtype, batch=batch, two_streams=False)
    batches = size // batch
    travellers: list[_Traveller] = []
    blocks = logged(model.blocks, "probing", len(model.blocks), blocks=[1] * len(model.blocks))
    for block in progress(blocks, "probing", len(model.blocks)):
        with block.on(device, dtype, original=False):
            before = list(stream.quantized[:batches])
            after = [stream.forward(block, block.quantized, i, x) for i, x in enumerate(before)]

            def onward(
                difference: Sequence[Tensor | float],
                block: Block = block,
                before: Sequence[Tensor] = before,
                after: Sequence[Tensor] = after,
            ) -> list[Tensor]:
                """Return the differences behind the block, as it now is, that come of differences before it."""
                return [
                    (stream.forward(block, block.quantized, i, x + _wide(d, x)) - y).to(torch.bfloat16)
                    for i, (x, y, d) in enumerate(zip(before, after, difference, strict=True))
                ]

            for traveller in travellers:
                traveller.difference = onward(traveller.difference)
            for born in _perturbed(block, stream, perturbations):
                born.difference = onward([0.0] * batches)
                travellers.append(born)
            stream.advance(block)
    losses = _losses(model, stream, windows[:size].split(batch), [t.difference for t in travellers], device, dtype)
    return _curves(model, travellers, losses, tied=perturbations.together)


def _wide(difference: Tensor | float, like: Tensor) -> Tensor | float:
    return difference.to(like) if isinstance(difference, Tensor) else difference


def _plan(model: Model, tokens: Tensor, points: int) -> tuple[Tensor, int]:
    """Return the windows for the statistics, (windows, seqlen), and how many of the first travel."""
    blocks, layers = len(model.blocks), max(len(block.layers) for block in model.blocks)
    seqlen = min(SEQLEN, tokens.shape[1])
    windows = tokens[:, : tokens.shape[1] // seqlen * seqlen].reshape(-1, seqlen)
    hidden = model.network.get_input_embeddings().weight.shape[1]
    affordable = SHARE * FORWARDS * windows.numel() * 2 / (layers * points * (blocks + 1))
    fitting = MEMORY / (2 * hidden * layers * points * blocks)
    travelling = max(1, int(min(max(affordable, 1024), fitting, 16384)) // seqlen)
    widest = max(layer.shape[1] for block in model.blocks for layer in block.layers)
    seen = max(windows.numel() // 4, 4 * widest, travelling * seqlen)
    travelling = min(travelling, len(windows))
    batch = min(8, travelling)
    return windows[: -(-seen // seqlen)], travelling // batch * batch


def _perturbed(block: Block, stream: Stream, perturbations: Perturbations) -> Iterator[_Traveller]:
    """Perturb the layers of a block, one set after the other; while one is given out, its weights are in the block."""
    groups = stages(block, stream)
    observations = observe(block, groups, stream, correct=False)
    inputs = {
        layer.name: shared
        for observed in observations
        for shared in [Inputs(observed.moments[observed.layers[0].name])]
        for layer in observed.layers
    }
    sets = _sets(groups, block.name) if perturbations.together else [(layer,) for group in groups for layer in group]
    for layers in sets:
        weights = [layer.read() for layer in layers]
        for variants in zip(
            *(perturbations.of(W, inputs[one.name]) for W, one in zip(weights, layers, strict=True)), strict=True
        ):
            for layer, (_, values) in zip(layers, variants, strict=True):
                layer.write(values)
            names = tuple(layer.name for layer in layers)
            yield _Traveller(layers=names, weights=sum(W.numel() for W in weights), rate=variants[0][0])
        for layer, W in zip(layers, weights, strict=True):
            layer.write(W)


def _sets(groups: Sequence[tuple[Layer, ...]], block: str) -> list[tuple[Layer, ...]]:
    """Join groups of layers with the same input that lie in one list of modules: all experts, whose runtimes have one kernel."""
    sets: dict[str, list[Layer]] = {}
    for group in groups:
        within = group[0].name.removeprefix(f"{block}.")
        numbered = re.match(r"(.*?)\.\d+(\.|$)", within)
        sets.setdefault(numbered[1] + ".*" if numbered else within, []).extend(group)
    return [tuple(layers) for layers in sets.values()]


def _losses(
    model: Model,
    stream: Stream,
    tokens: Sequence[Tensor],
    differences: Sequence[list[Tensor]],
    device: torch.device,
    dtype: torch.dtype,
) -> list[float]:
    """Return the divergence of the predictions from differences behind the last block, nats per scored token."""
    sums = [Divergence() for _ in differences]
    with readout(model, stream, device=device, dtype=dtype) as logits:
        vocabulary = model.network.get_output_embeddings().weight.shape[0]
        windows = max(1, HELD // (vocabulary * tokens[0].shape[1]))

        def predicted(part: Tensor, hidden: Tensor) -> Tensor:
            scored = logits(part, hidden)[:, :-1]
            return scored.to(torch.promote_types(scored.dtype, torch.float32)).log_softmax(-1)

        for i, batch in enumerate(tokens):
            for part, x, *rest in zip(
                *(t.split(windows) for t in (batch, stream.quantized[i], *(d[i] for d in differences))), strict=True
            ):
                expected = predicted(part, x)
                for index, difference in enumerate(rest):
                    sums[index] += divergence(expected, predicted(part, x + difference.to(x)))
    losses = [one.kl / one.tokens for one in sums]
    if not all(math.isfinite(loss) for loss in losses):
        raise CalibrationError("The network's predictions are NaN or Inf. Check the checkpoint.")
    return losses


def _curves(model: Model, travellers: Sequence[_Traveller], losses: Sequence[float], *, tied: bool) -> list[Curve]:
    """Collect the points of each set of layers; with `tied`, those of sets that are stored as the same tensor."""
    found: dict[tuple[str, ...], Curve] = {}
    for one, loss in zip(travellers, losses, strict=True):
        curve = found.get(one.layers) or Curve(layers=one.layers, weights=one.weights, rates=(), losses=())
        found[one.layers] = replace(curve, rates=(*curve.rates, one.rate), losses=(*curve.losses, max(loss, 0.0)))
    if not tied:
        return list(found.values())
    joined: dict[tuple[str, ...], Curve] = {}
    for curve in found.values():
        key = tuple(model.source_name(f"{layer}.weight") for layer in curve.layers)
        if key in joined:
            other = joined[key]
            losses = tuple(a + b for a, b in zip(other.losses, curve.losses, strict=True))
            curve = replace(
                other, layers=other.layers + curve.layers, losses=losses, weights=other.weights + curve.weights
            )
        joined[key] = curve
    return list(joined.values())

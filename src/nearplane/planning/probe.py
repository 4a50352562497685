"""How much worse the network gets if one layer alone is quantized: a curve for every layer, over a few rates."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from nearplane.calibration.activations import Stream, places, readout, skeleton
from nearplane.calibration.second_moments import observe, summed
from nearplane.calibration.stages import seen, stages
from nearplane.calibration.watch import RoutedRows, Rows
from nearplane.errors import CalibrationError
from nearplane.matrix.inputs import Inputs
from nearplane.models.kinds import Divergence, cut, distance, divergence, has_head
from nearplane.models.layers import Layer
from nearplane.models.model import Block, Model
from nearplane.planning.allocate import Curve, sum_of
from nearplane.planning.perturb import Change, Perturbations, measured_blocks, relative_energy, told_losses, within
from nearplane.system.memory import release
from nearplane.system.progress import Progress, logged, silent

SEQLEN = 512  # most tokens of a window: the more windows, the more even the sample
HELD = 1 << 26  # logits that are held at a time
FORWARDS = 0.36  # of every block on all tokens, that one perturbation of every layer takes; the quantization takes two
MEMORY = 4 << 30  # bytes that travelling hidden states may take
TRAVELLERS, TOKENS = 48, 1024  # of one perturbation of every layer at most, where tokens are few; of each at least


class Extent(NamedTuple):
    """How much a probe runs.

    Args:
        seen: tokens by which layers are looked at.
        travelling: tokens on which effects of perturbations travel.
        travellers: perturbations whose effects travel.
        crossings: forwards of a block on `travelling` tokens by which they do.
        born: perturbations, each with a forward of its own block.
    """

    seen: int
    travelling: int
    travellers: int
    crossings: int
    born: int


@dataclass(slots=True, kw_only=True)
class _Traveller:
    """What one perturbation does to the hidden states, on its way through the blocks behind it.

    Args:
        layers: full names.
        point: its number among the perturbations of these layers.
        rate, shape: see `Perturbed`.
        expected: loss, where sensitivities are known, see `expected_loss`; else what it is about proportional to.
        difference: from the original, by batch, bfloat16; none where it stays behind.
        block: number of its own.
    """

    layers: tuple[str, ...]
    point: int
    rate: float
    shape: tuple[tuple[float, float], ...]
    expected: float
    difference: list[Tensor] = field(default_factory=list)
    block: int = 0


@torch.no_grad()
def probe(
    model: Model,
    tokens: Tensor,
    perturbations: Perturbations,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    progress: Progress = silent,
) -> list[Curve]:
    """Measure what the network loses if one layer alone is quantized.

    One block is in memory at a time. Moments come from the original network, on an eighth of the tokens (more if that
    were fewer than four for every input of a layer). Each layer of a block is perturbed as `perturbations` says, and the
    hidden states that come out travel on through the blocks behind it, beside those of all others, up to the logits. As they
    are many, they do so on fewer tokens: so many that one perturbation of every layer takes `FORWARDS` forwards of every block
    on all tokens, at least `TOKENS`, and no more than fit in `MEMORY` bytes as bfloat16 differences from the original's.

    A network of more layers than `TRAVELLERS`, or than there are times `TOKENS` tokens if those are more, is too deep for that:
    about so many travel, one a layer, its middle point, from blocks that `measured_blocks` chooses. The layers of all others are
    perturbed as well, and what the network loses by that is estimated: from the sensitivities of their outputs where all are
    given, else from how much of the hidden states behind the block it changes. `told_losses` multiplies it with what estimates
    are off by where both are known. So memory does not grow with depth, and travelling takes at most half a forward of every
    block on all tokens (or on `TRAVELLERS * TOKENS`). Three of five blocks measured so changed the KL of two models at rates
    by -5 to +2 %, without sensitivities by -2 to +1 %.

    Args:
        model: to be quantized.
        tokens: (windows, seqlen) calibration tokens; cut into windows of at most 512.
        perturbations: what is done to each layer.
        device, dtype: where and in what to compute.
        progress: wraps the iterator over blocks.

    Raises:
        CalibrationError: what comes out is not finite, or layers did not run.
    """
    measured, windows, size = _sample(model, tokens, perturbations.points)
    deep = len(measured) < len(model.blocks)
    layers = {layer.name for block in model.blocks for layer in block.layers}
    if not (deep and perturbations.sensitivity.keys() >= layers):
        perturbations = replace(perturbations, sensitivity={})
    batch = min(8, size)
    stream = skeleton(model, windows.split(batch), device=device, dtype=dtype)
    batches = size // batch
    travellers: list[_Traveller] = []
    blocks = logged(model.blocks, "probing", len(model.blocks), blocks=[1] * len(model.blocks))
    for number, block in enumerate(progress(blocks, "probing", len(model.blocks))):
        with block.on(device, dtype, original=False):
            before = list(stream.quantized[:batches])
            after = [stream.forward(block, block.quantized, i, x) for i, x in enumerate(before)]
            onward = partial(_onward, stream, block, before, after)
            for traveller in travellers:
                if traveller.difference:
                    traveller.difference = onward(traveller.difference)
            for born in _perturbed(block, stream, perturbations):
                travels = not deep or (number in measured and born.point == perturbations.points // 2)
                difference = onward([torch.zeros(())] * batches) if travels or not perturbations.sensitivity else []
                if deep and not perturbations.sensitivity:
                    born.expected = relative_energy(difference, after)
                born.block = number
                if travels:
                    born.difference = difference
                travellers.append(born)
            stream.passed(block)
        release()  # what the C library kept of what this block took
    arrived = [one for one in travellers if one.difference]
    losses = _losses(model, stream, windows[:size].split(batch), [one.difference for one in arrived], device, dtype)
    if deep:
        of = {id(one): loss for one, loss in zip(arrived, losses, strict=True)}
        names = {layer.name: within(layer.name, block.name) for block in model.blocks for layer in block.layers}
        changes = []
        for one in travellers:
            inside = tuple(names[layer] for layer in one.layers)
            changes.append(Change(one.block, inside, one.expected, of.get(id(one))))
        losses = told_losses(changes)
    return _curves(model, travellers, losses, tied=perturbations.together)


def _onward(
    stream: Stream, block: Block, before: Sequence[Tensor], after: Sequence[Tensor], differences: Sequence[Tensor]
) -> list[Tensor]:
    """Return the differences behind the block, as it now is, that come of differences before it."""
    return [
        (stream.forward(block, block.quantized, i, x + d.to(x)) - y).to(torch.bfloat16)
        for i, (x, y, d) in enumerate(zip(before, after, differences, strict=True))
    ]


def extent(model: Model, tokens: Tensor, points: int) -> Extent:
    """Return how much a probe is going to run; see `probe` for the arguments, `points` are those of the perturbations."""
    measured, windows, size = _sample(model, tokens, points)
    layers, behind = _perturbed_apart(model), sum(len(model.blocks) - number - 1 for number in measured)
    travelling_points = points if len(measured) == len(model.blocks) else 1
    return Extent(
        seen=windows.numel(),
        travelling=size * windows.shape[1],
        travellers=len(measured) * layers * travelling_points,
        crossings=behind * layers * travelling_points,
        born=len(model.blocks) * layers * points,
    )


def _sample(model: Model, tokens: Tensor, points: int) -> tuple[frozenset[int], Tensor, int]:
    """Return what a probe runs on.

    Returns:
        The numbers of the blocks whose perturbations travel, the windows for the statistics, (windows, seqlen), and how many of
        the first of these travel.
    """
    blocks, layers = len(model.blocks), _perturbed_apart(model)
    chosen = measured_blocks(model.blocks, max(TRAVELLERS, tokens.numel() // TOKENS) // layers)
    measured = len(chosen)
    travelling_points = points if measured == blocks else 1
    windows = cut(tokens, SEQLEN)
    seqlen = windows.shape[1]
    hidden = model.network.get_input_embeddings().weight.shape[1]
    if len(model.stacks) > 1:  # what the encoder makes of tokens, or of their sound, travels with them
        hidden *= places(model, windows) / seqlen
    affordable = FORWARDS * windows.numel() * 2 / (layers * (blocks + 1)) * (blocks / measured)
    fitting = MEMORY / (2 * hidden * layers * travelling_points * measured)
    travelling = max(1, int(min(max(affordable, TOKENS), fitting, 16384)) // seqlen)
    widest = max(layer.shape[1] for block in model.blocks for layer in block.layers)
    seen = max(windows.numel() // 8, 4 * widest, travelling * seqlen)
    travelling = min(travelling, len(windows))
    batch = min(8, travelling)
    return chosen, windows[: -(-seen // seqlen)], travelling // batch * batch


def _perturbed_apart(model: Model) -> int:
    """Return how many sets of layers of a block are perturbed apart, at most: all experts' in one parameter are one."""
    return max(len({layer.parameter for layer in block.layers}) for block in model.blocks)


def _perturbed(block: Block, stream: Stream, perturbations: Perturbations) -> Iterator[_Traveller]:
    """Perturb the layers of a block, one set after the other; while one is given out, its weights are in the block.

    Args:
        block: in memory.
        stream: standing before it; behind the last perturbation its hidden states are those behind the block as it was.
        perturbations: what is done to each; with sensitivities, losses are to be expected by them.
    """
    found = stages(block, stream)
    groups, routed = [[group for group in found if group[0].routed is kind] for kind in (False, True)]
    if routed:
        shown = [*seen(block, routed, stream)]
        for some in ([*range(len(routed))],) if perturbations.together else ([side] for side in range(len(routed))):
            sides = [(routed[i], [[rows[i]] for rows in shown]) for i in some]
            yield from _experts_perturbed(sides, stream, perturbations)
        del shown
    inputs: dict[str, Inputs] = {}
    for observed in observe(block, groups, stream, onward=True):
        shared = Inputs(observed.moments[observed.layers[0].name])
        inputs |= dict.fromkeys((layer.name for layer in observed.layers), shared)
    sets = _sets(groups, block.name) if perturbations.together else [(layer,) for group in groups for layer in group]
    for layers in sets:
        weights = {layer: layer.read() for layer in layers}
        made = (perturbations.of(W, inputs[layer.name]) for layer, W in weights.items())
        for point, makers in enumerate(zip(*made, strict=True)):
            variants = [make() for make in makers]
            expected = 0.0
            for (layer, W), variant in zip(weights.items(), variants, strict=True):
                layer.write(variant.values)
                expected += perturbations.expected(layer.name, W, variant, inputs[layer.name])
            yield _Traveller(
                layers=tuple(layer.name for layer in layers),
                point=point,
                rate=variants[0].rate,
                shape=variants[0].shape,
                expected=expected,
            )
        for layer, W in weights.items():
            layer.write(W)


def _experts_perturbed(
    sides: Sequence[tuple[tuple[Layer, ...], list[list[Rows | RoutedRows]]]],
    stream: Stream,
    perturbations: Perturbations,
) -> Iterator[_Traveller]:
    """Perturb all experts of a block together, by what is known of the inputs of one at a time.

    Args:
        sides: groups of their layers, with what every batch shows of them.
        stream: that the batches are of.
        perturbations: what is done to each.
    """
    layers = tuple(layer for group, _ in sides for layer in group)
    holders = {layer.parameter: layer.weight for layer in layers}
    weights = {name: holder.detach().clone() for name, holder in holders.items()}
    for point in range(perturbations.points):
        rates: list[tuple[float, int]] = []  # of each layer, with its number of weights
        shapes: list[list[tuple[float, float, int]]] = []  # the same, of those that have one
        expected = 0.0
        for group, shown in sides:
            for observed in summed([group], shown, stream):
                inputs = Inputs(observed.moments[observed.layers[0].name])
                for layer in observed.layers:
                    W = layer.read()
                    variant = perturbations.of(W, inputs)[point]()
                    layer.write(variant.values)
                    expected += perturbations.expected(layer.name, W, variant, inputs)
                    rates.append((variant.rate, W.numel()))
                    shapes += [[(*other, W.numel()) for other in variant.shape]] if variant.shape else []
        yield _Traveller(
            layers=tuple(layer.name for layer in layers),
            point=point,
            rate=_mean(rates),
            shape=tuple(
                (_mean([(rate, size) for rate, _, size in others]), _mean([(loss, size) for _, loss, size in others]))
                for others in zip(*shapes, strict=True)
            ),
            expected=expected,
        )
        for name, holder in holders.items():
            holder.data.copy_(weights[name])


def _mean(weighted: Sequence[tuple[float, int]]) -> float:
    return sum(value * weight for value, weight in weighted) / sum(weight for _, weight in weighted)


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
    """Return the divergence of the predictions from differences behind the last block, nats per scored token.

    Of a network without head that of its last hidden states, see `distance`.
    """
    sums = [Divergence() for _ in differences]
    with readout(model, stream, device=device, dtype=dtype) as logits:
        head = has_head(model.network)
        ends = model.network.get_output_embeddings() if head else model.network.get_input_embeddings()
        width = ends.weight.shape[0 if head else 1]
        windows = max(1, HELD // (width * tokens[0].shape[1]))

        def predicted(part: Tensor, hidden: Tensor) -> Tensor:
            if not head:
                return logits(part, hidden)
            scored = logits(part, hidden)[:, :-1]
            return scored.to(torch.promote_types(scored.dtype, torch.float32)).log_softmax(-1)

        apart = divergence if head else distance
        for i, batch in enumerate(tokens):
            for part, x, *rest in zip(
                *(t.split(windows) for t in (batch, stream.quantized[i], *(d[i] for d in differences))), strict=True
            ):
                expected = predicted(part, x)
                for index, difference in enumerate(rest):
                    sums[index] += apart(expected, predicted(part, x + difference.to(x)))
    losses = [one.kl / one.tokens for one in sums]
    if not all(math.isfinite(loss) for loss in losses):
        raise CalibrationError("The network's predictions are NaN or Inf. Check the checkpoint.")
    return losses


def _curves(model: Model, travellers: Sequence[_Traveller], losses: Sequence[float], *, tied: bool) -> list[Curve]:
    """Collect the points of each set of layers; with `tied`, those of sets that are stored as the same tensor."""
    points: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    least = min((loss for loss in losses if loss > 0), default=0.0)  # what is lost in noise is not nothing
    for one, loss in zip(travellers, losses, strict=True):
        more = [(rate, max(loss, least) * multiple) for rate, multiple in (*one.shape, (one.rate, 1.0))]
        points.setdefault(one.layers, []).extend(more)
    weights = {layer.name: math.prod(layer.shape) for layer in model.layers}
    stored = {layer.name: layer.copies(model.weights)[0] if tied else layer.name for layer in model.layers}
    joined: dict[tuple[str, ...], list[Curve]] = {}
    for layers, found in points.items():
        rates, of_rates = zip(*sorted(found), strict=True)
        curve = Curve(layers=layers, weights=sum(weights[layer] for layer in layers), rates=rates, losses=of_rates)
        joined.setdefault(tuple(stored[layer] for layer in layers), []).append(curve)
    return [sum_of(curves) for curves in joined.values()]

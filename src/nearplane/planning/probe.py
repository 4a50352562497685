"""How much worse the network gets if one layer alone is quantized: a curve for every layer, over a few rates."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from nearplane.planning.allocate import Curve
from nearplane.planning.depth import Change, expected_loss, measured_blocks, relative_energy, told_losses, within
from nearplane.planning.perturb import Perturbations
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
        weights: of them together.
        point: its number among the perturbations of these layers.
        rate, shape: see `Perturbed`.
        expected: loss, where sensitivities are known, see `expected_loss`.
        difference: from the original, by batch, bfloat16; none where it stays behind.
        change: what is known of it in its own block, where not all travel.
    """

    layers: tuple[str, ...]
    weights: int
    point: int
    rate: float
    shape: tuple[tuple[float, float], ...]
    expected: float | None = None
    difference: list[Tensor] = field(default_factory=list)
    change: Change | None = None


@torch.no_grad()
def probe(
    model: Model,
    tokens: Tensor,
    perturbations: Perturbations,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    sensitivity: Mapping[str, Tensor] | None = None,
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
        sensitivity: (out,) how much the network minds errors of a layer's outputs, by layer; None: not known.
        progress: wraps the iterator over blocks.

    Raises:
        CalibrationError: what comes out is not finite, or layers did not run.
    """
    measured = _measured(model, tokens)
    windows, size = _windows(model, tokens, perturbations.points, len(measured))
    deep = len(measured) < len(model.blocks)
    layers = [layer.name for block in model.blocks for layer in block.layers]
    minded = sensitivity if deep and sensitivity and all(name in sensitivity for name in layers) else None
    batch = min(8, size)
    stream = skeleton(model, windows.split(batch), device=device, dtype=dtype)
    batches = size // batch
    travellers: list[_Traveller] = []
    blocks = logged(model.blocks, "probing", len(model.blocks), blocks=[1] * len(model.blocks))
    for number, block in enumerate(progress(blocks, "probing", len(model.blocks))):
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
                if traveller.difference:
                    traveller.difference = onward(traveller.difference)
            for born in _perturbed(block, stream, perturbations, minded):
                travels = not deep or (number in measured and born.point == perturbations.points // 2)
                difference = onward([0.0] * batches) if travels or born.expected is None else []
                if deep:
                    names = tuple(within(layer, block.name) for layer in born.layers)
                    estimate = relative_energy(difference, after) if born.expected is None else born.expected
                    born.change = Change(number, names, estimate, None)
                if travels:
                    born.difference = difference
                travellers.append(born)
            stream.passed(block)
        release()  # what the C library kept of what this block took
    arrived = [one for one in travellers if one.difference]
    losses = _losses(model, stream, windows[:size].split(batch), [one.difference for one in arrived], device, dtype)
    if deep:
        losses = _told(travellers, arrived, losses)
    return _curves(model, travellers, losses, tied=perturbations.together)


def _told(travellers: Sequence[_Traveller], arrived: Sequence[_Traveller], losses: Sequence[float]) -> list[float]:
    """Return the losses of all from those of the ones that arrived."""
    of = {id(one): loss for one, loss in zip(arrived, losses, strict=True)}
    return told_losses([one.change._replace(loss=of.get(id(one))) for one in travellers if one.change is not None])


def _wide(difference: Tensor | float, like: Tensor) -> Tensor | float:
    return difference.to(like) if isinstance(difference, Tensor) else difference


def _measured(model: Model, tokens: Tensor) -> frozenset[int]:
    """Return the numbers of the blocks whose perturbations travel."""
    layers = max(_perturbed_apart(block) for block in model.blocks)
    return measured_blocks(model.blocks, max(TRAVELLERS, tokens.numel() // TOKENS) // layers)


def extent(model: Model, tokens: Tensor, points: int) -> Extent:
    """Return how much a probe is going to run; see `probe` for the arguments, `points` are those of the perturbations."""
    measured, layers = _measured(model, tokens), max(_perturbed_apart(block) for block in model.blocks)
    windows, size = _windows(model, tokens, points, len(measured))
    behind = sum(len(model.blocks) - number - 1 for number in measured)
    deep = len(measured) < len(model.blocks)
    return Extent(
        seen=windows.numel(),
        travelling=size * windows.shape[1],
        travellers=len(measured) * layers * (1 if deep else points),
        crossings=behind * layers * (1 if deep else points),
        born=len(model.blocks) * layers * points,
    )


def _windows(model: Model, tokens: Tensor, points: int, measured: int) -> tuple[Tensor, int]:
    """Return the windows for the statistics, (windows, seqlen), and how many of the first travel, of so many blocks."""
    blocks, layers = len(model.blocks), max(_perturbed_apart(block) for block in model.blocks)
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
    return windows[: -(-seen // seqlen)], travelling // batch * batch


def _perturbed_apart(block: Block) -> int:
    """Return how many sets of layers of a block are perturbed apart, at most."""
    routed = {layer.parameter for layer in block.layers if layer.routed}
    return len(routed) + sum(not layer.routed for layer in block.layers)


def _perturbed(
    block: Block, stream: Stream, perturbations: Perturbations, minded: Mapping[str, Tensor] | None
) -> Iterator[_Traveller]:
    """Perturb the layers of a block, one set after the other; while one is given out, its weights are in the block.

    Args:
        block: in memory.
        stream: standing before it; behind the last perturbation its hidden states are those behind the block as it was.
        perturbations: what is done to each.
        minded: sensitivities of all layers' outputs, where losses are to be expected by them.
    """
    found = stages(block, stream)
    groups, routed = [[group for group in found if group[0].routed is kind] for kind in (False, True)]
    if routed:
        shown = [*seen(block, routed, stream)]
        for some in ([*range(len(routed))],) if perturbations.together else ([side] for side in range(len(routed))):
            yield from _experts_perturbed(
                [(routed[i], [[rows[i]] for rows in shown]) for i in some], stream, perturbations, minded
            )
        del shown
    observations = observe(block, groups, stream, onward=True)
    inputs = {
        layer.name: shared
        for observed in observations
        for shared in [Inputs(observed.moments[observed.layers[0].name])]
        for layer in observed.layers
    }
    sets = _sets(groups, block.name) if perturbations.together else [(layer,) for group in groups for layer in group]
    for layers in sets:
        weights = [layer.read() for layer in layers]
        made = (perturbations.of(W, inputs[one.name]) for W, one in zip(weights, layers, strict=True))
        for point, variants in enumerate(zip(*made, strict=True)):
            for layer, variant in zip(layers, variants, strict=True):
                layer.write(variant.values)
            names, first, expected = tuple(layer.name for layer in layers), variants[0], None
            if minded is not None:
                expected = sum(
                    expected_loss(W, variant.values, inputs[name].moments.H, minded[name])
                    for name, W, variant in zip(names, weights, variants, strict=True)
                )
            yield _Traveller(
                layers=names,
                weights=sum(W.numel() for W in weights),
                point=point,
                rate=first.rate,
                shape=first.shape,
                expected=expected,
            )
        for layer, W in zip(layers, weights, strict=True):
            layer.write(W)


def _experts_perturbed(
    sides: Sequence[tuple[tuple[Layer, ...], list[list[Rows | RoutedRows]]]],
    stream: Stream,
    perturbations: Perturbations,
    minded: Mapping[str, Tensor] | None,
) -> Iterator[_Traveller]:
    """Perturb all experts of a block together, by what is known of the inputs of one at a time.

    Args:
        sides: groups of their layers, with what every batch shows of them.
        stream: that the batches are of.
        perturbations: what is done to each.
        minded: see `_perturbed`.
    """
    layers = tuple(layer for group, _ in sides for layer in group)
    holders = {layer.parameter: layer.weight for layer in layers}
    weights = {name: holder.detach().clone() for name, holder in holders.items()}
    sizes = [math.prod(layer.shape) for layer in layers]
    for point in range(perturbations.points):
        found: list[tuple[float, tuple[tuple[float, float], ...]]] = []  # rate and shape, by layer
        expected = None if minded is None else 0.0
        for group, shown in sides:
            for observed in summed([group], shown, stream):
                inputs = Inputs(observed.moments[observed.layers[0].name])
                for layer in observed.layers:
                    W = layer.read()
                    rate, values, shape = perturbations.one(W, inputs, point)
                    layer.write(values)
                    if minded is not None and expected is not None:
                        expected += expected_loss(W, values, inputs.moments.H, minded[layer.name])
                    found.append((rate, shape))
        rates = [(rate, size) for (rate, _), size in zip(found, sizes, strict=True)]
        shapes = [(shape, size) for (_, shape), size in zip(found, sizes, strict=True) if shape]
        mean = tuple(
            (
                _mean([(shape[i][0], size) for shape, size in shapes]),
                _mean([(shape[i][1], size) for shape, size in shapes]),
            )
            for i in range(len(shapes[0][0]) if shapes else 0)
        )
        yield _Traveller(
            layers=tuple(layer.name for layer in layers),
            weights=sum(sizes),
            point=point,
            rate=_mean(rates),
            shape=mean,
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
    found: dict[tuple[str, ...], Curve] = {}
    least = min((loss for loss in losses if loss > 0), default=0.0)  # what is lost in noise is not nothing
    for one, loss in zip(travellers, losses, strict=True):
        curve = found.get(one.layers) or Curve(layers=one.layers, weights=one.weights, rates=(), losses=())
        more = [(rate, max(loss, least) * multiple) for rate, multiple in (*one.shape, (one.rate, 1.0))]
        rates, of_rates = zip(*sorted([*zip(curve.rates, curve.losses, strict=True), *more]), strict=True)
        found[one.layers] = replace(curve, rates=rates, losses=of_rates)
    if not tied:
        return list(found.values())
    joined: dict[tuple[str, ...], Curve] = {}
    stored = {layer.name: layer.copies(model.weights)[0] for layer in model.layers}
    for curve in found.values():
        key = tuple(stored[layer] for layer in curve.layers)
        if key in joined:
            other = joined[key]
            losses = tuple(a + b for a, b in zip(other.losses, curve.losses, strict=True))
            curve = replace(
                other, layers=other.layers + curve.layers, losses=losses, weights=other.weights + curve.weights
            )
        joined[key] = curve
    return list(joined.values())

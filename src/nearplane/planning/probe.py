"""Measured loss of the network when one layer alone is quantized: a curve over a few rates for every layer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from nearplane.calibration.activations import Stream, positions_per_window, skeleton
from nearplane.calibration.expert_rows import RoutedRows
from nearplane.calibration.network_ends import readout
from nearplane.calibration.rows import Rows
from nearplane.calibration.second_moments import sum_moments
from nearplane.calibration.separate_passes import observe, rows_by_batch
from nearplane.calibration.stages import stages
from nearplane.calibration.states_on_disk import Keep
from nearplane.calibration.walk import Followed
from nearplane.errors import CalibrationError
from nearplane.matrix.inputs import LayerInput
from nearplane.models.divergence import NOTHING_TO_MEASURE, Divergence, distance, divergence, predicts_always_the_same
from nearplane.models.kinds import has_head
from nearplane.models.layers import Layer
from nearplane.models.model import Block, Model
from nearplane.models.spoken import cut_windows
from nearplane.planning.allocate import Curve, sum_of
from nearplane.planning.perturb import (
    Change,
    Perturbations,
    corrected_losses,
    measured_blocks,
    name_in_block,
    relative_energy,
)
from nearplane.system.matmul_choice import Library
from nearplane.system.matmul_library import library_in_use, using_library
from nearplane.system.memory import release
from nearplane.system.progress import Progress, Tracked, silent
from nearplane.system.ranks import ONE_PROCESS, Ranks

BATCH = 8  # maximum windows of a forward pass
SEQLEN = 512  # maximum tokens of a window; more windows make a more even sample
COMPARED_LOGITS = 1 << 26  # logits in memory at a time
FORWARDS = 0.36  # cost of one perturbation of every layer, in forward passes on all tokens; the quantization takes two
MEMORY = 4 << 30  # bytes of the propagated hidden states
MAX_TRAVELLERS, MIN_TOKENS = 48, 1024  # maximum of propagated perturbations if tokens are few; minimum tokens of each


class Extent(NamedTuple):
    """Amount of work of a probe.

    Args:
        seen: Tokens for the statistics of the layers' inputs.
        travelling: Tokens on which effects of perturbations are propagated to the logits.
        batch: Tokens of a forward pass.
        travellers: Number of perturbations whose effects are propagated.
        crossings: Number of forward passes of a block on `travelling` tokens for that.
        born: Number of perturbations, each with a forward pass of its own block.
    """

    seen: int
    travelling: int
    batch: int
    travellers: int
    crossings: int
    born: int


@dataclass(slots=True, kw_only=True)
class _Traveller:
    """Effect of one perturbation on the hidden states, which is propagated through the following blocks.

    Args:
        layers: Full names of the perturbed layers.
        point: Number of the perturbation among those of these layers.
        rate, shape: Fields of `Perturbed`.
        expected: Expected loss, see `expected_loss`; without sensitivities a value proportional to it.
        block: Number of the block with these layers.
        place: Index of the first of its differences from the original hidden states, bfloat16, one per batch; None if
            they are not propagated.
        loss: Measured loss of the network; None if it was not measured.
    """

    layers: tuple[str, ...]
    point: int
    rate: float
    shape: tuple[tuple[float, float], ...]
    expected: float
    block: int = 0
    place: int | None = None
    loss: float | None = None


class _Turns:
    """Deals perturbations to ranks, each to the rank that perturbed the fewest weights so far. All ranks deal alike."""

    def __init__(self, ranks: Ranks) -> None:
        self._rank, self._weights = ranks.rank, [0] * ranks.world

    def mine(self, layers: Iterable[Layer], points: int = 1) -> bool:
        """Return whether the next perturbations, so many of these layers, are this rank's."""
        rank = self._weights.index(min(self._weights))
        self._weights[rank] += points * sum(math.prod(layer.shape) for layer in layers)
        return rank == self._rank


@torch.no_grad()
def probe(
    model: Model,
    tokens: Tensor,
    perturbations: Perturbations,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    keep: Keep = list,
    progress: Progress = silent,
    ranks: Ranks = ONE_PROCESS,
) -> list[Curve]:
    """Measure the loss of the network when one layer alone is quantized.

    One block is in memory at a time. Moments come from the original network, on an eighth of the tokens (more if that were fewer
    than four per input of a layer). Each layer of a block is perturbed, and the changed hidden states are propagated through the
    following blocks up to the logits. Since they are many, this uses fewer tokens: as many as make one perturbation of every layer
    cost `FORWARDS` forward passes on all tokens, at least `MIN_TOKENS`, and not more than fit into `MEMORY` bytes as differences
    from the original hidden states in bfloat16.

    A network with more layers than `MAX_TRAVELLERS` (or than the number of tokens divided by `MIN_TOKENS`, if that is
    more) is too deep for that. About so many perturbations are then propagated, one per layer (its middle point), from
    the blocks of `measured_blocks`. The layers of all other blocks are perturbed too, but their loss is estimated: from
    the sensitivities of their outputs if all are given, else from the relative change of the hidden states after the
    block. `corrected_losses` corrects the estimates by the measured losses. Memory therefore does not grow with depth,
    and propagation costs at most half a forward pass on all tokens (or on `MAX_TRAVELLERS * MIN_TOKENS`). Measuring
    three of five blocks changed the KL of two models at rates by -5 to +2 %, without sensitivities by -2 to +1 %.

    On several processes each perturbs some of the layers. All of them pass the original network, whose statistics they need.

    Args:
        model: The model to quantize.
        tokens: (windows, seqlen) calibration tokens; cut into windows of at most 512.
        perturbations: Perturbations of each layer.
        device, dtype: Device and dtype of the computation.
        keep: Function that makes the lists of hidden states and of their differences.
        progress: Function that wraps the iterator over blocks.
        ranks: Processes of the run.

    Raises:
        CalibrationError: Predictions are not finite, or layers did not run.
    """
    if ranks.others:
        ranks.start(_FollowedProbe(tokens, perturbations.to("cpu"), dtype, keep, library_in_use()))
    measured, windows, size = _sample(model, tokens, perturbations.points)
    deep = len(measured) < len(model.blocks)
    layers = {layer.name for block in model.blocks for layer in block.layers}
    if not (deep and perturbations.sensitivity.keys() >= layers):
        perturbations = replace(perturbations, sensitivity={})
    middle = perturbations.points // 2  # of a deep network, the perturbation of each layer that is propagated
    by_change = deep and not perturbations.sensitivity
    stream = skeleton(model, windows.split(min(BATCH, size)), device=device, dtype=dtype, keep=keep)
    batches = size // min(BATCH, size)
    travellers: list[_Traveller | None] = []  # None: of another rank
    turns = _Turns(ranks)
    differences = keep(())  # of all travellers
    blocks = Tracked(model.in_turn(model.blocks, device), "probing", len(model.blocks), blocks=[1] * len(model.blocks))
    for number, block in enumerate(progress(blocks, "probing", len(model.blocks))):
        with block.on(device, dtype, original=False):
            before = [stream.quantized[i] for i in range(batches)]
            after = [stream.forward(block, block.quantized, i, x) for i, x in enumerate(before)]
            onward = partial(_onward, stream, block, before, after)
            for index in range(len(differences)):
                differences[index] = onward(index % batches, differences[index])
            for born in _perturbed(block, stream, perturbations, turns):
                travellers.append(born)
                if born is None:
                    continue
                born.block, propagates = number, number in measured and (not deep or born.point == middle)
                if propagates or by_change:
                    difference = [onward(i, torch.zeros(())) for i in range(batches)]
                if by_change:
                    born.expected = relative_energy(difference, after)
                if propagates:
                    born.place = len(differences)
                    differences.extend(difference)
            stream.passed(block)
        release()  # return memory of this block that the C library keeps
    arrived = [one for one in travellers if one is not None and one.place is not None]
    shown = [stream.quantized[i] for i in range(batches)]
    losses = losses_of(model, stream, windows[:size].split(size // batches), shown, differences, device, dtype)
    for one, loss in zip(arrived, losses, strict=True):
        one.loss = loss
    every = [next(one for one in same if one is not None) for same in zip(*ranks.gather(travellers), strict=True)]
    if not deep:
        return _curves(model, every, [one.loss for one in every if one.loss is not None], tied=perturbations.together)
    names = {layer.name: name_in_block(layer.name, block.name) for block in model.blocks for layer in block.layers}
    changes = [Change(one.block, tuple(names[layer] for layer in one.layers), one.expected, one.loss) for one in every]
    return _curves(model, every, corrected_losses(changes), tied=perturbations.together)


@dataclass(frozen=True, slots=True)
class _FollowedProbe:
    """A probe of rank 0, in which another rank takes part: it perturbs its share of the layers."""

    tokens: Tensor
    perturbations: Perturbations
    dtype: torch.dtype
    keep: Keep
    library: Library

    def __call__(self, followed: Followed) -> None:
        place = followed.device.place
        with using_library(self.library):
            probe(
                followed.model,
                self.tokens,
                self.perturbations.to(place),
                device=place,
                dtype=self.dtype,
                keep=self.keep,
                ranks=followed.device.ranks,
            )


def _onward(
    stream: Stream, block: Block, before: Sequence[Tensor], after: Sequence[Tensor], batch: int, difference: Tensor
) -> Tensor:
    """Return the difference of a batch after the block in its present form, given the difference before it."""
    x = before[batch]
    output = stream.forward(block, block.quantized, batch, x + difference.to(x), trial=True)
    return (output - after[batch]).to(torch.bfloat16)


def extent(model: Model, tokens: Tensor, points: int) -> Extent:
    """Return the amount of work of a probe with so many `points` per layer; for the arguments see `probe`."""
    measured, windows, size = _sample(model, tokens, points)
    layers, following = _perturbed_sets(model), sum(len(model.blocks) - number - 1 for number in measured)
    travelling_points = points if len(measured) == len(model.blocks) else 1
    return Extent(
        seen=windows.numel(),
        travelling=size * windows.shape[1],
        batch=min(BATCH, size) * windows.shape[1],
        travellers=len(measured) * layers * travelling_points,
        crossings=following * layers * travelling_points,
        born=len(model.blocks) * layers * points,
    )


def _sample(model: Model, tokens: Tensor, points: int) -> tuple[frozenset[int], Tensor, int]:
    """Return the sample of a probe.

    Returns:
        Numbers of the blocks whose perturbations are propagated, windows for the statistics (windows, seqlen), and how many of the
        first of these windows are used for propagation.
    """
    blocks, layers = len(model.blocks), _perturbed_sets(model)
    chosen = measured_blocks(model.blocks, max(MAX_TRAVELLERS, tokens.numel() // MIN_TOKENS) // layers)
    measured = len(chosen)
    travelling_points = points if measured == blocks else 1
    windows = cut_windows(tokens, SEQLEN)
    seqlen = windows.shape[1]
    hidden = model.network.get_input_embeddings().weight.shape[1]
    if len(model.stacks) > 1:  # the encoder's outputs of tokens or sound are propagated too
        hidden *= positions_per_window(model, windows) / seqlen
    affordable = FORWARDS * windows.numel() * 2 / (layers * (blocks + 1)) * (blocks / measured)
    fitting = MEMORY / (2 * hidden * layers * travelling_points * measured)
    travelling = max(1, int(min(max(affordable, MIN_TOKENS), fitting, 16384)) // seqlen)
    widest = max(layer.shape[1] for block in model.blocks for layer in block.layers)
    seen = max(windows.numel() // 8, 4 * widest, travelling * seqlen)
    travelling = min(travelling, len(windows))
    batch = min(BATCH, travelling)
    return chosen, windows[: -(-seen // seqlen)], travelling // batch * batch


def _perturbed_sets(model: Model) -> int:
    """Return the maximum number of separately perturbed sets of layers of a block; experts in one parameter are one set."""
    return max(len({layer.parameter for layer in block.layers}) for block in model.blocks)


def _perturbed(
    block: Block, stream: Stream, perturbations: Perturbations, turns: _Turns
) -> Iterator[_Traveller | None]:
    """Perturb the sets of layers of a block one after the other; the block holds the weights of the one that is yielded.

    None stands for a perturbation that another rank makes.

    Args:
        block: The block, in memory.
        stream: Hidden states before the block; after the last perturbation they are those after the original block.
        perturbations: Perturbations of each layer, with sensitivities if losses are to be estimated by them.
        turns: How perturbations are dealt.
    """
    block_stages = stages(block, stream)
    groups, routed = [[group for group in block_stages if group[0].routed is kind] for kind in (False, True)]
    if routed:
        shown = [*rows_by_batch(block, routed, stream)]
        for some in ([*range(len(routed))],) if perturbations.together else ([side] for side in range(len(routed))):
            sides = [(routed[i], [[rows[i]] for rows in shown]) for i in some]
            yield from _experts_perturbed(sides, stream, perturbations, turns)
        del shown
    inputs: dict[str, LayerInput] = {}
    for observed in observe(block, groups, stream, onward=True):
        shared = LayerInput.of(observed.moments[observed.layers[0].name])
        inputs |= dict.fromkeys((layer.name for layer in observed.layers), shared)
    sets = _sets(groups, block.name) if perturbations.together else [(layer,) for group in groups for layer in group]
    for layers in sets:
        weights = {layer: layer.read() for layer in layers}
        shared_inputs = {layer: inputs.pop(layer.name) for layer in layers}  # freed after the last layer with them
        makers_of = (perturbations.of(W, shared_inputs[layer]) for layer, W in weights.items())
        mine = turns.mine(layers, perturbations.points)
        for point, makers in enumerate(zip(*makers_of, strict=True)):
            if not mine:
                yield None
                continue
            variants = [make() for make in makers]
            expected = 0.0
            for (layer, W), variant in zip(weights.items(), variants, strict=True):
                layer.write(variant.values)
                expected += perturbations.expected(layer.name, W, variant, shared_inputs[layer])
            yield _Traveller(
                layers=tuple(layer.name for layer in layers),
                point=point,
                rate=variants[0].rate,
                shape=variants[0].shape,
                expected=expected,
            )
        for layer, W in weights.items() if mine else ():
            layer.write(W)


def _experts_perturbed(
    sides: Sequence[tuple[tuple[Layer, ...], list[list[Rows | RoutedRows]]]],
    stream: Stream,
    perturbations: Perturbations,
    turns: _Turns,
) -> Iterator[_Traveller | None]:
    """Perturb all experts of a block together, with the statistics of one expert's inputs in memory at a time.

    Args:
        sides: Groups of the experts' layers, with the inputs that every batch gives them.
        stream: Stream of the batches.
        perturbations: Perturbations of each layer.
        turns: How perturbations are dealt.
    """
    layers = tuple(layer for group, _ in sides for layer in group)
    own = [turns.mine(layers) for _ in range(perturbations.points)]
    if not any(own):
        yield from [None] * len(own)
        return
    holders = {layer.parameter: layer.weight for layer in layers}
    weights = {name: holder.detach().clone() for name, holder in holders.items()}
    for point, mine in enumerate(own):
        if not mine:
            yield None
            continue
        rates: list[tuple[float, int]] = []  # of each layer, with its number of weights
        shapes: list[list[tuple[float, float, int]]] = []  # the same, of layers that have a shape
        expected = 0.0
        for group, shown in sides:
            for observed in sum_moments([group], shown, stream):
                inputs = LayerInput.of(observed.moments[observed.layers[0].name])
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
    """Join groups with the same input in one list of modules, such as all experts, for which runtimes have one kernel."""
    sets: dict[str, list[Layer]] = {}
    for group in groups:
        name = group[0].name.removeprefix(f"{block}.")
        numbered = re.match(r"(.*?)\.\d+(\.|$)", name)
        sets.setdefault(numbered[1] + ".*" if numbered else name, []).extend(group)
    return [tuple(layers) for layers in sets.values()]


def losses_of(
    model: Model,
    stream: Stream,
    tokens: Sequence[Tensor],
    states: Sequence[Tensor],
    differences: Sequence[Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> list[float]:
    """Return the divergence of the predictions by differences after the last block, nats per scored token.

    Without a head, return the divergence of the last hidden states, see `distance`.

    Args:
        model, stream, device, dtype: Arguments and stream of the probe.
        tokens: Batches of windows.
        states: Original hidden states after the last block, by batch.
        differences: Those of each perturbation, one per batch, follow each other.
    """
    sums = [Divergence() for _ in range(len(differences) // len(tokens))]
    with readout(model, stream, device=device, dtype=dtype) as logits:
        head = has_head(model.network)
        ends = model.network.get_output_embeddings() if head else model.network.get_input_embeddings()
        width = ends.weight.shape[0 if head else 1]
        windows = max(1, COMPARED_LOGITS // (width * tokens[0].shape[1]))

        def predicted(part: Tensor, hidden: Tensor) -> Tensor:
            if not head:
                return logits(part, hidden)
            scored = logits(part, hidden)[:, :-1]
            return scored.to(torch.promote_types(scored.dtype, torch.float32)).log_softmax(-1)

        measure, varies = divergence if head else distance, False
        for i, batch in enumerate(tokens):
            for at, (part, x) in enumerate(zip(batch.split(windows), states[i].split(windows), strict=True)):
                expected = predicted(part, x)
                varies |= not head or not predicts_always_the_same(expected)
                for index in range(len(sums)):
                    difference = differences[index * len(tokens) + i].split(windows)[at]
                    sums[index] += measure(expected, predicted(part, x + difference.to(x)))
    if not varies:
        raise CalibrationError(NOTHING_TO_MEASURE)
    losses = [one.kl / one.tokens for one in sums]
    if not all(math.isfinite(loss) for loss in losses):
        raise CalibrationError("The network's predictions are NaN or Inf. Check the checkpoint.")
    return losses


def _curves(model: Model, travellers: Sequence[_Traveller], losses: Sequence[float], *, tied: bool) -> list[Curve]:
    """Collect the curve of each set of layers; with `tied`, sets that are stored as the same tensor share one."""
    points: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    least = min((loss for loss in losses if loss > 0), default=0.0)  # replaces losses that are lost in noise
    for one, loss in zip(travellers, losses, strict=True):
        more = [(rate, max(loss, least) * multiple) for rate, multiple in (*one.shape, (one.rate, 1.0))]
        points.setdefault(one.layers, []).extend(more)
    weights = {layer.name: math.prod(layer.shape) for layer in model.layers}
    stored = {layer.name: layer.copies(model.weights)[0] if tied else layer.name for layer in model.layers}
    joined: dict[tuple[str, ...], list[Curve]] = {}
    for layers, pairs in points.items():
        rates, rate_losses = zip(*sorted(pairs), strict=True)
        curve = Curve(layers=layers, weights=sum(weights[layer] for layer in layers), rates=rates, losses=rate_losses)
        joined.setdefault(tuple(stored[layer] for layer in layers), []).append(curve)
    return [sum_of(curves) for curves in joined.values()]

"""What each number format of a mix costs the network, by layer, and what a whole mix costs, measured.

`estimated` needs one backward pass and one forward pass: errors e of the outputs of a layer cost `1/2 sum_i s_i e_i^2` nats
per token, with s the mean squared gradients of its outputs, on average over tokens that count by the gradients at their
positions: the diagonal of the Fisher information. `divergences` rounds layers together and compares predictions.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from nearplane.calibration.activations import Dealt, Stream, skeleton
from nearplane.calibration.positions import EQUAL, PositionWeights, octaves
from nearplane.calibration.second_moments import sum_moments
from nearplane.calibration.sensitivity import Sensitivity
from nearplane.calibration.separate_passes import observe, rows_by_batch
from nearplane.calibration.stages import stages
from nearplane.errors import CalibrationError, first_few
from nearplane.formats.gguf.mixes import fitting
from nearplane.lattice.moments import Moments
from nearplane.lattice.rounded_inputs import rounded
from nearplane.lattice.scale import StepStorage
from nearplane.lattice.shared_grid import divisor_of
from nearplane.matrix.inputs import LayerInput
from nearplane.matrix.on_grid import solve
from nearplane.models.layers import Layer
from nearplane.models.model import Block, Model
from nearplane.number_formats import E2M1, BlockType, InputRounding
from nearplane.planning.probe import losses_of
from nearplane.recipe.block_scheme import BlockScheme
from nearplane.recipe.format_mix import Offer
from nearplane.recipe.schemes import GridScheme
from nearplane.system.memory import release
from nearplane.system.progress import Progress, Tracked, silent
from nearplane.system.ranks import ONE_PROCESS

log = logging.getLogger("nearplane")
# {layer: (first layer with the same input, KL in each format)}
Losses: TypeAlias = Mapping[str, tuple[str, tuple[float, ...]]]
BATCH_TOKENS, BATCH_IMAGES = 4096, 8  # of a forward pass


@torch.no_grad()
def estimated(
    model: Model,
    fitted: Tensor,
    others: Tensor,
    offers: Sequence[Offer],
    effect: Sensitivity,
    storage: torch.dtype,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    progress: Progress = silent,
) -> Losses:
    """Estimate the KL of the network with one layer alone in each format, nats per token.

    One block is in memory at a time. Layers are rounded by one sweep, without refinement.

    Args:
        model: The model to quantize.
        fitted: (windows, seqlen) tokens for the second moments.
        others: (windows, seqlen) other tokens, on which errors are measured.
        offers: The formats, none of them unquantized. One that does not fit a layer costs it nothing.
        effect: Gradients, as `sensitivity` measures them.
        storage: Dtype of steps in the file.
        device, dtype: Device and dtype of the computation.
        progress: Function that wraps the iterator over blocks.

    Returns:
        {layer: (name of the first layer with the same input, KL in each format)}, in the order in which they run.

    Raises:
        CalibrationError: Layers did not run, or an input is not finite.
    """
    stream = _stream(model, fitted, others, effect.positions, device, dtype)
    gradient = _mean_gradient(model, effect)
    found: dict[str, tuple[str, tuple[float, ...]]] = {}
    total = len(model.blocks)
    blocks = Tracked(model.in_turn(model.blocks, device), "probing", total, blocks=[1] * total)
    for block in progress(blocks, "measuring what formats cost", total):
        with block.on(device, dtype, original=False):
            for layer, first, inputs in _inputs_of(block, stream):
                W, known = layer.read(), effect.positions.get(layer.name)
                rows = effect.outputs.get(layer.name)
                rows = gradient.expand(len(W)) if rows is None else rows
                cost = partial(_loss, W, inputs.moments, rows.to(W.device), known)
                found[layer.name] = first, tuple(cost(offer, as_offered(offer, storage, W, inputs)) for offer in offers)
            stream.passed(block)
        release()
    return found


def _mean_gradient(model: Model, effect: Sensitivity) -> Tensor:
    """Return the mean squared gradient of all layers, which those get that have none; log a warning if there are some.

    Raises:
        CalibrationError: No layer has any.
    """
    if not effect.outputs:
        raise CalibrationError(
            "Predictions depend on no layer, so that nothing tells what a format costs. Use --bits or --grid."
        )
    names = [layer.name for block in model.blocks for layer in block.layers if layer.name not in effect.outputs]
    if names:
        log.warning(
            "%d layers have no gradients on this text and count as the mean layer: %s", len(names), first_few(names)
        )
    return torch.stack([each.mean() for each in effect.outputs.values()]).mean()


def _loss(
    W: Tensor, moments: Moments, rows: Tensor, positions: PositionWeights | None, offer: Offer, values: Tensor
) -> float:
    """Return the estimate of one layer in one format.

    Args:
        W: (out, in) weights.
        moments: Of the inputs, with rows of other windows; without them, as of an expert that none of these reaches, errors
            are measured by the second moments.
        rows: (out,) mean squared gradients of the outputs.
        positions: Weights of positions, if there are some.
        offer: The format.
        values: (out, in) weights in it.
    """
    if values is W:
        return 0.0
    if moments.extra is None:
        E = (values - W).float()
        return float(((E @ moments.H.float()) * E).sum(1).double() @ rows.double()) / 2
    X, how = moments.extra.X_hat, inputs_of(offer)
    weights = _row_weights(len(X), moments.positions, positions).to(X.device)
    errors = X @ (values - W).T if how is None else _rounded(X, how) @ values.T - X @ W.T
    return float(weights @ (errors.double().square() @ rows.double())) / 2


def _row_weights(rows: int, exponents: Sequence[int], weights: PositionWeights | None) -> Tensor:
    """Return (rows,) float64 weights of the extra rows of a layer in a mean, which their positions gave factors already."""
    if not exponents or weights is None or rows % weights.length:
        return torch.full((rows,), 1 / rows, dtype=torch.float64)
    parts = zip(octaves(weights.length), weights.octaves, exponents, strict=True)
    window = [
        max(0.0, each - EQUAL) / (1 - EQUAL) / 4.0**exponent
        for part, each, exponent in parts
        for _ in range(part.stop - part.start)
    ]
    return torch.tensor(window * (rows // weights.length), dtype=torch.float64) / rows


@torch.no_grad()
def divergences(
    model: Model,
    fitted: Tensor,
    unseen: Tensor,
    offers: Mapping[str, Offer],
    parts: Sequence[Collection[str]],
    positions: Mapping[str, PositionWeights],
    storage: torch.dtype,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    progress: Progress = silent,
) -> list[float]:
    """Measure KL(original || network with layers rounded together), nats per scored token, for several sets of layers.

    One block is in memory at a time. Layers are rounded as in `estimated`, by moments of the original network.

    Args:
        unseen: (windows, seqlen) tokens that are scored.
        offers: Formats by name of the layer; others stay as they are.
        parts: The sets; of each only the layers that have a format are rounded.
        positions: Weights of positions by layer.
        model, fitted, storage, device, dtype, progress: See `estimated`.

    Returns:
        One number for each set.
    """
    stream = _stream(model, fitted, unseen, positions, device, dtype)
    travelling, total = _Travelling(stream, parts), len(model.blocks)
    blocks = Tracked(model.in_turn(model.blocks, device), "measuring", total, blocks=[1] * total)
    for block in progress(blocks, "measuring the choice", total):
        with block.on(device, dtype, original=False):
            before, changed = travelling.states(), list[_Changed]()
            for layer, _, inputs in _inputs_of(block, stream):
                if (offer := offers.get(layer.name)) is not None:
                    W = layer.read()
                    changed.append(_Changed(layer, W, as_offered(offer, storage, W, inputs), inputs_of(offer)))
            travelling.through(block, before, changed)
            stream.passed(block)
            del changed, before
        release()
    return travelling.losses(model, unseen, device, dtype)


class _Changed(NamedTuple):
    """A layer with its weights, with rounded ones, and how its inputs are then rounded."""

    layer: Layer
    W: Tensor
    values: Tensor
    inputs: InputRounding | None


class _Travelling:
    """Effects of sets of rounded layers on the hidden states of the extra windows, block by block.

    Args:
        stream: The stream, with extra windows.
        parts: Names of the layers of each set.
    """

    def __init__(self, stream: Stream, parts: Sequence[Collection[str]]) -> None:
        self._stream, self._parts = stream, parts
        self._places = range(stream.dealt.fitted, len(stream.sizes))
        # of each set, one for each batch
        self._differences = [torch.zeros(()) for _ in range(len(parts) * len(self._places))]

    def states(self) -> list[Tensor]:
        """Return the original hidden states, batch by batch."""
        return [self._stream.quantized[place] for place in self._places]

    def through(self, block: Block, before: Sequence[Tensor], changed: Sequence[_Changed]) -> None:
        """Pass the block, which the original network has passed from the states `before`."""
        stream, count = self._stream, len(self._places)
        for number, part in enumerate(self._parts):
            with ExitStack() as hooks:
                for layer, W, values, how in changed:
                    layer.write(values if layer.name in part else W)
                    if how is not None and layer.name in part:
                        hooks.enter_context(layer.replacing(partial(_rounded, how=how)))
                for index, place in enumerate(self._places, number * count):
                    x, difference = before[place - self._places[0]], self._differences[index]
                    output = stream.forward(block, block.quantized, place, x + difference.to(x), trial=True)
                    self._differences[index] = output - stream.quantized[place]

    def losses(self, model: Model, tokens: Tensor, device: torch.device, dtype: torch.dtype) -> list[float]:
        """Return the KL of each set on these windows."""
        batches = tokens.split(_windows_at_once(tokens))
        return losses_of(model, self._stream, batches, self.states(), self._differences, device, dtype)


def _stream(
    model: Model,
    fitted: Tensor,
    extra: Tensor,
    positions: Mapping[str, PositionWeights],
    device: torch.device,
    dtype: torch.dtype,
) -> Stream:
    """Return the stream of windows for moments, and of extra windows, which enter no sum."""
    batches, more = fitted.split(_windows_at_once(fitted)), extra.split(_windows_at_once(extra))
    stream = skeleton(model, [*batches, *more], device=device, dtype=dtype)
    dealt = Dealt.among(ONE_PROCESS, [*map(len, batches)], [*map(len, more)])
    stream.dealt = replace(dealt, extra_windows=0)  # so that no rows of them are left out
    stream.positions = positions
    return stream


def _windows_at_once(tokens: Tensor) -> int:
    return max(1, BATCH_TOKENS // tokens.shape[1]) if tokens.dim() == 2 else BATCH_IMAGES


def _inputs_of(block: Block, stream: Stream) -> Iterator[tuple[Layer, str, LayerInput]]:
    """Yield the layers of a block, the first of those with the same input, and this input; at the end the stream has passed."""
    groups, routed = [[group for group in stages(block, stream) if group[0].routed is kind] for kind in (False, True)]
    shown = [*rows_by_batch(block, routed, stream)] if routed else []
    dense = observe(block, groups, stream, onward=True)
    for index, group in enumerate(routed):
        for observed in sum_moments([group], ([rows[index]] for rows in shown), stream):
            inputs = LayerInput.of(observed.moments[observed.layers[0].name])
            yield from ((layer, group[0].name, inputs) for layer in observed.layers)
    for observed in dense:
        inputs = LayerInput.of(observed.moments[observed.layers[0].name])
        yield from ((layer, observed.layers[0].name, inputs) for layer in observed.layers)


def as_offered(offer: Offer, storage: torch.dtype, W: Tensor, inputs: LayerInput) -> Tensor:
    """Return weights (out, in) in a format of a mix, by one sweep; unchanged if the format does not fit their shape."""
    scheme, (out, columns) = offer.scheme, W.shape
    assert isinstance(scheme, GridScheme | BlockScheme), "formats of a mix are on grids"
    if not fits(offer, (out, columns)):
        return W
    if isinstance(scheme, BlockScheme):
        scheme = scheme.stored_in(fitting(scheme.number_format.name, columns))
    plain: GridScheme | BlockScheme = replace(scheme, polish=0, rounds=0)
    dead = inputs.factor(plain.order, plain.damp).dead
    return solve(W.masked_fill(dead, 0), inputs, plain, StepStorage(storage)).matrix.decode()


def fits(offer: Offer, shape: tuple[int, int]) -> bool:
    """Return whether weights (out, in) of this shape can be stored in a format of a mix."""
    if offer.scheme is None:
        return True
    format, (out, columns) = offer.scheme.number_format, shape
    if isinstance(format, BlockType):
        format = fitting(format.name, columns)
    return columns % format.run == 0 and out % format.rows == 0


def inputs_of(offer: Offer) -> InputRounding | None:
    """Return how inputs of a layer in a format of a mix are rounded; None: they are not."""
    return None if offer.scheme is None or offer.activations == "none" else offer.scheme.number_format.inputs


def _rounded(x: Tensor, how: InputRounding) -> Tensor:
    """Return inputs as runtimes round them; a global scale is that of these inputs, not of all text."""
    if not x.numel():
        return x
    return rounded(x, how, divisor_of(float(x.abs().max()), E2M1[-1]) if how.global_scale else None)

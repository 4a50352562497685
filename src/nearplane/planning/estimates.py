"""What roundings of each layer alone cost the network, estimated from one backward pass and one forward pass.

Errors e of the outputs of a layer cost `1/2 sum_i s_i e_i^2` nats per token, with s the mean squared gradients of its outputs,
on average over tokens that count by the gradients at their positions: the diagonal of the Fisher information. What roundings
cost together is measured in `divergences.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from nearplane.calibration.activations import Dealt, Stream, skeleton
from nearplane.calibration.positions import EQUAL, PositionWeights, octaves
from nearplane.calibration.second_moments import sum_moments
from nearplane.calibration.sensitivity import Sensitivity
from nearplane.calibration.separate_passes import observe, rows_by_batch
from nearplane.calibration.stages import stages
from nearplane.calibration.states_on_disk import Keep
from nearplane.errors import CalibrationError, first_few
from nearplane.lattice.moments import Moments
from nearplane.matrix.inputs import LayerInput
from nearplane.models.layers import Layer
from nearplane.models.model import Block, Model
from nearplane.number_formats import InputRounding
from nearplane.planning.parts import windows_at_once
from nearplane.planning.roundings import Rounded, Rounding, rounded_inputs
from nearplane.system.memory import release
from nearplane.system.progress import Progress, Tracked, silent
from nearplane.system.ranks import ONE_PROCESS

log = logging.getLogger("nearplane")
UNKNOWN_COSTS = "Nothing tells in which layers bits are worth most"
INSTEAD = "Use a whole number of --bits, a type of --grid, or --allocate uniform."


class Costs(NamedTuple):
    """What roundings of one layer cost.

    Args:
        first: Name of the first layer with the same input.
        losses: KL of the network with this layer alone rounded, nats per token, for each rounding.
        rates: `Rounded.rate` of each.
    """

    first: str
    losses: tuple[float, ...]
    rates: tuple[float, ...]


Losses: TypeAlias = Mapping[str, Costs]


@torch.no_grad()
def estimated(
    model: Model,
    fitted: Tensor,
    others: Tensor,
    roundings: Sequence[Rounding],
    effect: Sensitivity,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    keep: Keep = list,
    progress: Progress = silent,
) -> Losses:
    """Estimate the KL of the network with one layer alone rounded, nats per token. One block is in memory at a time.

    Args:
        model: The model to quantize.
        fitted: (windows, seqlen) tokens for the second moments.
        others: (windows, seqlen) other tokens, on which errors are measured.
        roundings: What is tried of each layer. One that returns the same weights costs nothing.
        effect: Gradients, as `sensitivity` measures them.
        device, dtype: Device and dtype of the computation.
        keep: Function that makes the list of hidden states.
        progress: Function that wraps the iterator over blocks.

    Returns:
        What each layer costs, by name in the order in which they run.

    Raises:
        CalibrationError: Layers did not run, or an input is not finite.
    """
    stream = stream_of(model, fitted, others, effect.positions, device, dtype, keep)
    mean = _mean_gradient(model, effect)
    found: dict[str, Costs] = {}
    total = len(model.blocks)
    blocks = Tracked(model.in_turn(model.blocks, device), "measuring what errors cost", total, blocks=[1] * total)
    for block in progress(blocks, "measuring what errors cost", total):
        with block.on(device, dtype, original=False):
            shown: _RoundedRows | None = None
            for layer, first, inputs in inputs_of(block, stream):
                if shown is None or shown.moments is not inputs.moments:
                    shown = _RoundedRows(inputs.moments)
                W, rows = layer.read(), effect.outputs.get(layer.name)
                rows = (mean.expand(len(W)) if rows is None else rows).to(W.device)
                errors = _LayerErrors(W, shown, rows, effect.positions.get(layer.name))
                losses, rates = list[float](), list[float]()
                for rounding in roundings:
                    tried = rounding(W, inputs, rows)
                    losses.append(errors.loss(tried))
                    rates.append(tried.rate)
                found[layer.name] = Costs(first, tuple(losses), tuple(rates))
            stream.passed(block)
        release()
    return found


def _mean_gradient(model: Model, effect: Sensitivity) -> Tensor:
    """Return the mean squared gradient of all layers, which those get that have none; log a warning if there are some.

    Raises:
        CalibrationError: No layer has any.
    """
    layers = [layer.name for layer in model.block_layers]
    known = [effect.outputs[name].mean() for name in layers if name in effect.outputs]
    if not known:
        raise CalibrationError(f"{UNKNOWN_COSTS}, as predictions depend on no layer. {INSTEAD}")
    if names := [name for name in layers if name not in effect.outputs]:
        log.warning(
            "%d layers have no gradients on this text and count as the mean layer: %s", len(names), first_few(names)
        )
    return torch.stack(known).mean()


class _RoundedRows:
    """The input of some layers, with rows of other windows as formats round them, each made once."""

    def __init__(self, moments: Moments) -> None:
        self.moments = moments
        self._rounded: dict[InputRounding | None, Tensor] = {}

    def rows(self, how: InputRounding | None) -> Tensor:
        """Return (rows, in) the rows of other windows, rounded."""
        if how not in self._rounded:
            assert self.moments.extra is not None, "there are rows of other windows"
            X = self.moments.extra.X_hat
            self._rounded[how] = X if how is None else rounded_inputs(X, how)
        return self._rounded[how]


class _LayerErrors:
    """Estimates of one layer.

    Args:
        W: (out, in) weights.
        shown: Its input. Without rows of other windows, as of an expert that none of these reaches, errors are measured by the
            second moments.
        rows: (out,) mean squared gradients of the outputs.
        positions: Weights of positions, if there are some.
    """

    def __init__(self, W: Tensor, shown: _RoundedRows, rows: Tensor, positions: PositionWeights | None) -> None:
        self._W, self._shown, self._rows, self._positions = W, shown, rows, positions

    @cached_property
    def _outputs(self) -> Tensor:
        return self._shown.rows(None) @ self._W.T

    @cached_property
    def _weights(self) -> Tensor:
        exponents, X = self._shown.moments.positions, self._shown.rows(None)
        return _row_weights(len(X), exponents, self._positions).to(X.device)

    def loss(self, tried: Rounded) -> float:
        """Return the estimate of one rounding."""
        W, values, how = self._W, tried.values, tried.inputs
        if values is W:
            return 0.0
        if self._shown.moments.extra is None:
            E = (values - W).float()
            return float(((E @ self._shown.moments.H.float()) * E).sum(1).double() @ self._rows.double()) / 2
        X = self._shown.rows(how)
        errors = X @ (values - W).T if how is None else X @ values.T - self._outputs
        return float(self._weights @ (errors.double().square() @ self._rows.double())) / 2


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


def stream_of(
    model: Model,
    fitted: Tensor,
    extra: Tensor,
    positions: Mapping[str, PositionWeights],
    device: torch.device,
    dtype: torch.dtype,
    keep: Keep = list,
) -> Stream:
    """Return the stream of windows for moments, and of extra windows, which enter no sum."""
    batches, more = fitted.split(windows_at_once(fitted)), extra.split(windows_at_once(extra))
    stream = skeleton(model, [*batches, *more], device=device, dtype=dtype, keep=keep)
    dealt = Dealt.among(ONE_PROCESS, [*map(len, batches)], [*map(len, more)])
    stream.dealt = replace(dealt, extra_windows=0)  # so that no rows of them are left out
    stream.positions = positions
    return stream


def inputs_of(block: Block, stream: Stream) -> Iterator[tuple[Layer, str, LayerInput]]:
    """Yield the layers of a block, the first of those with the same input, and this input; at the end the stream has passed."""
    groups, routed = [[group for group in stages(block, stream) if group[0].routed is kind] for kind in (False, True)]
    shown = [*rows_by_batch(block, routed, stream)] if routed else []
    dense = observe(block, groups, stream, onward=True)
    for index, group in enumerate(routed):
        for observed in sum_moments([group], ([rows[index]] for rows in shown), stream):
            inputs = LayerInput.of(observed.moments[observed.layers[0].name])
            yield from ((layer, group[0].name, inputs) for layer in observed.layers)
    while dense:
        observed = dense.pop(0)  # whose moments are dropped before others are used
        inputs = LayerInput.of(observed.moments[observed.layers[0].name])
        yield from ((layer, observed.layers[0].name, inputs) for layer in observed.layers)

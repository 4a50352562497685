"""What is decided of a run before its first layer, where the recipe asks for it by measuring, and how that is kept."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from nearplane.calibration.positions import PositionWeights
from nearplane.calibration.sensitivity import Sensitivity, sensitivity, sensitivity_windows
from nearplane.calibration.states_on_disk import Keep
from nearplane.errors import CalibrationError, NearplaneError, RecipeError, first_line
from nearplane.formats.table import FORMATS
from nearplane.lattice.moments import Moments
from nearplane.models.model import Model
from nearplane.number_formats import NumberFormat, integers, number_format
from nearplane.planning.allocate import MIN_RATE
from nearplane.planning.estimates import INSTEAD, UNKNOWN_COSTS, estimated
from nearplane.planning.measured_bits import fixed_rates, measured_rates, measured_types, measured_widths
from nearplane.planning.parts import Extent, parts_of
from nearplane.planning.size_budget import Choice, budget_of
from nearplane.recipe.layer_plan import Plan
from nearplane.recipe.readers import Weights
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.scheme import Scheme
from nearplane.system.device import Device
from nearplane.system.memory import is_out_of_memory, is_refused
from nearplane.system.progress import Progress, silent
from nearplane.system.ranks import ONE_PROCESS

log = logging.getLogger(__name__)
UNPLACED = "blocks share keys and values, or no layer multiplies the same number of tokens of every window"
NOTHING_TO_CHOOSE = (
    "Bits are chosen for layers in blocks, by measuring, but --ignore leaves out all of them. Ignore fewer layers, or use "
    "--bits or --grid with one number format."
)
POINTS = 3  # rates, widths or types that are tried of each layer


def plan(
    model: Model,
    settled: Plan,
    tokens: Tensor | None,
    device: Device,
    progress: Progress,
    *,
    free: Choice | None = None,
    keep: Keep = list,
) -> Plan:
    """Complete the plan of a run by measuring the network where the recipe asks for it: formats, rates, sensitivities.

    Args:
        model: The model to quantize.
        settled: The plan before anything is measured; see `resolved`.
        tokens: (windows, seqlen) calibration tokens; None if nothing is measured.
        device: Device of the computation.
        progress: Display of the blocks that are passed.
        free: Layers whose types of llama.cpp are chosen by measuring, and their budget.
        keep: Function that makes the list of hidden states by which bits are chosen.

    Raises:
        RecipeError: The rate or size cannot be met.
    """
    recipe, scheme, estimate = settled.recipe, settled.recipe.scheme, None
    effect, rates = Effect(), dict[str, float]()
    if tokens is not None:
        measured = measured_gradients(model, settled, tokens, device, progress)
        effect = effect_of_errors(model, settled, measured, tokens.numel())
        if measured is not None and allocates(model, settled):
            parts = parts_of(model, tokens)
            estimate = partial(
                estimated,
                model,
                parts.moments,
                parts.errors,
                effect=replace(measured, positions=dict(effect.positions)),
                device=device.place,
                keep=keep,
                progress=progress,
            )
    if scheme.entropy_coded:
        rates = measured_rates(model, settled, estimate)
    elif free is not None and estimate is not None:
        settled = settled.stored_in(measured_types(model, recipe, free, estimate))
    elif recipe.allocate == "slope":
        assert estimate is not None, "widths are allocated by measuring, which needs tokens"
        settled = settled.stored_in(measured_widths(model, recipe, usable_widths(model, recipe), estimate))
    return _completed(settled, rates, effect)


def _completed(settled: Plan, rates: Mapping[str, float], effect: Effect) -> Plan:
    """Return a plan with what was measured, by name of the layer."""
    layers = {
        name: replace(
            each,
            rate=rates.get(name),
            sensitivity=effect.rows.get(name),
            positions=effect.positions.get(name),
        )
        for name, each in settled.layers.items()
    }
    return replace(settled, layers=layers, moments=effect.embeddings)


def state_of(planned: Plan) -> dict[str, Any]:
    """Return what was decided by measuring as JSON, for `restored`."""
    formats = {name: format.name for name, format in planned.formats.items() if planned.recipe.allocate == "slope"}
    rates = {name: each.rate for name, each in planned.layers.items() if each.rate is not None}
    return {"formats": formats, "rates": rates, "positions": planned.positions}


def tensors_of(planned: Plan) -> dict[str, dict[str, Any]]:
    """Return the measured tensors, for `restored`."""
    layers = planned.layers.items()
    return {
        "sensitivity": {name: each.sensitivity for name, each in layers if each.sensitivity is not None},
        "moments": {name: each.H for name, each in planned.moments.items()},
    }


def restored(settled: Plan, state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]], count: int) -> Plan:
    """Return the plan with this state and these tensors, which was made with `count` tokens of text."""
    settled = settled.stored_in({name: number_format(format) for name, format in state["formats"].items()})
    moments = {name: Moments(H=H, tokens=count) for name, H in tensors["moments"].items()}
    positions = {
        name: PositionWeights(length, tuple(octaves)) for name, (length, octaves) in state["positions"].items()
    }
    effect = Effect(tensors["sensitivity"], moments, positions)
    return _completed(settled, state["rates"], effect)


def expected_work(model: Model, settled: Plan, tokens: Tensor) -> tuple[Extent | None, int]:
    """Return the work before the first layer: the extent of what is measured for a choice, or None, and tokens of the backward
    pass, or 0.

    Args:
        model, settled: Arguments of `plan`; with a mix, the choice of formats counts.
        tokens: (windows, seqlen) calibration tokens.
    """
    chooses, backward = allocates(model, settled), 0
    if chooses or _needs_gradients(model, settled):
        alone = not (chooses or _uses_outputs(model, settled))
        backward = sensitivity_windows(model, tokens, positions=alone) * tokens.shape[1]
    if not chooses:
        return None, backward
    mix = settled.recipe.mix
    points = POINTS if mix is None else sum(offer.scheme is not None for offer in mix.offers)
    return Extent.of(parts_of(model, tokens, warns=False), points=points, compares=mix is not None), backward


def allocates(model: Model, settled: Plan) -> bool:
    """Return whether bits, rates, types or formats of layers are chosen by measuring."""
    recipe, scheme = settled.recipe, settled.recipe.scheme
    layers = {layer.name for layer in model.block_layers}
    if not layers:
        return False
    if recipe.mix is not None:
        return True
    if scheme.entropy_coded:
        chosen = recipe.allocate != "uniform" and not layers <= fixed_rates(settled).keys()
        return chosen and budget_of(model, recipe) > MIN_RATE
    return recipe.allocate == "slope" or (recipe.files.block_types and scheme.measured)


def _needs_gradients(model: Model, settled: Plan) -> bool:
    return _uses_outputs(model, settled) or weighs_positions(model, settled.recipe)


def _uses_outputs(model: Model, settled: Plan) -> bool:
    """Return whether gradients by outputs of layers are used, for steps of rows or for embeddings, and not by position alone."""
    scheme = settled.recipe.scheme
    return scheme.weighs_rows or (model.embeddings is not None and scheme.calibrated)


def weighs_positions(model: Model, recipe: Recipe) -> bool:
    """Return whether tokens are to count by their position, which layers in blocks have."""
    return recipe.weighs_positions and any(block.layers for block in model.blocks)


class Effect(NamedTuple):
    """Effect of errors on the network, by layer.

    Args:
        rows: (out,) sensitivity of each row.
        embeddings: Substitutes for second moments of embeddings.
        positions: Weights of positions in a window.
    """

    rows: Mapping[str, Tensor] = {}
    embeddings: Mapping[str, Moments] = {}
    positions: Mapping[str, PositionWeights] = {}


def measured_gradients(
    model: Model, settled: Plan, tokens: Tensor, device: Device, progress: Progress = silent
) -> Sensitivity | None:
    """Measure gradients by a backward pass where something depends on them: rows, columns of embeddings, positions, or bits.

    Where positions are all that is to be measured, rank 0 does it. If they were not asked for by name and gradients cannot be
    measured, nothing is, and a warning says why.
    """
    if not (chooses := allocates(model, settled)) and not _needs_gradients(model, settled):
        return None
    asked, needed = settled.recipe.calibration.positions == "sensitivity", _uses_outputs(model, settled)
    ranks = device.ranks if needed else ONE_PROCESS
    try:
        return sensitivity(
            model,
            tokens,
            device=device.place,
            dtype=device.compute_dtype(model.dtype),
            positions=not (needed or chooses),
            ranks=ranks,
            progress=progress,
        )
    except Exception as error:  # the code of a model may raise anything
        of_us = isinstance(error, NearplaneError) and not isinstance(error, CalibrationError)
        full = is_out_of_memory(error) or is_refused(error) or isinstance(error, OSError) or "CUDA" in str(error)
        if needed or asked or of_us or full:
            raise
        if chooses and isinstance(error, CalibrationError):
            raise
        if chooses:
            why = f"as gradients could not be measured: {first_line(error)}"
            raise CalibrationError(f"{UNKNOWN_COSTS}, {why}. {INSTEAD}") from error
        log.warning("All positions in windows count alike, as gradients could not be measured: %s", first_line(error))
        return None


def effect_of_errors(model: Model, settled: Plan, measured: Sensitivity | None, tokens: int) -> Effect:
    """Return what a run takes of the gradients that were measured on so many tokens of text."""
    if measured is None:
        return Effect()
    scheme, positions = settled.recipe.scheme, dict[str, PositionWeights]()
    if weighs_positions(model, settled.recipe):
        positions = measured.positions
        if not positions and settled.recipe.calibration.positions == "sensitivity":
            raise RecipeError(f'positions is "sensitivity", but {UNPLACED}. Use "equal".')
        if not positions:
            log.warning("All positions in windows count alike: %s", UNPLACED)
    moments = _embeddings(model, measured, tokens) if scheme.calibrated else {}
    return Effect(measured.outputs if scheme.weighs_rows else {}, moments, positions)


def moments_of_embeddings(model: Model, scheme: Scheme, tokens: Tensor | None, device: Device) -> Mapping[str, Moments]:
    """Return the substitute for second moments of embeddings that `plan` measures; empty if they are not quantized."""
    if model.embeddings is None or tokens is None or not scheme.calibrated:
        return {}
    measured = sensitivity(model, tokens, device=device.place, dtype=device.compute_dtype(model.dtype))
    return _embeddings(model, measured, tokens.numel())


def _embeddings(model: Model, measured: Sensitivity, tokens: int) -> dict[str, Moments]:
    if model.embeddings is None or measured.embeddings is None:
        return {}
    return {model.embeddings.name: Moments(H=measured.embeddings, tokens=tokens)}


def check_budget(model: Model, settled: Plan) -> None:
    """Refuse layers that the format cannot hold, and a rate or size that cannot be met.

    Raises:
        RecipeError: A layer or the budget is not possible; the message names the layer or the possible range.
    """
    recipe, scheme = settled.recipe, settled.recipe.scheme
    if not (model.block_layers or scheme.entropy_coded) and (recipe.allocate == "slope" or scheme.measured):
        raise RecipeError(NOTHING_TO_CHOOSE)
    if recipe.allocate == "slope" and not (scheme.entropy_coded or recipe.files.block_types):
        if recipe.layers:
            raise RecipeError(
                "--layer sets the scheme of some layers, but --allocate slope chooses the bits of every layer. Leave out one."
            )
        usable_widths(model, recipe)
        return
    if scheme.entropy_coded:
        budget_of(model, recipe)
    check_layers(model, recipe, settled.formats)


def check_layers(model: Model, recipe: Recipe, formats: Mapping[str, NumberFormat]) -> None:
    """Raise RecipeError if a layer cannot be stored in its number format, or the readers do not load it."""
    for layer in model.layers:
        weights = Weights(formats[layer.name], recipe.inputs_of(layer.name) is not None, layer.routed)
        recipe.readers.check(layer.name, weights)
        FORMATS[str(recipe.format)].layers.check(layer.name, layer.shape, layer.kind, formats[layer.name])


def usable_widths(model: Model, recipe: Recipe) -> list[int]:
    """Return the widths that the format has for all layers; if there are none, raise the format's error."""

    def check(bits: int) -> None:
        format = recipe.scheme.stored_in(integers(bits, None)).number_format
        check_layers(model, recipe, {layer.name: format for layer in model.layers})

    usable: list[int] = []
    for bits in recipe.readers.widths:
        with suppress(RecipeError):
            check(bits)
            usable.append(bits)
    if not usable:
        check(recipe.readers.widths[0])  # raises the format's error
    return usable

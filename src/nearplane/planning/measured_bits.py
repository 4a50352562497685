"""Bits, rates and types of layers, chosen by what errors of each cost the network, which is measured before the first layer.

`allocate.py` divides the budget by the curves; `ledger.py` passes bits that one block leaves over on to the blocks after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from nearplane.formats.gguf.mixes import fitting
from nearplane.formats.table import FORMATS
from nearplane.models.model import Model
from nearplane.number_formats import TYPES, BlockType, NumberFormat
from nearplane.planning.allocate import (
    MAX_RATE,
    Curve,
    allocate,
    allocate_choices,
    allocate_widths,
    tried_rates,
    tried_widths,
)
from nearplane.planning.estimates import Losses
from nearplane.planning.joined import joined_layers
from nearplane.planning.roundings import Rounding, at_rate, offered
from nearplane.planning.size_budget import Choice, budget_of
from nearplane.recipe.block_scheme import MEASURED_TYPES
from nearplane.recipe.format_mix import Offer
from nearplane.recipe.layer_plan import Plan
from nearplane.recipe.rate_scheme import RateScheme
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.schemes import GridScheme

MOST_ABOVE = 1.5  # bits by which a rate may exceed the mean, see docs/log.md
NEAREST = 0.05  # bits between points of a curve at least: with few rows, rates end near the logarithm of their number
# function from roundings that are tried of every layer to what they cost: `estimated`, applied to the model and text of a run
Estimate = Callable[[Sequence[Rounding]], Losses]


def curves_of(model: Model, recipe: Recipe, found: Losses, rates: Callable[[str], Sequence[float]]) -> list[Curve]:
    """Return a curve for every set of layers that get the same bits.

    Args:
        model, recipe: The model to quantize, and its recipe.
        found: What roundings cost.
        rates: Function from the name of a layer to the bits per weight of these roundings.
    """
    layers = {layer.name: layer for layer in model.layers}
    first = {name: each.first for name, each in found.items()}
    curves: list[Curve] = []
    for names in joined_layers(model, recipe, first):
        stored = {layers[name].written(model.weights): math.prod(layers[name].shape) for name in names}
        columns = zip(*(zip(rates(name), found[name].losses, strict=True) for name in names), strict=True)
        points = {  # by their mean rate: those of experts at a rate differ a little
            sum(rate for rate, _ in column) / len(names): sum(loss for _, loss in column) for column in columns
        }
        points = {rate: loss for rate, loss in points.items() if rate == max(points) or max(points) - rate >= NEAREST}
        by_rate, losses = zip(*sorted(points.items()), strict=True)
        curves.append(Curve(layers=tuple(names), weights=sum(stored.values()), rates=by_rate, losses=losses))
    return curves


def fixed_rates(settled: Plan) -> dict[str, float]:
    """Return the rates of the layers for which the recipe says one, by name."""
    usual = settled.recipe.scheme.asked
    return {
        name: asked[0]
        for name, each in settled.layers.items()
        if (asked := each.scheme.asked) is not None and asked != usual
    }


def measured_rates(model: Model, settled: Plan, estimate: Estimate | None) -> dict[str, float]:
    """Return a rate for every layer, `--rate` on average, higher where errors cost more."""
    budget, scheme = budget_of(model, settled.recipe), settled.recipe.scheme
    assert isinstance(scheme, RateScheme), "other schemes have no rates"
    fixed = fixed_rates(settled)
    rates = dict.fromkeys(settled.layers, budget) | fixed
    if estimate is not None:
        found = estimate([at_rate(rate, scheme) for rate in tried_rates(budget)])
        curves = curves_of(model, settled.recipe, found, lambda name: found[name].rates)
        curves = [curve for curve in curves if not fixed.keys() & set(curve.layers)]
        # embeddings and head keep the mean
        rates |= allocate(curves, budget, min(MAX_RATE, budget + MOST_ABOVE))
    return rates


def measured_widths(model: Model, recipe: Recipe, usable: Sequence[int], estimate: Estimate) -> dict[str, NumberFormat]:
    """Return integers of some width for every layer, `--bits` on average in blocks, more where errors cost more.

    Embeddings and head get the largest width within the average.

    Args:
        model, recipe: The model, and its recipe.
        usable: Widths that the format has for all layers.
        estimate: Function that tells what roundings cost.
    """
    scheme, storage = recipe.scheme, FORMATS[str(recipe.format)].layers.scale_dtype(model.dtype)
    assert isinstance(scheme, GridScheme), "other schemes have no widths"
    tried = tried_widths(scheme.bits, usable)
    found = estimate([offered(Offer("", replace(scheme, bits=bits)), storage) for bits in tried])
    curves = curves_of(model, recipe, found, lambda _: tried)
    widths = allocate_widths(curves, scheme.bits, tried)
    ends = [layer.name for part in (model.embeddings, model.head) if part is not None for layer in part.layers]
    widths |= dict.fromkeys(ends, max(bits for bits in usable if bits <= scheme.bits))
    formats = {bits: replace(scheme, bits=bits).number_format for bits in usable}
    return {name: formats[bits] for name, bits in widths.items()}


def measured_types(model: Model, recipe: Recipe, free: Choice, estimate: Estimate) -> dict[str, BlockType]:
    """Return a type for every layer of `free`, its budget on average, larger where errors cost more."""
    rates = {TYPES[name].rate: name for name in MEASURED_TYPES}
    tried = tried_widths(free.budget, list(rates))
    columns = {layer.name: layer.shape[1] for layer in model.layers}
    names = [rates[rate] for rate in tried]
    found = estimate([offered(Offer("", free.scheme.stored_in(TYPES[name])), torch.float16) for name in names])
    curves = curves_of(model, recipe, found, lambda layer: [fitting(name, columns[layer]).rate for name in names])
    curves = [curve for curve in curves if free.layers.issuperset(curve.layers)]
    usable = [{(kind := fitting(name, columns[curve.layers[0]])).rate: kind for name in names} for curve in curves]
    picks = allocate_choices(curves, free.budget, [sorted(kinds) for kinds in usable])
    return free.ends | {
        layer: kinds[rate] for curve, kinds, rate in zip(curves, usable, picks, strict=True) for layer in curve.layers
    }

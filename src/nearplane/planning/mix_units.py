"""Units of a mix of number formats: layers that a program must load alike, with what each format takes and costs them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nearplane.errors import RecipeError
from nearplane.formats.gguf.mixes import fitting
from nearplane.formats.table import FORMATS
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.number_formats import BlockType
from nearplane.planning.estimates import Losses
from nearplane.planning.joined import joined_layers
from nearplane.planning.mix_size import offered_bytes, share_of
from nearplane.planning.roundings import fits
from nearplane.recipe.format_mix import FormatMix, Offer
from nearplane.recipe.readers import Weights
from nearplane.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Layers that get one format together.

    Args:
        layers: Their full names.
        weights: Number of their weights.
        share: Share of the tokens that a weight is multiplied with: 1, of experts those that the router sends.
        offers: Numbers of the formats of the mix that they may get, cheapest first.
        bytes: Bytes of their tensors in each of these.
        losses: KL of the network with them alone in each of these, nats per token; see `costed`.
    """

    layers: tuple[str, ...]
    weights: int
    share: float
    offers: tuple[int, ...]
    bytes: tuple[int, ...]
    losses: tuple[float, ...] = ()


def units_of(model: Model, recipe: Recipe, first: Mapping[str, str]) -> tuple[list[Unit], list[str]]:
    """Return the units with what every format takes, and the layers that no format fits.

    Args:
        model, recipe: The model and its recipe, with a mix.
        first: Name of the first layer with the same input, by name of each layer in a block.

    Raises:
        RecipeError: --layer fixes a part of a unit only.
    """
    layers = {layer.name: layer for layer in model.layers}
    units, unfit = list[Unit](), list[str]()
    for names in joined_layers(model, recipe, first):
        if inside := [name for name in names if recipe.pattern_of(name) is not None]:
            if len(inside) < len(names):
                other = next(name for name in names if name not in inside)
                raise RecipeError(
                    f"--layer sets the scheme of {inside[0]}, but not of {other}, which programs load as one. Let the pattern "
                    f"match both, or none."
                )
            continue
        if (unit := _unit(model, recipe, [layers[name] for name in names])) is None:
            unfit += names
        else:
            units.append(unit)
    return units, unfit


def costed(units: Sequence[Unit], mix: FormatMix, found: Losses) -> list[Unit]:
    """Return the units with what every format costs them, by estimates for each layer in the formats that are quantized."""
    quantized = [number for number, offer in enumerate(mix.offers) if offer.scheme is not None]
    places = {number: place for place, number in enumerate(quantized)}

    def loss(unit: Unit, number: int) -> float:
        return sum(found[name].losses[places[number]] for name in unit.layers) if number in places else 0.0

    return [replace(unit, losses=tuple(loss(unit, number) for number in unit.offers)) for unit in units]


def _unit(model: Model, recipe: Recipe, layers: Sequence[Layer]) -> Unit | None:
    """Return a unit with the formats that it may get; None if no format but the original's fits.

    Args:
        model, recipe: The model and its recipe, with a mix.
        layers: Its layers.
    """
    mix = recipe.given_mix
    stored = {layer.written(model.weights): layer for layer in layers}.values()
    options = sorted(
        (sum(offered_bytes(model, recipe, layer, offer) for layer in stored), number)
        for number, offer in enumerate(mix.offers)
        if all(_fault(recipe, layer, offer) is None for layer in layers)
    )
    if all(mix.offers[number].scheme is None for _, number in options):
        return None
    sizes, numbers = zip(*options, strict=True)
    return Unit(
        layers=tuple(layer.name for layer in layers),
        weights=sum(math.prod(layer.shape) for layer in stored),
        share=share_of(model, layers[0]) if mix.by_tokens else 1.0,
        offers=numbers,
        bytes=sizes,
    )


def _fault(recipe: Recipe, layer: Layer, offer: Offer) -> str | None:
    """Return why a layer cannot have a format, because of the program or of its shape; None: it can."""
    if offer.scheme is None:
        return None
    format = offer.scheme.number_format
    if isinstance(format, BlockType):
        format = fitting(format.name, layer.shape[1])  # what llama.cpp uses for rows that blocks do not divide
    if (reason := recipe.readers.reason(Weights(format, offer.activations != "none", layer.routed))) is not None:
        return f"{reason} ({layer.name})"
    if not fits(offer, layer.shape):
        out, columns = layer.shape
        return f"{layer.name} has {out} outputs and {columns} inputs, which {format.name} does not divide into blocks"
    try:
        FORMATS[str(recipe.format)].layers.check(layer.name, layer.shape, layer.kind, format)
    except RecipeError as error:
        return str(error)
    return None


def misfits(model: Model, recipe: Recipe) -> dict[str, tuple[int, str]]:
    """Return the formats of a mix that some layers cannot have: with the number of these layers, and why the first cannot."""
    found: dict[str, tuple[int, str]] = {}
    for layer in (layer for layer in model.block_layers if recipe.pattern_of(layer.name) is None):
        for offer in recipe.given_mix.offers:
            if (fault := _fault(recipe, layer, offer)) is not None:
                count, reason = found.get(offer.word, (0, fault))
                found[offer.word] = count + 1, reason
    return found

"""A choice of formats as a recipe: the most frequent one is the usual one, and others are named by patterns of layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from nearplane.models.model import Model
from nearplane.planning.mix_size import offered_bytes
from nearplane.planning.mix_units import Unit
from nearplane.recipe.format_mix import FormatMix, Offer
from nearplane.recipe.layer_scheme import LayerScheme
from nearplane.recipe.recipe import Recipe


def picked(mix: FormatMix, units: Sequence[Unit], picks: Sequence[int]) -> dict[str, Offer]:
    """Return the format of every layer of units, by name, given the number of the option of each unit."""
    return {
        name: mix.offers[unit.offers[pick]] for unit, pick in zip(units, picks, strict=True) for name in unit.layers
    }


def offers_by_layer(model: Model, recipe: Recipe, units: Sequence[Unit], picks: Sequence[int]) -> dict[str, Offer]:
    """Return the format of every layer that is quantized, by name."""
    chosen = picked(recipe.given_mix, units, picks)
    for layer in model.layers:
        if recipe.pattern_of(layer.name) is not None:
            inputs = recipe.inputs_of(layer.name)
            chosen[layer.name] = Offer("", recipe.scheme_of(layer.name), "none" if inputs is None else inputs.name)  # type: ignore[arg-type]
    return {name: offer for name, offer in chosen.items() if offer.scheme is not None}


def formats_of_ends(model: Model, recipe: Recipe) -> dict[str, Offer]:
    """Return the formats of embeddings and head if MLX quantizes them: the widest, as nothing measures what they cost.

    Those that --layer fixes are left out.
    """
    ends = [layer for layer in model.end_layers if recipe.pattern_of(layer.name) is None]
    if recipe.files.block_types:
        return {}  # llama.cpp has a rule of its own
    quantized = [offer for offer in recipe.given_mix.offers if offer.scheme is not None]
    return {layer.name: max(quantized, key=lambda offer: offered_bytes(model, recipe, layer, offer)) for layer in ends}


def recipe_of(
    model: Model, recipe: Recipe, units: Sequence[Unit], picks: Sequence[int], unfit: Sequence[str]
) -> Recipe:
    """Return the recipe that names the format of every layer: the most frequent as usual one, others by patterns."""
    mix = recipe.given_mix
    offers = mix.offers
    names: dict[int, list[str]] = {}
    weights: dict[int, int] = {}
    for unit, pick in zip(units, picks, strict=True):
        number = unit.offers[pick]
        names.setdefault(number, []).extend(unit.layers)
        weights[number] = weights.get(number, 0) + unit.weights
    usual = max((n for n in names if offers[n].scheme is not None), key=lambda n: weights[n], default=None)
    base = mix.first if usual is None else offers[usual]
    left = [*unfit, *(name for number, each in names.items() if offers[number].scheme is None for name in each)]
    layers = [
        LayerScheme(pattern=pattern, scheme=scheme, activations=offers[number].activations)
        for number, each in sorted(names.items())
        if number != usual and (scheme := offers[number].scheme) is not None
        for pattern in patterns_of(model, each)
    ]
    ends = [
        LayerScheme(pattern=f"^{re.escape(name)}$", scheme=offer.scheme, activations=offer.activations)
        for name, offer in formats_of_ends(model, recipe).items()
        if offer.scheme is not None
    ]
    assert base.scheme is not None, "a format of the mix is quantized"
    return replace(
        recipe,
        scheme=base.scheme,
        activations=base.activations,
        layers=(*recipe.layers, *ends, *layers),
        ignore=(*recipe.ignore, *patterns_of(model, left)),
        mix=None,
    )


def patterns_of(model: Model, names: Iterable[str]) -> list[str]:
    """Return regular expressions that match just these layers: one for all blocks in which a layer of a name is among them."""
    blocks: dict[
        tuple[str, str], dict[str, None]
    ] = {}  # numbers of blocks by name of their list and of the layer in them
    alone: list[str] = []
    for name in names:
        stack = next((stack for stack in model.stacks if name.startswith(f"{stack}.")), None)
        if stack is None:
            alone.append(f"^{re.escape(name)}$")
            continue
        number, _, inside = name[len(stack) + 1 :].partition(".")
        kind = re.sub(r"(\\\.experts\\\.)\d+(?=\\\.)", r"\1[0-9]+", re.escape(inside))
        blocks.setdefault((stack, kind), {})[number] = None
    return alone + [
        rf"^{re.escape(stack)}\.({'|'.join(numbers)})\.{kind}$" for (stack, kind), numbers in blocks.items()
    ]

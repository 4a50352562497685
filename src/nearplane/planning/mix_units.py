"""Units of a mix of number formats: layers that a program must load alike, with what each format takes and costs them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from nearplane.errors import RecipeError
from nearplane.formats.table import FORMATS
from nearplane.models.experts import by_expert
from nearplane.models.layers import Layer
from nearplane.models.model import Block, Model
from nearplane.planning.mix_probe import Losses, fits
from nearplane.planning.mix_size import offered_bytes
from nearplane.recipe.format_mix import Offer
from nearplane.recipe.readers import Weights
from nearplane.recipe.recipe import Recipe

NO_MIX = "a recipe with a mix"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Layers that get one format together.

    Args:
        layers: Their full names.
        weights: Number of their weights.
        share: Share of the tokens that a weight is multiplied with: 1, of experts those that the router sends.
        offers: Numbers of the formats of the mix that they may get, cheapest first.
        bytes: Bytes of their tensors in each of these.
        losses: KL of the network with them alone in each of these, nats per token.
    """

    layers: tuple[str, ...]
    weights: int
    share: float
    offers: tuple[int, ...]
    bytes: tuple[int, ...]
    losses: tuple[float, ...]


def units_of(model: Model, recipe: Recipe, found: Losses) -> tuple[list[Unit], list[str]]:
    """Return the units with what every format costs them, and the layers that no format fits.

    Args:
        model, recipe: The model and its recipe, with a mix.
        found: What `estimated` returns.

    Raises:
        RecipeError: --layer fixes a part of a unit only.
    """
    layers = {layer.name: layer for layer in model.layers}
    sets: dict[str, list[str]] = {}
    for block in model.blocks:
        for name in (layer.name for layer in block.layers):
            sets.setdefault(_key(model, recipe, block, layers[name], found[name][0]), []).append(name)
    units, unfit = list[Unit](), list[str]()
    for names in sets.values():
        if inside := [name for name in names if recipe.pattern_of(name) is not None]:
            if len(inside) < len(names):
                other = next(name for name in names if name not in inside)
                raise RecipeError(
                    f"--layer sets the scheme of {inside[0]}, but not of {other}, which programs load as one. Let the pattern "
                    f"match both, or none."
                )
            continue
        losses = [sum(each) for each in zip(*(found[name][1] for name in names), strict=True)]
        if (unit := _unit(model, recipe, [layers[name] for name in names], losses)) is None:
            unfit += names
        else:
            units.append(unit)
    return units, unfit


def _key(model: Model, recipe: Recipe, block: Block, layer: Layer, first: str) -> str:
    """Return a text that is the same for layers which must have one format.

    Where files hold matrices one by one, each layer is apart, and all experts of a side are together. Programs that join layers
    join those of the same input, of modules with numbers, and all experts of a block, or of the network.
    """
    apart = recipe.files.every_tensor  # as in GGUF and MLX
    if layer.routed:
        return first if apart else "experts" if recipe.readers.one_grid_for_experts else f"{block.name}.experts"
    named = next(each for each in block.layers if each.name == (layer.name if apart else first))
    stored = named.copies(model.weights)[0]  # also of blocks that share their weights
    numbered = re.match(r"(.*?)\.\d+(\.|$)", named.name.removeprefix(f"{block.name}."))
    return f"{block.name}.{numbered[1]}.*" if numbered and not apart else stored


def _unit(model: Model, recipe: Recipe, layers: Sequence[Layer], estimates: Sequence[float]) -> Unit | None:
    """Return a unit with the formats that it may get; None if no format but the original's fits.

    Args:
        model, recipe: The model and its recipe, with a mix.
        layers: Its layers.
        estimates: KL with them in each format that is quantized.
    """
    mix = recipe.mix
    assert mix is not None, NO_MIX
    offers = mix.offers
    left = iter(estimates)
    losses = [0.0 if offer.scheme is None else next(left) for offer in offers]
    stored = {layer.written(model.weights): layer for layer in layers}.values()
    options = sorted(
        (sum(offered_bytes(model, recipe, layer, offer) for layer in stored), number, losses[number])
        for number, offer in enumerate(offers)
        if all(_possible(recipe, layer, offer) for layer in layers)
    )
    if all(offers[number].scheme is None for _, number, _ in options):
        return None
    sizes, numbers, costs = zip(*options, strict=True)
    return Unit(
        layers=tuple(layer.name for layer in layers),
        weights=sum(math.prod(layer.shape) for layer in stored),
        share=share_of(model, layers) if mix.by_tokens else 1.0,
        offers=numbers,
        bytes=sizes,
        losses=costs,
    )


def _possible(recipe: Recipe, layer: Layer, offer: Offer) -> bool:
    """Return whether the program loads a layer in a format, and the format fits it."""
    if offer.scheme is None:
        return True
    weights = Weights(offer.scheme.number_format, offer.activations != "none", layer.routed)
    if not fits(offer, layer.shape) or not recipe.readers.takes(weights):
        return False
    try:
        FORMATS[str(recipe.format)].layers.check(layer.name, layer.shape, layer.kind, offer.scheme.number_format)
    except RecipeError:
        return False
    return True


def share_of(model: Model, layers: Sequence[Layer]) -> float:
    """Return the share of the tokens that reach layers: of experts, that of which the router sends to one on average."""
    if not layers[0].routed:
        return 1.0
    counts = [getattr(config, "num_experts_per_tok", None) for config in model.configs()]
    reached = min((count for count in counts if count), default=None)
    if reached is None:
        raise RecipeError("config.json does not say how many experts a token reaches. Use --weigh stored.")
    block = next(block for block in model.blocks if layers[0].name in {layer.name for layer in block.layers})
    return float(min(1.0, reached / len(by_expert([layer for layer in block.layers if layer.routed]))))

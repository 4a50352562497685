"""Which layers of a GGUF get types by measuring, and what a number of bits or a size leaves them.

The folder is known before the run, to the byte but for the record, which counts with the most that it can take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from nearplane.errors import RecipeError
from nearplane.formats.beside import CONFIG, names_copied
from nearplane.formats.container import Container
from nearplane.formats.gguf.gguf_header import ALIGNMENT, FILE
from nearplane.formats.gguf.mixes import fitting
from nearplane.lattice.number_formats import TYPES
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.planning.record_size import longest_record
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.schemes import CHOSEN, BlockScheme
from nearplane.recipe.sizes import bytes_in
from nearplane.record.record import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """The layers whose types are chosen by measuring.

    Args:
        layers: their names, of those in blocks of the network.
        budget: bits per weight that they get together, steps and all.
        ends: types of embeddings that follow from the budget, by name.
    """

    layers: frozenset[str]
    budget: float
    ends: dict[str, str] = field(default_factory=dict)


def free_layers(model: Model, asked: Recipe, recipe: Recipe, container: Container, record: RunRecord) -> Free | None:
    """Return what is free where a recipe leaves types to measuring; None where it does not.

    Args:
        model: to be quantized.
        asked: the recipe as it was given: it names types of some layers, or none.
        recipe: with a type for every layer.
        container: of `recipe`, not begun.
        record: as it is when the run begins.

    Raises:
        RecipeError: layers cannot be as small, or as large, as a size asks for.
    """
    scheme = asked.scheme
    if not isinstance(scheme, BlockScheme) or not scheme.measured:
        return None
    free = [layer for block in model.blocks for layer in block.layers if _is_free(asked, layer)]
    names = frozenset(layer.name for layer in free)
    if scheme.size is None:
        return Free(layers=names, budget=float(str(scheme.grid)))
    ends = []
    if model.embeddings is not None and not model.tied and scheme.embeddings == "auto":
        ends = [layer for layer in model.embeddings.layers if _is_free(asked, layer)]
    limit, weights = bytes_in(scheme.size), sum(math.prod(layer.shape) for layer in free)
    rest = folder_bytes(model, container, record) + ALIGNMENT * len(free)
    for layer in (*free, *ends):
        own = recipe.scheme_of(layer.name)
        assert isinstance(own, BlockScheme), "of a GGUF"
        rest -= _bytes(layer, own.number_format.name)
    for kind in reversed(CHOSEN):  # of embeddings that are no head: that of most layers, as llama.cpp has it
        types = {layer.name: _fitting(kind, layer) for layer in ends}
        others = rest + sum(_bytes(layer, types[layer.name]) for layer in ends)
        budget = 8 * (limit - others) / max(1, weights)
        if budget >= TYPES[kind].rate:
            break
    low, high = (
        others + sum(_bytes(layer, _fitting(name, layer)) for layer in free) for name in (CHOSEN[0], CHOSEN[-1])
    )
    if not weights or not low <= limit <= high:
        raise RecipeError(
            f"--size {scheme.size} is {limit:,} bytes, of which about {others:,} are not layers whose type is free: {budget:.2f} "
            f"bits are left for each of their {weights:,} weights. Ask for {low:,} to {high:,} bytes ({CHOSEN[0]} to {CHOSEN[-1]})."
        )
    return Free(layers=names, budget=budget, ends=types)


def folder_bytes(model: Model, container: Container, record: RunRecord) -> int:
    """Return the bytes of the folder at most, of layers in the types of the container's config."""
    names = [CONFIG, FILE, *names_copied(model.folder, trust_remote_code=model.trust_remote_code)]
    return container.size_with() + longest_record(model, replace(record, files=dict.fromkeys(names, 64 * "0")))


def _is_free(asked: Recipe, layer: Layer) -> bool:
    scheme = asked.scheme_of(layer.name)
    return isinstance(scheme, BlockScheme) and scheme.measured


def _fitting(name: str, layer: Layer) -> str:
    """Return a type, or what takes its place where it does not divide the inputs of a layer."""
    return fitting(name, layer.shape[1]).name


def _bytes(layer: Layer, name: str) -> int:
    """Return the bytes of a layer in a type."""
    return layer.shape[0] * (layer.shape[1] // TYPES[name].columns) * TYPES[name].bytes

"""What a recipe means for a model: whether it can be had, and what config.json will say of the quantized weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from math import gcd
from pathlib import Path
from typing import Any

from nearplane.calibration.stages import FirstLook, try_blocks
from nearplane.calibration.windows import Windows
from nearplane.errors import RecipeError
from nearplane.formats.gguf.mixes import role_of, type_of
from nearplane.formats.gptq import FUSED
from nearplane.formats.layer_format import Quantized
from nearplane.formats.table import FORMATS
from nearplane.lattice.number_formats import NumberFormat, number_format
from nearplane.loading.rehearsal import check_loads
from nearplane.models.experts import ExpertLayer
from nearplane.models.ignored import left_dense, merged_experts, refuse_unmatched, refuse_unsupported
from nearplane.models.kinds import has_head, has_two_stacks
from nearplane.models.layers import Layer
from nearplane.models.model import Model, open_model
from nearplane.planning.plan import check_budget
from nearplane.recipe.recipe import LayerScheme, Recipe
from nearplane.recipe.schemes import BlockScheme
from nearplane.system.device import Device

logger = logging.getLogger("nearplane")


def open_original(source: str | Path, recipe: Recipe, *, trust_remote_code: bool) -> Model:
    """Open the model that a recipe quantizes, or that a checkpoint with this recipe was made of; see `open_model`."""
    embeddings, head = recipe.scheme.ends
    return open_model(
        str(source), trust_remote_code=trust_remote_code, ignore=recipe.ignore, embeddings=embeddings, head=head
    )


def settled(model: Model, recipe: Recipe) -> Recipe:
    """Return the recipe with what it leaves to the model: the group size of auto, and the type of blocks of every layer.

    Raises:
        RecipeError: blocks divide the inputs of a layer in no way.
    """
    recipe = recipe.grouped(layer.shape[1] for layer in model.layers)
    config = model.config.to_dict()
    places = {layer.name: index for index, block in enumerate(model.blocks) for layer in block.layers}
    ends = {
        layer.name: role
        for part, role in ((model.embeddings, "tied" if model.tied else "embeddings"), (model.head, "head"))
        if part is not None
        for layer in part.layers
    }
    own = {}
    for layer in model.layers:
        scheme = recipe.scheme_of(layer.name)
        if not isinstance(scheme, BlockScheme):
            continue
        place, columns = places.get(layer.name, 0), layer.shape[1]
        role = ends.get(layer.name) or role_of(layer.name)
        named = scheme.number_format.name if scheme.measured else str(scheme.grid)
        if layer.name in ends and scheme.embeddings != "auto":
            named = scheme.embeddings
        if named == scheme.embeddings:
            role = "embeddings"  # of this very type
        kind = type_of(named, role, place, columns, config)
        if columns % kind.columns:
            raise RecipeError(
                f"{layer.name} has {columns} inputs, which blocks of {kind.columns} do not divide: llama.cpp leaves such layers "
                f"in F16. Leave it as it is with --ignore {layer.name.rpartition('.')[2]}."
            )
        if kind.name != scheme.grid:
            own[layer.name] = kind.name
    return with_types(model, recipe, own)


def with_types(model: Model, recipe: Recipe, types: Mapping[str, str | None]) -> Recipe:
    """Return the recipe with types of blocks, by layer, in place of what it says of these layers; None: as it says.

    The same matrix of all experts of a block gets one pattern where it gets one type: there are thousands.
    """
    sets: dict[str, list[str]] = {}
    for layer in model.layers:
        pattern = re.escape(layer.name)
        if isinstance(layer, ExpertLayer):
            head, _, tail = layer.name.rpartition(f".{layer.expert}.")
            pattern = rf"{re.escape(head)}\.[0-9]+\.{re.escape(tail)}"
        sets.setdefault(f"^{pattern}$", []).append(layer.name)
    own = []
    for pattern, names in sets.items():
        asked = {name: (types.get(name), recipe.scheme_of(name)) for name in names}
        if len(set(asked.values())) == 1:
            asked = {pattern: asked[names[0]]}
        else:
            asked = {f"^{re.escape(name)}$": both for name, both in asked.items()}
        own += [
            LayerScheme(pattern=each, scheme=scheme.storing(number_format(name)))
            for each, (name, scheme) in asked.items()
            if scheme is not None and name is not None
        ]
    return replace(recipe, layers=(*own, *recipe.layers))


def check_request(model: Model, recipe: Recipe) -> None:
    """Refuse what cannot work before any work starts.

    Raises:
        RecipeError: names the layer and the way out.
    """
    refuse_unmatched(model, recipe.ignore)
    refuse_unmatched(model, [own.pattern for own in recipe.layers], "--layer")
    refuse_unsupported(model)
    if not has_head(model.network) and not recipe.files.any_network:
        raise RecipeError(
            f"{type(model.network).__name__} is an encoder, and readers of {recipe.format} take language models alone. Use "
            f"--format compressed-tensors, or --rate 4, which nearplane.load reads."
        )
    stacks = f"{type(model.network).__name__} has an encoder and a decoder"
    if has_two_stacks(model.network) and not recipe.files.any_network:
        raise RecipeError(
            f"{stacks}, and readers of {recipe.format} take one stack of blocks. Use --format compressed-tensors, or --rate 4, "
            f"which nearplane.load reads."
        )
    if has_two_stacks(model.network) and any(recipe.scheme.ends):
        raise RecipeError(
            f"{stacks}, of which embeddings and head stay as they are so far. Leave out --include-embeddings and --include-head."
        )
    layers = model.layers
    for layer in layers:
        scheme = recipe.scheme_of(layer.name)
        group_size = getattr(scheme, "group_size", None)
        if group_size is not None and layer.shape[1] % group_size:
            raise RecipeError(
                f"{layer.name} has {layer.shape[1]} inputs, not a multiple of --group-size {group_size}. "
                f"The largest that divides all layers is {gcd(*(layer.shape[1] for layer in layers))}; none gives one step a row; "
                f"--ignore leaves a layer out."
            )
    check_budget(model, recipe)
    for path, names in _fused_apart(model, recipe).items():
        logger.warning(
            f"{' and '.join(names)} of {path} have different grids: vLLM and SGLang, which make one layer of them, do not load "
            f"that."
        )


def _fused_apart(model: Model, recipe: Recipe) -> dict[str, list[str]]:
    """Return layers that runtimes fuse and that have grids of their own, by where they are; the first place of all."""
    together: dict[tuple[str, str], dict[str, object]] = {}
    for layer in model.layers if recipe.layers and not recipe.files.for_llama_cpp else ():
        path, _, last = layer.name.rpartition(".")
        if last in FUSED:
            together.setdefault((path, FUSED[last]), {})[last] = recipe.scheme_of(layer.name).number_format
    apart = [(path, list(own)) for (path, _), own in together.items() if len(set(own.values())) > 1]
    return dict(apart[:1])


def rehearse(model: Model, recipe: Recipe, windows: Windows, device: Device) -> dict[str, FirstLook]:
    """Refuse what would be found out late: blocks that cannot be run one by one, and files that transformers would not load.

    Returns:
        How a window ran through one block of each kind, by its name; see `try_blocks`.

    Raises:
        ModelError, RecipeError: names the block, or a layer and a way that works.
    """
    looks = {} if windows.fitted is None else try_blocks(model, windows.fitted, device)
    if recipe.files.by_gptqmodel and (recipe.layers or recipe.allocate == "slope"):
        logger.warning(
            "Layers with grids of their own in GPTQ are read by GPTQModel, vLLM and SGLang, not by transformers alone."
        )
    check_loads(model, recipe, lambda recipe, layers: quantization_config(model, recipe, layers=layers))
    return looks


def quantization_config(
    model: Model, recipe: Recipe, widths: Mapping[str, int] | None = None, *, layers: Sequence[Layer] | None = None
) -> dict[str, Any]:
    """Return what config.json will say of the quantized weights; `layers` are those quantized, if not all of the model."""
    layers = model.layers if layers is None else layers
    grids: dict[str, NumberFormat] = {}
    for layer in layers:
        grids[layer.name] = recipe.scheme_of(layer.name).with_bits((widths or {}).get(layer.name)).number_format
    own: dict[str, NumberFormat] = {}
    if widths or len(set(grids.values())) > 1:  # by both names, where they differ
        own = grids | {layer.written(model.weights): grids[layer.name] for layer in layers}
    network = Quantized(
        scheme=recipe.scheme,
        quantized=[layer.name for layer in layers],
        ignore=left_dense(model, layers),
        grids=own,
        experts=merged_experts(model, layers),
        routed={name for layer in layers if layer.routed for name in (layer.name, layer.written(model.weights))},
        layers={  # what is put together from several tensors is refused later, see `loading/rehearsal.py`
            layer.written(model.weights): grids[layer.name] for layer in layers if layer.stored_alone(model.weights)
        },
        embeddings=recipe.scheme.dense_ends,
        pre=recipe.pre,
        version=version("nearplane"),
    )
    return FORMATS[str(recipe.format)].config.describe(network)

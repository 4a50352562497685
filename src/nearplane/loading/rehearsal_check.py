"""Refuse, before a run begins, what transformers would not load when it is done."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nearplane.errors import RecipeError
from nearplane.formats.layer_format import GridFormat
from nearplane.formats.table import FORMATS
from nearplane.lattice.number_formats import NumberFormat
from nearplane.loading.gptq_rules import EXPERTS_BY_GPTQMODEL, GPTQMODEL_ALONE
from nearplane.loading.rehearsal import Fault, faults
from nearplane.models.ignored import pattern_of
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.recipe.recipe import Recipe
from nearplane.system.safetensors_files import NAMES

Configure = Callable[[Recipe, Sequence[Layer]], dict[str, Any]]  # quantization_config where these layers are quantized
DTYPES = {name: dtype for dtype, name in NAMES.items()}
logger = logging.getLogger("nearplane")


def check_loads(model: Model, recipe: Recipe, configure: Configure) -> None:
    """Load the tensors that will be written, without contents, as their reader does.

    Raises:
        RecipeError: something would not load; names a layer, what its reader does not find or take, and what to do.
    """
    if merged := [layer for layer in model.layers if not layer.stored_alone(model.weights)]:
        patterns = " ".join(dict.fromkeys(f"'{_pattern(model, layer)}'" for layer in merged))
        raise RecipeError(
            f"{merged[0].name} cannot be written: the checkpoint has no tensor for it alone, transformers makes its weight of "
            f"others. Leave it and its like as they are with --ignore {patterns}."
        )
    if not isinstance(FORMATS[str(recipe.format)].layers, GridFormat):
        return  # transformers has no reader of it
    _refuse_unlike_experts(model, recipe)
    layers = model.layers
    if recipe.files.by_gptqmodel and any(layer.routed for layer in layers):
        _refuse_experts_of_others(model)
        logger.warning(
            "Experts in GPTQ are read by GPTQModel, under the names that vLLM and SGLang read; transformers alone stops."
        )
        layers = [layer for layer in layers if not layer.routed]
    found = attempt(model, recipe, configure, layers) if layers else []
    if found and _read_by_gptqmodel(model, recipe, found):
        logger.warning(
            f"transformers does not load {model.config.model_type} from {recipe.format} ({found[0].why}); GPTQModel.load does."
        )
        return
    if not found:
        return
    first = _blamed(found[0], layers) or layers[0]
    raise RecipeError(
        f"{first.name}: transformers would not load this {model.network.config.model_type} from {recipe.format}: "
        f"{_called(found[0], first)}. {way_out(model, recipe, layers, found)}"
    )


def _refuse_experts_of_others(model: Model) -> None:
    """Refuse experts in GPTQ where gptqmodel, which has modules for them, does not read those of a model of this type.

    Raises:
        RecipeError: names one of them, or a layer that gptqmodel leaves as it is.
    """
    kind = model.config.model_type
    left = EXPERTS_BY_GPTQMODEL.get(kind)
    if left is None:
        first = next(layer for layer in model.layers if layer.routed)
        raise RecipeError(
            f"{first.name} is one of several experts in one parameter, which transformers does not read from GPTQ, and of "
            f"{kind} GPTQModel does not either. Use --format compressed-tensors if its reader takes them, or --rate, which "
            f"nearplane.load reads, or leave them as they are with --ignore 'experts'."
        )
    found = {pattern: layer.name for pattern in left for layer in model.layers if re.search(pattern, layer.name)}
    if found:
        patterns = " ".join(f"'{pattern}'" for pattern in found)
        raise RecipeError(
            f"{next(iter(found.values()))} stays as it is in GPTQModel, which reads the experts of {kind} from GPTQ. Leave out "
            f"what does with --ignore {patterns}."
        )


def _refuse_unlike_experts(model: Model, recipe: Recipe) -> None:
    """Refuse experts with grids of their own, where those of all blocks are decoded by one scheme.

    Raises:
        RecipeError: names two of them.
    """
    first: dict[NumberFormat, str] = {}
    for layer in model.layers if recipe.files.one_grid_for_experts else ():
        if layer.routed:
            first.setdefault(recipe.scheme_of(layer.name).number_format, layer.name)
    if len(first) > 1:
        (one, name), (other, second) = list(first.items())[:2]
        raise RecipeError(
            f"{second} is to have {other.bits} bits in groups of {other.group or 'a row'}, {name} {one.bits} in groups of "
            f"{one.group or 'a row'}: transformers decodes the experts of all blocks alike. Give them one grid, as "
            f"with --layer 'experts=bits:4', or use --rate {one.bits}, which nearplane.load reads."
        )


def attempt(model: Model, recipe: Recipe, configure: Configure, layers: Sequence[Layer]) -> list[Fault]:
    """Return what would not load if these layers were quantized."""
    return faults(model, configure(recipe, layers), tensors_of(model, recipe, layers))


def _read_by_gptqmodel(model: Model, recipe: Recipe, found: Sequence[Fault]) -> bool:
    """Return whether GPTQ's own program reads what transformers does not."""
    known = model.config.model_type in GPTQMODEL_ALONE
    return recipe.files.by_gptqmodel and known and all(fault.late for fault in found)


def tensors_of(model: Model, recipe: Recipe, layers: Sequence[Layer]) -> dict[str, Tensor]:
    """Return all tensors of the checkpoint that will be written, on the meta device."""
    quantized = {name for layer in layers for name in layer.copies(model.weights)}
    reader = model.reader
    tensors = {
        name: torch.empty(reader.shape(name), dtype=DTYPES.get(reader.dtype(name), torch.uint8), device="meta")
        for name in reader.names()
        if name not in quantized
    }
    layout = FORMATS[str(recipe.format)].layers
    assert isinstance(layout, GridFormat), "shapes of entropy-coded layers are not known before they are solved"
    for layer in layers:
        format = recipe.scheme_of(layer.name).number_format
        tensors |= layout.empty(layer.written(model.weights), layer.shape, format, model.dtype)
    return tensors


def way_out(model: Model, recipe: Recipe, layers: Sequence[Layer], found: Sequence[Fault]) -> str:
    """Return what to do about faults: leave the layers that they name as they are, or choose something else for all."""
    patterns = dict.fromkeys(_pattern(model, layer) for fault in found if (layer := _blamed(fault, layers)))
    listed = " ".join(f"'{pattern}'" for pattern in patterns)
    rest = f"ry another --format, or use --rate {recipe.scheme.number_format.bits}, which nearplane.load reads."
    return f"Leave out what does not load with --ignore {listed}, t{rest}" if patterns else f"T{rest}"


def _pattern(model: Model, layer: Layer) -> str:
    """Return a pattern for --ignore of a layer and those in its place in other blocks; of experts for all of them."""
    block = next((block.name for block in model.blocks if layer in block.layers), "")
    if layer.routed:
        return f"{pattern_of(block, layer.parameter.rpartition('.')[0]).removesuffix('$')}\\b"
    return pattern_of(block, layer.name)


def _blamed(fault: Fault, layers: Sequence[Layer]) -> Layer | None:
    """Return the layer that a fault is about, of experts the first in the module that is."""
    places = ((layer, layer.name if not layer.routed else layer.parameter.rpartition(".")[0]) for layer in layers)
    return next((layer for layer, place in places if fault.place in (layer.name, place)), None)


def _called(fault: Fault, layer: Layer) -> str:
    return f"{fault.place}: {fault.why}" if fault.place and fault.place != layer.name else fault.why

"""Loading what a run is going to write, before it is written: transformers' own loader on tensors without contents.

What would not load when the run is done is refused before it begins.

The network is built on the meta device, the reader of the format puts its layers into it, and every tensor that will be written,
as shape and dtype alone, goes through the renaming and merging that transformers has for the model. What does not find its place,
what finds none, and what fails on the way is a `Fault`. Nothing is read from the disk.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from dataclasses import dataclass
from textwrap import shorten
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.initialization import guard_torch_init_functions
from transformers.modeling_utils import LoadStateDictConfig
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AutoHfQuantizer

from nearplane.errors import RecipeError, first_line
from nearplane.formats.layer_format import GridFormat
from nearplane.formats.table import FORMATS
from nearplane.lattice.number_formats import NumberFormat
from nearplane.loading.gptq_rules import EXPERTS_BY_GPTQMODEL, GPTQMODEL_ALONE, Described, GPTQByRule
from nearplane.models.ignored import pattern_of
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.recipe.recipe import Recipe
from nearplane.system.safetensors_files import NAMES

Configure = Callable[[Recipe, Sequence[Layer]], dict[str, Any]]  # quantization_config where these layers are quantized
DTYPES = {name: dtype for dtype, name in NAMES.items()}
SAYS_SO = ("transformers", "compressed_tensors")  # loggers that are quiet meanwhile: what they would say is returned
log = logging.getLogger("nearplane")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that would not load.

    Args:
        place: name of a module in the network; "" where no place is to blame.
        why: what is wrong with it, a clause.
        late: whether all tensors have found their places, and what fails comes after: a program that reads them with a loader of
            its own is not stopped by it.
    """

    place: str
    why: str
    late: bool = False


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
        log.warning(
            "Experts in GPTQ are read by GPTQModel, under the names that vLLM and SGLang read; transformers alone stops."
        )
        layers = [layer for layer in layers if not layer.routed]
    found = faults(model, recipe, configure, layers) if layers else []
    if not found:
        return
    why = found[0].why
    known_to_gptqmodel = recipe.files.by_gptqmodel and model.config.model_type in GPTQMODEL_ALONE
    if known_to_gptqmodel and all(fault.late for fault in found):
        log.warning(
            f"transformers does not load {model.config.model_type} from {recipe.format} ({why}); GPTQModel.load does."
        )
        return
    first = _blamed(found[0], layers) or layers[0]
    place = f"{found[0].place}: " if found[0].place not in ("", first.name) else ""
    raise RecipeError(
        f"{first.name}: transformers would not load this {model.network.config.model_type} from {recipe.format}: {place}{why}. "
        f"{_way_out(model, recipe, layers, found)}"
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


def _way_out(model: Model, recipe: Recipe, layers: Sequence[Layer], found: Sequence[Fault]) -> str:
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


def faults(model: Model, recipe: Recipe, configure: Configure, layers: Sequence[Layer]) -> list[Fault]:
    """Return what transformers would not load of the original if these layers of it were quantized, on grids."""
    config, tensors = configure(recipe, layers), tensors_of(model, recipe, layers)
    shared = {id(part): part for part in model.configs()}
    network: PreTrainedModel = deepcopy(model.network, dict(shared))
    with quiet():
        try:
            if config["quant_method"] == "gptq":
                reader: HfQuantizer = GPTQByRule(Described(config), pre_quantized=True)
            else:
                reader = AutoHfQuantizer.from_config(deepcopy(config), pre_quantized=True)
            reader.validate_environment(device_map=None, weights_only=True)
            reader.preprocess_model(model=network, dtype=model.dtype, device_map=None, checkpoint_files=None)
            found = list(_load(model, network, reader, tensors))
        except Exception as error:  # of compressed-tensors and transformers, which raise what they like
            return [Fault(place="", why=shorten(first_line(error), 160))]
        return found + list(_initialised(network))


def _load(
    model: Model, network: PreTrainedModel, reader: HfQuantizer, tensors: Mapping[str, Tensor]
) -> Iterator[Fault]:
    """Put tensors into a network and say what did not fit."""
    plan = LoadStateDictConfig(
        device_map={"": torch.device("meta")},
        dtype=model.dtype,
        hf_quantizer=reader,
        weight_mapping=get_model_conversion_mapping(network, None, reader),
    )
    found, _ = convert_and_load_state_dict_in_model(network, dict(tensors), plan)
    network.mark_tied_weights_as_initialized(found)
    network._adjust_missing_and_unexpected_keys(found)
    for name, why in found.conversion_errors.items():
        last = [line for line in why.splitlines() if line.strip()]
        yield Fault(place=_module(name), why=f"its tensors are not put together ({last[-2] if len(last) > 1 else why})")
    for name, shape, wanted in sorted(found.mismatched_keys):
        yield Fault(place=_module(name), why=f"{name} is {tuple(shape)}, {tuple(wanted)} is expected")
    tied = network.all_tied_weights_keys
    for name in sorted(found.missing_keys):
        if name not in tied and not model.weights.lacks(name) and name not in found.conversion_errors:
            yield Fault(place=_module(name), why=f"it looks for {name}, which no file has")
    for name in sorted(found.unexpected_keys & tensors.keys()):
        if name not in model.reader.names():
            yield Fault(place=_module(name), why=f"it has no place for {name}")


def _initialised(network: PreTrainedModel) -> Iterator[Fault]:
    """Let every module set what was not loaded, as the loader does at the end, and say which quantized layers it misses.

    Some set weights of the layers in them, which quantized layers do not have.
    """
    names = {module: name for name, module in network.named_modules()}

    def walk(module: nn.Module, owner: PreTrainedModel) -> Iterator[Fault]:
        for child in module.children():
            yield from walk(child, child if isinstance(child, PreTrainedModel) else owner)
        try:
            owner._initialize_weights(module, network.is_custom_code())
        except AttributeError as error:
            *_, (frame, _) = walk_tb(error.__traceback__)
            if (missing := frame.f_locals.get("self")) in names:
                yield Fault(
                    place=names[missing], why=f"{type(module).__name__} sets its weight, which is packed", late=True
                )
        except Exception:  # of code that looks into tensors, which have no contents here
            return

    with torch.no_grad(), guard_torch_init_functions():
        yield from walk(network, network)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings and progress bars of the loaders from the terminal: what they would say is returned."""
    before = [(logger, logger.level) for logger in map(logging.getLogger, SAYS_SO)]
    try:
        for logger, _ in before:
            logger.setLevel(logging.CRITICAL)
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in before:
            logger.setLevel(level)

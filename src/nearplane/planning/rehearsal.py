"""Rehearsal: loading an empty copy of the checkpoint by transformers' own loader, before the run.

A checkpoint that could not be loaded is refused before any work. The network is built on the meta device and the reader
of the format inserts its layers. Every tensor that will be written, as shape and dtype alone, goes through
transformers' renaming and merging for the model. A tensor without place, a place without tensor, and any error is a
`Fault`. No file is read.
"""

from __future__ import annotations

import io
import logging
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
from nearplane.formats.layer_format import GridFormat, LayerFormat
from nearplane.formats.table import FORMATS, format_of
from nearplane.models.ignored import merged_experts, pattern_of
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.number_formats import NumberFormat
from nearplane.planning.gptq_rules import GPTQMODEL_ONLY_TYPES, RULES, Described, check_experts
from nearplane.recipe.layer_plan import Plan
from nearplane.recipe.rate_scheme import MAX_RATE
from nearplane.recipe.readers import loads_experts
from nearplane.recipe.recipe import Recipe
from nearplane.system.safetensors_files import DTYPE_NAMES

Configure = Callable[[Sequence[Layer]], dict[str, Any]]  # quantization_config for these quantized layers
EIGHT_BITS = 8  # floats, which transformers passes on as they are if the file has no steps for them
_READERS = "--runtime nearplane, or --runtime vllm if vLLM has this type of model: they read the files by themselves"
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
SILENCED_LOGGERS = ("transformers", "compressed_tensors")  # their messages are returned as faults
log = logging.getLogger("nearplane")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One reason why the checkpoint would not load.

    Args:
        place: Name of a module in the network; "" if the fault concerns no module.
        why: Description of the fault, as a clause.
        late: Whether the fault comes after all tensors have found their places; a program with its own loader is not
            affected by it.
    """

    place: str
    why: str
    late: bool = False


def check_loads(model: Model, plan: Plan, configure: Configure) -> None:
    """Load the tensors that will be written, without contents, as their reader does.

    Raises:
        RecipeError: The checkpoint would not load; the message names a layer, the fault and a remedy.
    """
    recipe = plan.recipe
    check_readers(model, plan)
    if not isinstance(FORMATS[str(recipe.format)].layers, GridFormat) or not recipe.readers.by_transformers:
        return  # transformers has no reader of this format, or need not read it
    layers = model.layers
    if not loads_experts("transformers", recipe.format) and any(layer.routed for layer in layers):
        log.warning(
            "Experts in GPTQ have the names that vLLM and SGLang read. GPTQModel reads them; transformers alone does not."
        )
        layers = [layer for layer in layers if not layer.routed]
    _refuse_merged(model, plan, layers)
    all_faults = faults(model, plan, configure, layers) if layers else []
    if not all_faults:
        return
    why = all_faults[0].why
    known_to_gptqmodel = recipe.readers.one_grid and model.config.model_type in GPTQMODEL_ONLY_TYPES
    if known_to_gptqmodel and all(fault.late for fault in all_faults):
        log.warning(
            f"transformers does not load {model.config.model_type} from {recipe.format} ({why}), but GPTQModel.load does."
        )
        return
    layer = _faulty_layer(all_faults[0], layers) or layers[0]
    place = f"{all_faults[0].place}: " if all_faults[0].place not in ("", layer.name) else ""
    raise RecipeError(
        f"{layer.name}: transformers would not load this {model.network.config.model_type} from {recipe.format}: {place}{why}. "
        f"{_remedy(model, recipe, layers, all_faults)}"
    )


def check_readers(model: Model, plan: Plan) -> None:
    """Refuse layers and types of models that the readers of a format are known not to load.

    Raises:
        RecipeError: The message names a layer and a remedy.
    """
    if merged := [layer for layer in model.layers if not layer.stored_alone(model.weights)]:
        patterns = " ".join(dict.fromkeys(f"'{_pattern(model, layer)}'" for layer in merged))
        raise RecipeError(
            f"{merged[0].name} cannot be written: the files have no tensor for this layer, whose weight transformers computes "
            f"from others. Leave such layers unquantized with --ignore {patterns}."
        )
    readers = plan.recipe.readers
    for program in readers.programs:
        if program.model_types and model.config.model_type not in program.model_types:
            raise RecipeError(
                f"{model.layers[0].name}: {program.title} was not tried with models of type {model.config.model_type}, but "
                f"with {', '.join(program.model_types)}. Use another --format."
            )
    _refuse_unlike_experts(model, plan)
    if "gptqmodel" in readers.runtimes and any(layer.routed for layer in model.layers):
        check_experts(model)


def _refuse_unlike_experts(model: Model, plan: Plan) -> None:
    """Refuse experts with different grids if the reader decodes all by one, and in MLX also some that stay unquantized.

    Raises:
        RecipeError: Two experts differ; the message names them.
    """
    recipe, first = plan.recipe, dict[NumberFormat, str]()
    for layer in model.layers if recipe.readers.one_grid_for_experts else ():
        if layer.routed:
            first.setdefault(plan.layers[layer.name].number_format, layer.name)
    if len(first) > 1:
        (one, name), (other, second) = list(first.items())[:2]
        raise RecipeError(
            f"{second} has the number format {other.name}, but {name} has {one.name}. Readers of {recipe.format} take one grid "
            f"for the experts of all blocks. Use one, for example with --layer 'experts=bits:4', or --format compressed-tensors "
            f"with --runtime nearplane or vllm, which take one a block."
        )
    left = {part for name in model.ignored for part in (name, name.rpartition(".")[0].rpartition(".")[0])}
    whole = [program.title for program in recipe.readers.programs if program.all_experts]
    if whole and first and (dense := sorted(left & model.stacked())):
        raise RecipeError(
            f"The experts in {dense[0]} are left unquantized, wholly or in part, but {next(iter(first.values()))} is not: "
            f"{whole[0]} would not load this. Leave all experts unquantized with --ignore experts, or none."
        )


def tensors_of(model: Model, plan: Plan, layers: Sequence[Layer], layout: LayerFormat) -> dict[str, Tensor]:
    """Return all tensors of the checkpoint that will be written, on the meta device."""
    quantized = {name for layer in layers for name in layer.copies(model.weights)}
    reader = model.reader
    tensors = {
        name: torch.empty(reader.shape(name), dtype=DTYPES.get(reader.dtype(name), torch.uint8), device="meta")
        for name in reader.names()
        if name not in quantized
    }
    assert isinstance(layout, GridFormat), "the shapes of entropy-coded layers are known only after solving"
    for layer in layers:
        format = plan.layers[layer.name].number_format
        tensors |= layout.empty(layer.written(model.weights), layer.shape, format, model.dtype)
    return tensors


def _refuse_merged(model: Model, plan: Plan, layers: Sequence[Layer]) -> None:
    """Refuse quantized experts beside other weights that transformers merges, and are not: it decodes both by one scheme.

    Raises:
        RecipeError: There are both; the message names one of each.
    """
    experts = [layer for layer in layers if layer.routed and plan.layers[layer.name].number_format.bits < EIGHT_BITS]
    if plan.recipe.format != "compressed-tensors" or not experts or not (left := merged_experts(model, layers)):
        return
    raise RecipeError(
        f"{experts[0].name}: transformers merges experts, and also what it makes {left[0]} of, and decodes either both or none "
        f"of them. Leave experts unquantized with --ignore '{_pattern(model, experts[0])}', or use {_READERS}."
    )


def _remedy(model: Model, recipe: Recipe, layers: Sequence[Layer], all_faults: Sequence[Fault]) -> str:
    """Return a remedy for faults: leave the named layers unquantized, or choose another format for all."""
    patterns = dict.fromkeys(_pattern(model, layer) for fault in all_faults if (layer := _faulty_layer(fault, layers)))
    listed = " ".join(f"'{pattern}'" for pattern in patterns)
    others = f"se another --format, --rate {min(recipe.scheme.number_format.bits, MAX_RATE)}, or {_READERS}."
    return f"Leave these layers unquantized with --ignore {listed}, or u{others}" if patterns else f"U{others}"


def _pattern(model: Model, layer: Layer) -> str:
    """Return a pattern for --ignore that matches a layer in every block; for an expert, all experts."""
    block = next((block.name for block in model.blocks if layer in block.layers), "")
    if layer.routed:
        return f"{pattern_of(block, layer.parameter.rpartition('.')[0]).removesuffix('$')}\\b"
    return pattern_of(block, layer.name)


def _faulty_layer(fault: Fault, layers: Sequence[Layer]) -> Layer | None:
    """Return the layer of a fault, or the first expert of its module; None if there is none."""
    places = ((layer, layer.name if not layer.routed else layer.parameter.rpartition(".")[0]) for layer in layers)
    return next((layer for layer, place in places if fault.place in (layer.name, place)), None)


def faults(model: Model, plan: Plan, configure: Configure, layers: Sequence[Layer]) -> list[Fault]:
    """Return the faults of loading the original model with these layers quantized on grids."""
    config = configure(layers)
    tensors = tensors_of(model, plan, layers, format_of(config).layers)
    shared = {id(part): part for part in model.configs()}
    network: PreTrainedModel = deepcopy(model.network, dict(shared))
    with quiet():
        try:
            if (rule := RULES.get(config["quant_method"])) is not None:
                reader: HfQuantizer = rule(Described(config), pre_quantized=True)
            else:
                reader = AutoHfQuantizer.from_config(deepcopy(config), pre_quantized=True)
            reader.validate_environment(device_map=None, weights_only=True)
            reader.preprocess_model(model=network, dtype=model.dtype, device_map=None, checkpoint_files=None)
            load_faults = list(_load(model, network, reader, tensors))
        except Exception as error:  # compressed-tensors and transformers raise anything
            return [Fault(place="", why=shorten(first_line(error), 160))]
        return load_faults + list(_initialised(network))


def _load(
    model: Model, network: PreTrainedModel, reader: HfQuantizer, tensors: Mapping[str, Tensor]
) -> Iterator[Fault]:
    """Load tensors into a network and yield a fault for everything that does not fit."""
    plan = LoadStateDictConfig(
        device_map={"": torch.device("meta")},
        dtype=model.dtype,
        hf_quantizer=reader,
        weight_mapping=get_model_conversion_mapping(network, None, reader),
    )
    report, _ = convert_and_load_state_dict_in_model(network, dict(tensors), plan)
    network.mark_tied_weights_as_initialized(report)
    network._adjust_missing_and_unexpected_keys(report)
    for name, why in report.conversion_errors.items():
        lines = [line for line in why.splitlines() if line.strip()]
        yield Fault(place=_module(name), why=f"its tensors cannot be merged ({lines[-2] if len(lines) > 1 else why})")
    for name, shape, expected in sorted(report.mismatched_keys):
        yield Fault(place=_module(name), why=f"{name} is {tuple(shape)}, expected {tuple(expected)}")
    tied = network.all_tied_weights_keys
    for name in sorted(report.missing_keys):
        if name not in tied and not model.weights.lacks(name) and name not in report.conversion_errors:
            yield Fault(place=_module(name), why=f"it needs {name}, which no file contains")
    for name in sorted(report.unexpected_keys & tensors.keys()):
        if name not in model.reader.names():
            yield Fault(place=_module(name), why=f"it has no place for {name}")


def _initialised(network: PreTrainedModel) -> Iterator[Fault]:
    """Initialise every module, as the loader does at the end, and yield a fault for each packed weight that it sets.

    Some modules set the weights of layers inside them, which quantized layers do not have.
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
        except Exception:  # the code needs the contents of tensors, which are empty here
            return

    with torch.no_grad(), guard_torch_init_functions():
        yield from walk(network, network)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and progress bars of the loaders."""
    levels = [(logger, logger.level) for logger in map(logging.getLogger, SILENCED_LOGGERS)]
    try:
        for logger, _ in levels:
            logger.setLevel(logging.CRITICAL)
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)

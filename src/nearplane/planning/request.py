"""Recipe resolved and checked for a model, and the entries of config.json for the quantized weights."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from nearplane.calibration.cache_scales import cache_name, check_cache
from nearplane.calibration.stages import FirstLook, blocks_by_kind, try_blocks
from nearplane.calibration.windows import Windows, samples_of
from nearplane.errors import RecipeError
from nearplane.formats.gguf.gguf_layers import block_type
from nearplane.formats.gguf.mixes import role_of, type_of
from nearplane.formats.gguf.names import UNUSED_NAMES
from nearplane.formats.layer_format import Quantized
from nearplane.formats.table import FORMATS
from nearplane.models.ignored import merged_experts, refuse_unmatched, refuse_unsupported, unquantized_patterns
from nearplane.models.kinds import has_head, has_two_stacks
from nearplane.models.layers import Layer
from nearplane.models.model import Model, open_model
from nearplane.number_formats import BlockType, NumberFormat
from nearplane.planning.joined import joined_in
from nearplane.planning.plan import NOTHING_TO_CHOOSE, check_budget
from nearplane.planning.rehearsal import check_loads, check_readers
from nearplane.recipe.block_scheme import BlockScheme
from nearplane.recipe.layer_plan import Plan
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.scheme import check_group
from nearplane.record.record import RunRecord
from nearplane.system.device import Device
from nearplane.system.paths import path_in

logger = logging.getLogger("nearplane")


def open_original(source: str | Path, recipe: Recipe, *, trust_remote_code: bool) -> Model:
    """Open the original model of a recipe or of a checkpoint with this recipe; see `open_model`."""
    embeddings, head = recipe.scheme.ends
    return open_model(
        str(source), trust_remote_code=trust_remote_code, ignore=recipe.ignore, embeddings=embeddings, head=head
    )


def open_recorded(source: str | Path, record: RunRecord, *, trust_remote_code: bool) -> Model:
    """Open the original model of a checkpoint, with the channel scales that were folded before it was quantized.

    Raises:
        ModelError: See `open_model`, and if scales do not fit the model.
    """
    model = open_original(source, record.recipe, trust_remote_code=trust_remote_code)
    model.fold(record.folds)
    return model


def open_resolved(source: str, recipe: Recipe, *, trust_remote_code: bool) -> tuple[Model, Plan]:
    """Open the model that a recipe quantizes; return it and what is decided of its layers.

    Raises:
        NearplaneError: The model cannot be quantized by this recipe.
    """
    model = open_original(source, recipe, trust_remote_code=trust_remote_code)
    settled = resolved(model, recipe)
    check_request(model, settled)
    return model, settled


def open_for_mix(source: str, recipe: Recipe, *, trust_remote_code: bool) -> tuple[Model, Recipe]:
    """Open the model that a recipe with a mix quantizes; return it and the recipe with settled group sizes and windows.

    Which format fits which layer is found later.

    Raises:
        NearplaneError: The model cannot be quantized by any format of the mix.
    """
    model = open_original(source, recipe, trust_remote_code=trust_remote_code)
    _check_network(model, recipe)
    recipe = _settled(model, recipe)
    plan = Plan.of(recipe, [layer.name for layer in model.layers])  # of what --ignore and --layer set apart
    if recipe.runtime is not None:  # without one, of which the chosen formats are warned
        _check_fusions(model, plan)
    if not model.block_layers:
        raise RecipeError(NOTHING_TO_CHOOSE)
    if sum(offer.scheme is not None for offer in recipe.given_mix.offers) > 1:
        _refuse_several_grids(recipe)
    check_readers(model, plan)
    return model, recipe


def _settled(model: Model, recipe: Recipe) -> Recipe:
    """Return a recipe with group sizes and the number of windows settled for a model."""
    recipe = recipe.grouped(layer.shape[1] for layer in model.layers)
    return replace(recipe, calibration=replace(recipe.calibration, samples=samples_of(model, recipe.calibration)))


def resolved(model: Model, recipe: Recipe) -> Plan:
    """Return what is decided of a run before anything is measured: group sizes, `samples` and the scheme of every layer.

    Raises:
        RecipeError: No type of blocks divides the inputs of a layer.
    """
    plan = Plan.of(_settled(model, recipe), [layer.name for layer in model.layers])
    return plan.stored_in(types_of_blocks(model, plan))


def recorded(record: RunRecord, calibration: object = None) -> Plan:
    """Return what was decided of the layers of a checkpoint; its text may be at another path now."""
    recipe = record.recipe.grouped(layer.in_features for layer in record.layers)
    if path_in(calibration) is not None:
        recipe = replace(recipe, calibration=replace(recipe.calibration, calibration=str(calibration)))
    plan = Plan.of(recipe, [layer.name for layer in record.layers])
    return plan.stored_in({layer.name: layer.number_format for layer in record.layers})


def types_of_blocks(model: Model, plan: Plan, *, fallbacks: bool = True) -> dict[str, BlockType]:
    """Return the types of layers in blocks of llama.cpp, by name: in mixes and for some widths not the one that was asked.

    Args:
        model, plan: The model and what is decided of its layers.
        fallbacks: Whether rows that a type does not divide get its fallback.

    Raises:
        RecipeError: No type of blocks divides the inputs of a layer.
    """
    config, types = model.config.to_dict(), dict[str, BlockType]()
    places = {layer.name: index for index, block in enumerate(model.blocks) for layer in block.layers}
    ends = {
        layer.name: role
        for part, role in ((model.embeddings, "tied" if model.tied else "embeddings"), (model.head, "head"))
        if part is not None
        for layer in part.layers
    }
    for layer in model.layers:
        scheme = plan.layers[layer.name].scheme
        if not isinstance(scheme, BlockScheme):
            continue
        place, columns = places.get(layer.name, 0), layer.shape[1]
        role = ends.get(layer.name) or role_of(layer.name)
        kind_name = scheme.number_format.name if scheme.measured else str(scheme.grid)
        if layer.name in ends and scheme.embeddings != "auto":
            kind_name = scheme.embeddings
        if kind_name == scheme.embeddings:
            role = "embeddings"  # in the type that was asked for
        types[layer.name] = kind = type_of(kind_name, role, place, columns if fallbacks else 0, config)
        if fallbacks and columns % kind.columns:
            raise RecipeError(
                f"{layer.name} has {columns} inputs, not a multiple of the block size {kind.columns} of llama.cpp. Leave the "
                f"layer unquantized with --ignore {layer.name.rpartition('.')[2]}."
            )
    return types


def check_request(model: Model, plan: Plan) -> None:
    """Refuse a plan that cannot work for a model, before any work starts.

    Raises:
        RecipeError: The recipe cannot work; the message names the layer and an alternative.
    """
    recipe, layers = plan.recipe, model.layers
    inputs = [layer.shape[1] for layer in layers]
    _check_network(model, recipe)
    for layer in layers:
        format = plan.layers[layer.name].number_format
        check_group(format, layer.name, layer.shape[1], inputs)
        if layer.shape[0] % format.rows:
            raise RecipeError(
                f"{layer.name} has {layer.shape[0]} outputs, not a multiple of the {format.rows} rows that share steps. Use "
                f"another --grid, or leave it unquantized with --ignore."
            )
    check_budget(model, plan)
    if _has_several_grids(plan):
        _refuse_several_grids(recipe)
    _check_fusions(model, plan)


def _has_several_grids(plan: Plan) -> bool:
    """Return whether layers have different grids, or may get some by measuring."""
    return plan.recipe.allocate == "slope" or len({each.number_format for each in plan.layers.values()}) > 1


def _refuse_several_grids(recipe: Recipe) -> None:
    """Refuse grids that differ by layer if the named runtime loads one only.

    Raises:
        RecipeError: It does.
    """
    if recipe.readers.named and recipe.readers.one_grid:
        raise RecipeError(
            f"Layers would have different grids, but {recipe.readers.programs[-1].title} loads {recipe.format} of one grid only. "
            f"Use --bits with a whole number and no --layer with another, or --runtime gptqmodel or vllm."
        )


def _check_fusions(model: Model, plan: Plan) -> None:
    """Refuse layers that the named runtime joins and that differ; without one, log a warning.

    Raises:
        RecipeError: There are such layers; the message names some.
    """
    for difference, modules in _inconsistent_fusions(model, plan).items():
        others = f" and of {len(modules) - 1} more" if len(modules) > 1 else ""
        sentence = (
            f"{difference} of {modules[0]}{others} have different grids or inputs. vLLM and SGLang fuse these and cannot load "
            f"the checkpoint. Quantize all of them alike, or leave all of them out with --ignore."
        )
        if plan.recipe.runtime is not None:
            raise RecipeError(sentence)
        logger.warning(sentence)


def _check_network(model: Model, recipe: Recipe) -> None:
    """Refuse a network that readers of the format do not take, and patterns that match nothing.

    Raises:
        RecipeError: The message says what to use.
    """
    refuse_unmatched(model, recipe.ignore)
    refuse_unmatched(model, [each.pattern for each in recipe.layers], "--layer")
    _warn_of_shared_experts(model, recipe)
    if recipe.kv_cache != "none":
        check_cache(model.network)
        for block in model.blocks:
            cache_name(model, block)
    refuse_unsupported(model)
    if not has_head(model.network) and not recipe.files.any_network:
        raise RecipeError(
            f"{type(model.network).__name__} is an encoder, but readers of {recipe.format} accept only language models. Use "
            f"--format compressed-tensors or --rate 4."
        )
    stacks = f"{type(model.network).__name__} has an encoder and a decoder"
    if has_two_stacks(model.network) and not recipe.files.any_network:
        raise RecipeError(
            f"{stacks}, but readers of {recipe.format} accept only one stack of blocks. Use --format compressed-tensors or --rate "
            f"4."
        )
    if has_two_stacks(model.network) and any(recipe.scheme.ends):
        raise RecipeError(
            f"{stacks}, whose embeddings and head cannot be quantized yet. Leave out --include-embeddings and --include-head."
        )
    _check_left_out(model, recipe)


def say_types(model: Model, plan: Plan) -> None:
    """Log which types of llama.cpp layers get, where some cannot have the one that was asked for."""
    asked = types_of_blocks(model, Plan.of(plan.recipe, plan.layers), fallbacks=False)
    others = [name for name, kind in asked.items() if kind.name != plan.layers[name].number_format.name]
    if not others or plan.recipe.scheme.measured:
        return
    counts = Counter(layer.number_format.name for layer in plan.layers.values())
    weights = {layer.name: layer.shape[0] * layer.shape[1] for layer in model.layers}
    bits = sum(count * block_type(name, plan.layers[name].number_format).rate for name, count in weights.items())
    logger.info(
        "types of layers: %s; %.2f bits per weight. %d of them have rows that blocks of the type which was asked for do not "
        "divide, and get the one that llama.cpp uses instead",
        ", ".join(f"{name} in {count}" for name, count in counts.most_common()),
        bits / sum(weights.values()),
        len(others),
    )


def _warn_of_shared_experts(model: Model, recipe: Recipe) -> None:
    """Log a warning for a pattern that matches routed experts, and layers beside them that every token passes."""
    for pattern in dict.fromkeys(each.pattern for each in recipe.layers):
        matched = [layer for layer in model.layers if recipe.pattern_of(layer.name) == pattern]
        shared = [layer.name for layer in matched if not layer.routed and "expert" in layer.name]
        if shared and "expert" in pattern and any(layer.routed for layer in matched):
            logger.warning(
                "--layer %r is found in the names of experts, and also in %s, which every token passes. Use %r to mean the "
                "former alone.",
                pattern,
                shared[0],
                r"\.experts\.",
            )


def _check_left_out(model: Model, recipe: Recipe) -> None:
    """Refuse tensors that transformers leaves out, and with which llama.cpp and MLX would compute, or not load the file.

    The file of --like holds what its converter knows of, so that only biases are refused, which llama.cpp takes where they are.

    Raises:
        RecipeError: There is such a tensor; the message names it.
    """
    if not recipe.files.every_tensor:
        return
    matrices = model.matrices()
    for name, target in model.weights.unused.items():
        if not name.endswith(UNUSED_NAMES) and (recipe.like is None or target.rpartition(".")[0] in matrices):
            raise RecipeError(
                f"{name} is in the files, but not in the network of config.json. transformers leaves it out; readers of "
                f"{recipe.format} would compute with it, or not load the file. Correct config.json (attention_bias, "
                f"num_hidden_layers), remove the tensor, or use --format compressed-tensors."
            )


def _inconsistent_fusions(model: Model, plan: Plan) -> dict[str, list[str]]:
    """Return the modules whose layers runtimes fuse although their grids differ or some are unquantized, by the difference."""
    if not plan.recipe.readers.joins:
        return {}
    grids = {
        name: layer.number_format.name + (f" with {layer.inputs.name} inputs" if layer.inputs is not None else "")
        for name, layer in plan.layers.items()
    }
    fused: dict[tuple[str, str], dict[str, dict[str, None]]] = {}  # grids of each part, by module and fused layer
    for name in dict.fromkeys([*grids, *model.ignored, *(name for name, _ in model.skipped)]):
        if (joined := joined_in(name)) is not None:
            path, whole, last = joined
            fused.setdefault((path, whole), {}).setdefault(last, {})[grids.get(name, "unquantized")] = None
    differences: dict[str, list[str]] = {}
    for (path, _), layers in fused.items():
        if len({grid for each in layers.values() for grid in each}) > 1:
            text = " and ".join(f"{layer} ({' or '.join(each)})" for layer, each in layers.items())
            differences.setdefault(text, []).append(path)
    return differences


def rehearse(model: Model, plan: Plan, windows: Windows, device: Device) -> dict[str, FirstLook]:
    """Refuse blocks that cannot run one by one, and files that transformers would not load, before the run.

    Returns:
        Results of running a window through one block of each kind, by name; see `try_blocks`.

    Raises:
        ModelError, RecipeError: The run cannot succeed; the message names the block or layer and an alternative.
    """
    looks = {} if windows.fitted is None else try_blocks(model, windows.fitted, device)
    if plan.recipe.readers.one_grid and _has_several_grids(plan):
        logger.warning(
            "Only GPTQModel, vLLM and SGLang read GPTQ checkpoints whose layers have different grids; transformers alone does not."
        )
    _refuse_unlike_inputs(model, plan, looks)
    check_loads(model, plan, partial(quantization_config, model, plan))
    return looks


def _refuse_unlike_inputs(model: Model, plan: Plan, looks: Mapping[str, FirstLook]) -> None:
    """Refuse layers that share an input which runtimes round for some of them alone: its second moments are summed once.

    Raises:
        RecipeError: There are such layers; the message names two.
    """
    if not plan.recipe.rounded:
        return
    for first, *others in blocks_by_kind(model):
        for group, block in product(looks[first.name].groups if first.name in looks else (), (first, *others)):
            names = (f"{block.name}{layer.name.removeprefix(first.name)}" for layer in group)
            found = {plan.layers[name].inputs: name for name in names if name in plan.layers}
            if len(found) > 1:
                one, other = list(found.values())[:2]
                raise RecipeError(
                    f"{one} and {other} have the same input, which programs would round for one and not for the other, or "
                    f"differently. Give both the same --grid and activations with --layer."
                )


def quantization_config(model: Model, plan: Plan, layers: Sequence[Layer] | None = None) -> dict[str, Any]:
    """Return the entries of config.json for quantized weights; `layers` are the quantized ones, by default all."""
    recipe, layers = plan.recipe, model.layers if layers is None else layers
    grids = {layer.name: plan.layers[layer.name].number_format for layer in layers}
    rounded = {layer.name for layer in layers if plan.layers[layer.name].inputs is not None}
    own_grids: dict[str, NumberFormat] = {}
    kinds = {(grid, name in rounded) for name, grid in grids.items()}
    usual = recipe.scheme.number_format, recipe.activations != "none"
    alike = len(kinds) == 1 and not (recipe.layers and kinds != {usual})  # patterns may mean all layers
    if not alike or recipe.allocate == "slope":  # under both names of a layer
        own_grids = grids | {layer.written(model.weights): grids[layer.name] for layer in layers}
    rounded |= {layer.written(model.weights) for layer in layers if layer.name in rounded}
    network = Quantized(
        scheme=recipe.scheme,
        quantized=[layer.name for layer in layers],
        ignore=unquantized_patterns(model, layers),
        grids=own_grids,
        experts=merged_experts(model, layers) if recipe.readers.by_transformers else [],
        routed={name for layer in layers if layer.routed for name in (layer.name, layer.written(model.weights))},
        layers={  # matrices made of several tensors are refused later, see `planning/rehearsal.py`
            layer.written(model.weights): grids[layer.name] for layer in layers if layer.stored_alone(model.weights)
        },
        embeddings=recipe.scheme.dense_ends,
        pre=recipe.pre,
        rounded=rounded,
        kv_cache=recipe.kv_cache != "none",
        version=version("nearplane"),
    )
    return FORMATS[str(recipe.format)].layers.describe(network)

"""Bytes of a checkpoint whose layers have formats of a mix: of its tensors, of its folder, in memory, and read for a token."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from nearplane.errors import RecipeError
from nearplane.formats.beside import origin_of
from nearplane.formats.container import Container
from nearplane.formats.gguf.gguf_header import FILE, nbytes
from nearplane.formats.gguf.mixes import fitting
from nearplane.formats.layer_format import GridFormat, config_text
from nearplane.formats.table import FORMATS
from nearplane.models.experts import by_expert
from nearplane.models.kinds import towers
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.planning.cache_size import DEFAULT_CONTEXT, NUMBER, cache_bytes
from nearplane.planning.folder_size import (
    files_beside,
    layer_bytes,
    max_record_bytes,
    tensor_bytes,
    tensors_of_gguf,
    weight_files,
    with_layers,
)
from nearplane.planning.request import quantization_config
from nearplane.recipe.block_scheme import BlockScheme
from nearplane.recipe.format_mix import FormatMix, Offer
from nearplane.recipe.layer_plan import Plan
from nearplane.recipe.recipe import Recipe
from nearplane.record.model_card import model_card
from nearplane.record.record import RunRecord
from nearplane.system.paths import CONFIG, INDEX, MAX_FILE
from nearplane.system.safetensors_files import Kind, kind_of
from nearplane.system.shard_writer import size_of_files

CACHE_MARGIN = 500  # bytes of the scales of a block's cache, with their names in headers and record
CARD_MARGIN = 300  # characters of a model card for figures that are measured later
EXAMPLE_HASH = 64 * "0"
EXPERTS = re.compile(r"(.*\bexperts)\.")  # in stored names, with a number behind it or the name of a tensor of all
CARD_BYTES = 9999
# figures of a layer's record with 22 and with 18 characters, which most of them have, or fewer
LONG_FIGURE, SHORT_FIGURE, ROW_FIGURE = 0.00012345678901234567, 1.2345678901234567, 0.000123456789
LONG = (
    "loss", "relative_loss", "damped_loss", "nearest_loss", "worst_case", "expected", "clipped", "extra_loss",
    "extra_relative_loss", "extra_nearest_loss", "extra_own_loss",
)  # fmt: skip
SHORT = ("correction", "gamma", "clipped_rows", "limit")


def offered_bytes(model: Model, recipe: Recipe, layer: Layer, offer: Offer) -> int:
    """Return the bytes of a layer's tensors in a format of a mix."""
    if offer.scheme is None:  # a GGUF holds BF16 or F16
        return math.prod(layer.shape) * (2 if recipe.files.block_types else model.dtype.itemsize)
    scheme = offer.scheme
    if isinstance(scheme, BlockScheme):
        scheme = scheme.stored_in(fitting(scheme.number_format.name, layer.shape[1]))
    if offer.activations == "none":
        return layer_bytes(recipe, layer.shape, scheme, model.dtype)
    files = FORMATS[str(recipe.format)].layers.configured({"config_groups": {"": {"input_activations": {"": ""}}}})
    assert isinstance(files, GridFormat), "only compressed-tensors asks for rounded inputs"
    return sum(each.nbytes for each in files.empty("", layer.shape, scheme.number_format, model.dtype).values())


def share_of(model: Model, layer: Layer) -> float:
    """Return the share of the tokens that reach a layer: of experts, that of which the router sends to one on average."""
    if not layer.routed:
        return 1.0
    block = next(block for block in model.blocks if layer in block.layers)
    return min(1.0, reached_experts(model) / len(by_expert([each for each in block.layers if each.routed])))


def reached_experts(model: Model) -> int:
    """Return how many experts of a block a token reaches.

    Raises:
        RecipeError: config.json does not say it.
    """
    if (reached := model.reached_experts) is None:
        raise RecipeError(
            "config.json does not say how many experts a token reaches. Use --weigh stored, and --cost file."
        )
    return reached


def read_bytes(model: Model, layers: Collection[str]) -> int:
    """Return the bytes of all tensors but these layers that a decode step reads.

    Of embeddings that are not tied it reads one row, of experts those that it reaches.
    """
    reader, weights = model.reader, model.weights
    left_out = {name for layer in model.layers if layer.name in layers for name in layer.copies(weights)}
    left_out |= weights.unused.keys()
    aside = tuple(f"{part}." for part in towers(model.network))
    embeddings = None if model.tied else model.network.get_input_embeddings()
    rows = {id(embeddings.weight)} if embeddings is not None else set()
    looked_up = {weights.source_name(name) for name, each in model.network.named_parameters() if id(each) in rows}
    names = [name for name in reader.names() if name not in left_out and not (aside and name.startswith(aside))]
    experts = {name: found[1] for name in names if (found := EXPERTS.match(name)) is not None}
    numbers: dict[str, set[str]] = {}  # of experts whose matrices are stored one by one
    for name, stack in experts.items():
        number = name[len(stack) + 1 :].partition(".")[0]
        numbers.setdefault(stack, set()).update([number] if number.isdigit() else [])
    total = 0.0
    for name in names:
        size: float = reader.nbytes(name)
        if name in looked_up:
            size //= reader.shape(name)[0]
        elif name in experts:
            size *= min(1.0, reached_experts(model) / (len(numbers[experts[name]]) or reader.shape(name)[0]))
        total += size
    return round(total)


def gguf_bytes(model: Model, plan: Plan, *, by_token: bool) -> int:
    """Return the bytes of a GGUF's tensors, or with `by_token` those that a decode step reads."""
    if not by_token:
        return tensor_bytes(model, plan)
    total, tensors = 0.0, tensors_of_gguf(model, plan)
    head = any(name == "output.weight" for name, *_ in tensors)
    for name, shape, kind in tensors:
        size = float(nbytes(model.folder, name, shape, kind))
        if name == "token_embd.weight" and head:
            size /= shape[0]
        elif "_exps." in name:
            size *= min(1.0, reached_experts(model) / shape[0])
        total += size
    return round(total)


def folder_bytes(model: Model, plan: Plan, record: RunRecord) -> int:
    """Return the bytes of a checkpoint's folder, or a few more: the figures in its record count with their longest texts.

    Exact but for these figures, as the tensors of fixed grids are known before the solve. For a GGUF see `one_file_bytes`.

    Args:
        model, plan: The model, and what is decided of its layers.
        record: The run record at the start.
    """
    files = FORMATS[str(plan.recipe.format)].layers.configured(config := quantization_config(model, plan))
    assert isinstance(files, GridFormat), "a mix is of fixed grids"
    reader = model.reader
    parts, sizes = list[dict[str, Kind]](), dict[str, int]()
    ends = [() if end is None else end.layers for end in (model.embeddings, model.head)]
    written = [*(block.layers for block in model.blocks), ends[1]]  # part by part
    written[0] = (*ends[0], *written[0])
    for index, layers in enumerate(written):
        packed: dict[str, Tensor] = {}
        for layer in layers:
            name = layer.written(model.weights)
            made = files.empty(name, layer.shape, plan.layers[layer.name].number_format, model.dtype)
            sizes[layer.name] = sum(tensor.nbytes for tensor in made.values())
            packed |= made
        tensors: dict[str, Kind] = {
            name: (kind_of(tensor).split()[0], tuple(tensor.shape), tensor.nbytes)
            for name, tensor in files.in_files(packed).items()
        }
        names = model.unquantized(index if index < len(model.blocks) else None)
        tensors |= {each: (reader.dtype(each), reader.shape(each), reader.nbytes(each)) for each in names}
        parts.append(tensors)
    size = size_of_files(parts, checksums=files.CHECKSUMS, kind=files.METADATA)
    copied, text = files_beside(model), config_text(model.folder, config, model.config.to_dict())
    described = {CONFIG: text, **files.files(config)}
    hashed = [*weight_files(size), *([INDEX] if size > MAX_FILE else []), *described, *copied.names()]
    scales = CACHE_MARGIN * len(model.blocks) if plan.recipe.kv_cache != "none" else 0
    texts = scales + sum(len(each.encode()) for each in described.values())
    return size + copied.size() + texts + _told(model, record, hashed, sizes)


def one_file_bytes(model: Model, plan: Plan, record: RunRecord, container: Container) -> int:
    """Return the bytes of the folder of a GGUF, or a few more, see `folder_bytes`.

    Args:
        model, plan, record: See `folder_bytes`.
        container: The checkpoint, of which nothing is written.
    """
    container.room = max_record_bytes(with_layers(model, replace(record, extra_kl=0.0)))
    sizes = {
        layer.name: layer_bytes(plan.recipe, layer.shape, plan.layers[layer.name].scheme, model.dtype)
        for layer in model.layers
    }
    return container.size_with() + _told(model, record, [FILE, CONFIG, *files_beside(model).names()], sizes)


def _told(model: Model, record: RunRecord, hashed: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Return the bytes of the record and of the model card, or a few more.

    Args:
        model, record: The model, and the run record at the start.
        hashed: Names of the files whose hashes are in the record.
        sizes: Bytes of the tensors of each layer.
    """
    record = _as_long(model, with_layers(model, replace(record, files=dict.fromkeys(hashed, EXAMPLE_HASH))), sizes)
    return len(model_card(record, origin_of(model.folder)).encode()) + CARD_MARGIN + len(record.to_json().encode())


def _as_long(model: Model, record: RunRecord, sizes: Mapping[str, int]) -> RunRecord:
    """Return a record with placeholders as long as figures are, or a little longer.

    Args:
        model: The model.
        record: The record with layers.
        sizes: Bytes of the tensors of each layer.
    """
    routed = {layer.name for layer in model.layers if layer.routed}
    figures: dict[str, Any] = dict.fromkeys(LONG, LONG_FIGURE) | dict.fromkeys(SHORT, SHORT_FIGURE)
    layers = tuple(
        replace(
            layer,
            **figures,
            row_losses=(ROW_FIGURE,) * len(layer.row_losses),
            damp=0.01,
            sweep_damp=0.01,
            positions=tuple(-1 for _ in layer.positions),
            dead=100,
            pruned=100,
            tokens=record.tokens,
            asked=None,
            base=None,
            entropy=None,
            alike=layer.alike if layer.name in routed else None,
            blended=layer.blended if layer.name in routed else None,
            bytes=sizes[layer.name],
            seconds=12.345678,
        )
        for layer in record.layers
    )
    return replace(
        record,
        layers=layers,
        extra_kl=SHORT_FIGURE,
        seconds=1234.567890123456,
        peak_memory=10**10,
        bytes=10**10,
        folder=10**10,
        card=CARD_BYTES,
        digest=EXAMPLE_HASH,
    )


def cache_of(model: Model, recipe: Recipe) -> int:
    """Return the bytes of the cache that counts in the limit of a recipe with a mix.

    Raises:
        RecipeError: They are not known.
    """
    mix = recipe.given_mix
    if not mix.counts_cache:
        return 0
    if (found := cache_bytes(model, context_of(model, mix), NUMBER if recipe.kv_cache == "none" else 1)) is None:
        raise RecipeError(
            f"The size of the cache of {type(model.network).__name__} is not known. Use --size or --bits-per-weight."
        )
    return found


def constant_of(
    model: Model, recipe: Recipe, mix: FormatMix, layers: Collection[str], ends: Mapping[str, Offer]
) -> int:
    """Return the bytes that count in a limit beside those of the layers to choose for, and beside the files' entries.

    Args:
        model, recipe: The model and its recipe.
        mix: The limit that was asked for.
        layers: Names of the layers to choose for; others are as the recipe says.
        ends: Formats of embeddings and head, by name.

    Raises:
        RecipeError: The size of the cache is not known.
    """
    if mix.bits_per_weight is not None:
        return 0
    cache = cache_of(model, recipe)
    sizes = {
        layer.name: offered_bytes(model, recipe, layer, ends[layer.name])
        for layer in model.layers
        if layer.name in ends
    }
    sizes |= {
        layer.name: layer_bytes(recipe, layer.shape, recipe.scheme_of(layer.name), model.dtype)
        for layer in model.layers
        if layer.name not in layers and recipe.pattern_of(layer.name) is not None
    }
    if mix.cost != "file":
        fixed = sum(_read_share(model, layer) * sizes[layer.name] for layer in model.layers if layer.name in sizes)
        return cache + round(fixed) + read_bytes(model, {*layers, *sizes})
    replaced = {
        name for layer in model.layers if layer.name in {*layers, *sizes} for name in layer.copies(model.weights)
    }
    dense = sum(model.reader.nbytes(name) for name in model.reader.names() if name not in replaced)
    return cache + sum(sizes.values()) + dense


def _read_share(model: Model, layer: Layer) -> float:
    """Return the share of a layer's weights that a decode step reads: of embeddings that are not tied, one row."""
    if model.embeddings is not None and not model.tied and layer in model.embeddings.layers:
        return 1 / layer.shape[0]
    return share_of(model, layer)


def context_of(model: Model, mix: FormatMix) -> int:
    """Return the tokens whose cache counts.

    Raises:
        RecipeError: They are more than the model's positions.
    """
    positions = model.positions
    if mix.context is not None and positions is not None and mix.context > positions:
        raise RecipeError(
            f"--context is {mix.context:,}, but the maximum length is {positions:,} tokens. Use at most that many."
        )
    return mix.context or min(DEFAULT_CONTEXT, positions or DEFAULT_CONTEXT)

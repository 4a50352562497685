"""Bytes of the checkpoint's folder and of its run record, before the run, from shapes alone."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch

from nearplane.calibration.positions import octaves
from nearplane.formats.beside import Beside
from nearplane.formats.gguf.architecture import rope_factors
from nearplane.formats.gguf.gguf_container import planned_tensors
from nearplane.formats.gguf.gguf_header import nbytes
from nearplane.formats.layer_format import GridFormat
from nearplane.formats.table import FORMATS
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.number_formats import BlockType
from nearplane.recipe.layer_plan import Plan
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.schemes import AnyScheme
from nearplane.record.record import LEFT_OUT_OF_LAYERS, MAX_EXPONENT, LayerRecord, RunRecord, one_line, row_groups
from nearplane.system.paths import MAX_FILE
from nearplane.system.safetensors_files import index_text
from nearplane.system.shard_writer import file_names
from nearplane.system.sizes import check_room

# of the forecast for `check_disk`, each an upper bound
TENSORS_OF_LAYER, RECORD_OF_LAYER, SHARD_BYTES, FIXED_BYTES = 4, 500, 300, 16_000
TOKEN_BYTES = 24  # in a GGUF, beside the token's text
FIGURE_LENGTH = 13  # average characters of a figure in the record: many are null, others have 17 digits
PLACEHOLDER = 0.5  # of a measured figure
FLOAT_LENGTH = 24  # maximum characters of a float: -1.2345678901234567e-308
INTEGER_LENGTH = 13  # maximum digits of a number of bytes or tokens
SHORT_FLOAT_LENGTHS = {"row_losses": 15, "lengths": 12}  # characters of floats that are written with 9 and 6 digits


def check_disk(out: Path, model: Model, plan: Plan, *, copies: int = 1) -> None:
    """Refuse a full disk before work; for the size of the folder see `forecast_bytes`.

    Args:
        out: Folder to write.
        model, plan: The model, and what is decided of its layers.
        copies: Number of checkpoints of this size that are on the disk at the same time.

    Raises:
        RecipeError: The checkpoint does not fit.
    """
    size = plan.recipe.scheme.limit
    size = forecast_bytes(model, plan) if size is None else size
    check_room(out, copies * size, joined=0 if plan.recipe.files.one_file else size)


def forecast_bytes(model: Model, plan: Plan) -> int:
    """Return the bytes of a checkpoint's folder or a few more: tensors, their entries, run record, card and copied files.

    It may be too large by 20 KB, 1.5 KB a layer, and for a GGUF a part of its tokenizer. At a rate or a mean number of bits
    every layer counts with that average.
    """
    recipe, reader, (file,) = plan.recipe, model.reader, weight_files(1)
    stored = {name: reader.nbytes(name) for name in reader.names() if name not in model.quantized_names}
    size = sum(
        tensor_entry(name, reader.dtype(name), reader.shape(name), nbytes, file) for name, nbytes in stored.items()
    )
    for layer in model.layers:
        name = layer.name
        nbytes = stored[name] = layer_bytes(recipe, layer.shape, plan.layers[name].scheme, model.dtype)
        size += TENSORS_OF_LAYER * tensor_entry(f"{name}.weight_packed", "BF16", layer.shape, nbytes, file)
        size += layer_entry(layer) + RECORD_OF_LAYER + 2 * len(name)  # the config may name every layer
    copied = files_beside(model).size()
    if recipe.files.one_file:  # the tokenizer is in the GGUF as well as beside it
        copied += copied + TOKEN_BYTES * len(model.network.get_input_embeddings().weight)
    return math.ceil(sum(stored.values()) + size + copied + FIXED_BYTES + (len(model.blocks) + 1) * SHARD_BYTES)


def tensor_bytes(model: Model, plan: Plan) -> int:
    """Return the bytes of all tensors of a checkpoint, without headers: exact on grids, within 0.5 % at a rate.

    Args:
        model: The model to quantize; its shapes suffice, see `open_described`.
        plan: What is decided of its layers: a grid for every layer, or a rate.

    Raises:
        RecipeError: A GGUF cannot hold a tensor, or the package gguf is not installed.
    """
    reader, recipe = model.reader, plan.recipe
    if recipe.files.one_file:
        factors = sum(each.nbytes for each in rope_factors(model.config.to_dict()).values())
        return factors + sum(nbytes(model.folder, *tensor) for tensor in tensors_of_gguf(model, plan))
    dense = sum(reader.nbytes(name) for name in reader.names() if name not in model.quantized_names)
    kinds = Counter((layer.shape, plan.layers[layer.name].scheme) for layer in model.layers)
    return dense + sum(count * layer_bytes(recipe, *kind, model.dtype) for kind, count in kinds.items())


def tensors_of_gguf(model: Model, plan: Plan) -> list[tuple[str, tuple[int, ...], int]]:
    """Return (name, shape, type) of every tensor of a GGUF.

    Raises:
        RecipeError: A GGUF cannot hold a tensor, or the package gguf is not installed.
    """
    types = {layer.written(model.weights): plan.layers[layer.name].number_format.name for layer in model.layers}
    config = {"types": types, "embeddings": plan.recipe.scheme.dense_ends}
    return [*planned_tensors(model.reader, model.config.to_dict(), config).values()]


def layer_bytes(recipe: Recipe, shape: tuple[int, int], scheme: AnyScheme, dtype: torch.dtype) -> int:
    """Return the bytes of the tensors of a layer in a model of a dtype; 0 where only the size of the folder is given."""
    format, layers, (out, columns) = scheme.number_format, FORMATS[str(recipe.format)].layers, shape
    step = layers.scale_dtype(dtype) if format.steps is None else getattr(torch, format.steps)
    steps = (2 if format.minimum else 1) * step.itemsize
    if scheme.entropy_coded:
        return math.ceil(out * columns * (scheme.average or 0.0) / 8)
    if scheme.average is not None:
        return math.ceil(out * columns * (scheme.average + 8 * steps / (format.group or columns)) / 8)
    if isinstance(layers, GridFormat):
        return sum(tensor.nbytes for tensor in layers.empty("", shape, format, dtype).values())
    if isinstance(format, BlockType):
        return math.ceil(out * columns * format.rate / 8)
    return out * columns * format.bits // 8 + out * format.groups(columns) * steps


def bytes_of_ends(model: Model) -> int:
    """Return the bytes of the embeddings and the head in the files of a model."""
    network, reader = model.network, model.reader
    ends = (network.get_input_embeddings(), network.get_output_embeddings())
    numbers = {id(each.weight) for each in ends if each is not None}
    names = {model.weights.source_name(name) for name, each in network.named_parameters() if id(each) in numbers}
    return sum(reader.nbytes(name) for name in reader.names() if name in names)


def files_beside(model: Model) -> Beside:
    """Return the files beside the weights that a checkpoint of a model gets."""
    return Beside(source=model.folder, trust_remote_code=model.trust_remote_code, vocabulary=model.vocabulary)


def weight_files(size: int) -> list[str]:
    """Return the names of the weight files of a folder of so many bytes."""
    return file_names(max(1, math.ceil(size / MAX_FILE)))


def tensor_entry(name: str, dtype: str, shape: Sequence[int], size: int, file: str) -> float:
    """Return the number of characters of a tensor's name, file and checksum in header and index."""
    header = {name: {"dtype": dtype, "shape": list(shape), "data_offsets": [size, size]}}
    index = index_text({name: file}, {name: 8 * "0"}, 0)
    return len(json.dumps(header, separators=(",", ":"))) + len(index) - len(index_text({}, {}, 0))


def layer_entry(layer: Layer) -> float:
    """Return the estimated characters of a layer in the record: a line per field, a figure per group of rows."""
    written = (field.name for field in fields(LayerRecord) if field.name not in LEFT_OUT_OF_LAYERS)
    lines = sum(len(f'   "{name}": ,\n') + FIGURE_LENGTH for name in written)
    return lines + FIGURE_LENGTH * row_groups(*layer.shape) + 2 * len(layer.name)


def max_record_bytes(record: RunRecord) -> int:
    """Return the maximum number of bytes of a record's JSON, whatever its figures become."""

    def widest(part: Any, name: str = "") -> Any:
        if isinstance(part, dict):
            return {key: widest(inner, key) for key, inner in part.items()}
        if isinstance(part, list | tuple):
            return [widest(inner, name) for inner in part]
        digits = {float: SHORT_FLOAT_LENGTHS.get(name, FLOAT_LENGTH), int: INTEGER_LENGTH}.get(type(part))
        return part if digits is None else 10 ** (digits - 1)

    return len(one_line(json.dumps(widest(replace(record, digest=64 * "0").fields()), indent=1)).encode())


def with_layers(model: Model, record: RunRecord) -> RunRecord:
    """Return a run record with placeholders for the layers, in which no figure is missing."""
    figures: dict[str, Any] = {
        name: PLACEHOLDER for name, kind in get_type_hints(LayerRecord).items() if kind in (float, float | None)
    }
    figures |= dict.fromkeys(("dead", "tokens", "pruned", "bytes"), 0)
    figures |= {"format": "q4_k", "checksum": 64 * "0", "order": record.recipe.scheme.order}
    layers = (
        LayerRecord(
            name=layer.name,
            stored=layer.written(model.weights),
            out_features=layer.shape[0],
            in_features=layer.shape[1],
            row_losses=(0.0,) * row_groups(*layer.shape),
            extra_by_source=(0.0,) * len(record.sources),
            positions=(-MAX_EXPONENT,) * len(octaves(record.seqlen)),
            **figures,
        )
        for layer in model.layers
    )
    return replace(record, layers=tuple(layers))

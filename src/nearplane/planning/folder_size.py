"""Bits available to all layers together under a rate or a size, predicted before the run.

Sizes of unquantized tensors and of files beside the weights are exact. The lengths of the layers' entries in headers, index and
record are estimated from shapes; `ledger.py` corrects the estimate by the actual lengths during the run.

A GGUF whose layers get types by measuring is predicted exactly, except for the record inside it, for which the maximum is reserved.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch

from nearplane.errors import RecipeError
from nearplane.formats.beside import Beside, origin_of
from nearplane.formats.container import Container
from nearplane.formats.gguf.architecture import rope_factors
from nearplane.formats.gguf.gguf_container import planned_tensors
from nearplane.formats.gguf.gguf_header import ALIGNMENT, FILE, nbytes
from nearplane.formats.gguf.mixes import fitting
from nearplane.formats.layer_format import METHOD, GridFormat, Quantized, config_text
from nearplane.formats.native import Native
from nearplane.formats.table import FORMATS
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.number_formats import TYPES, BlockType, NumberFormat
from nearplane.planning.allocate import MIN_RATE
from nearplane.recipe.layer_plan import Plan
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.schemes import MEASURED_TYPES, AnyScheme, BlockScheme
from nearplane.record.model_card import model_card
from nearplane.record.record import (
    LEFT_OUT_OF_LAYERS,
    LayerRecord,
    RunRecord,
    one_line,
    row_groups,
)
from nearplane.system.matmul_choice import Library
from nearplane.system.paths import CONFIG, MAX_FILE
from nearplane.system.safetensors_files import INDEX, index_text, shard_size
from nearplane.system.shard_writer import file_names
from nearplane.system.sizes import check_room

SIZE_MARGIN = 0.001  # relative distance between the bytes that a run aims at and the size that was asked for
RESERVED_BYTES = 64  # for record entries that are written last: seconds, bytes
# of the forecast for `check_disk`, each an upper bound
TENSORS_OF_LAYER, RECORD_OF_LAYER, SHARD_BYTES, FIXED_BYTES = 4, 500, 300, 16_000
TOKEN_BYTES = 24  # in a GGUF, beside the token's text
CARD_BYTES = 9999  # placeholder for the size of a model card, in its usual length
CARD_MARGIN = 1000  # bytes of a model card for sentences that depend on what is measured
FIGURE_LENGTH = 13  # average characters of a figure in the record: many are null, others have 17 digits
PLACEHOLDER = 0.5  # of a measured figure
EXAMPLE_ERROR = 0.12345678901234567  # placeholder for a measured error of a matrix library, in full length
FLOAT_LENGTH = 24  # maximum characters of a float: -1.2345678901234567e-308
INTEGER_LENGTH = 13  # maximum digits of a number of bytes or tokens
SHORT_FLOAT_LENGTHS = {"row_losses": 15, "lengths": 12}  # characters of floats that are written with 9 and 6 digits


def aim_of(limit: int) -> int:
    """Return the bytes that a run aims at, so that its folder ends just below a limit."""
    return math.floor(limit * (1 - SIZE_MARGIN)) - RESERVED_BYTES


def budget_of(model: Model, recipe: Recipe) -> float:
    """Return the bits per quantized weight that the recipe's rate or size leaves.

    Raises:
        RecipeError: The size is too small or too large, or the rate is smaller than the side information of small layers.
    """
    layers = model.layers
    weights = sum(math.prod(layer.shape) for layer in layers)
    rate, _ = recipe.scheme.asked or (0.0, "")
    if (size := recipe.scheme.limit) is not None:
        overhead = predict_overhead(model, recipe).total()
        rate = 8 * (aim_of(size) - overhead) / weights
        smallest, largest = (
            math.ceil((overhead + bits * weights / 8 + RESERVED_BYTES + 1) / (1 - SIZE_MARGIN))
            for bits in (MIN_RATE, 7)
        )
        if not MIN_RATE <= rate <= 7:
            raise RecipeError(
                f"--size {recipe.scheme.size} is {size:,} bytes, of which about {overhead:,} are not quantized. This leaves "
                f"{rate:.2f} bits for each of {weights:,} weights. Use {smallest:,} to {largest:,} bytes (0.5 to 7 bits per "
                "weight)."
            )
    least = 8 * sum(16 + 3 * layer.shape[1] / 8 for layer in layers) / weights  # header, and exponents of steps
    if rate < least:
        raise RecipeError(
            f"The rate is {rate:.3f} bits per weight, but headers and steps of such small layers take {least:.3f}. Use a "
            f"larger --rate or --size, or leave small layers unquantized with --ignore."
        )
    return rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Bytes of a folder beside the codes of its layers.

    Args:
        dense: Bytes of the tensors that are not quantized, by name.
        files: Bytes of config.json, of the model card and of the files that are copied.
        fixed: Bytes of headers, index and record without entries of tensors and layers.
        entries: Estimated bytes of each tensor's entries in headers, index and record, by name (layers: in the network).
    """

    dense: dict[str, int]
    files: int
    fixed: int
    entries: dict[str, float]

    def total(self) -> int:
        """Return the sum of all bytes."""
        return math.ceil(sum(self.dense.values()) + self.files + self.fixed + sum(self.entries.values()))


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
    recipe, reader, (file,) = plan.recipe, model.reader, _files(1)
    stored = {name: reader.nbytes(name) for name in reader.names() if name not in model.quantized_names}
    size = sum(
        _of_tensor(name, reader.dtype(name), reader.shape(name), nbytes, file) for name, nbytes in stored.items()
    )
    for layer in model.layers:
        name = layer.name
        nbytes = stored[name] = _layer_bytes(recipe, layer.shape, plan.layers[name].scheme, model.dtype)
        size += TENSORS_OF_LAYER * _of_tensor(f"{name}.weight_packed", "BF16", layer.shape, nbytes, file)
        size += _of_layer(layer) + RECORD_OF_LAYER + 2 * len(name)  # the config may name every layer
    copied = _beside(model).size()
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
        types = {layer.written(model.weights): plan.layers[layer.name].number_format.name for layer in model.layers}
        network = model.config.to_dict()
        planned = planned_tensors(reader, network, {"types": types, "embeddings": recipe.scheme.dense_ends})
        factors = sum(each.nbytes for each in rope_factors(network).values())
        return factors + sum(nbytes(model.folder, *tensor) for tensor in planned.values())
    dense = sum(reader.nbytes(name) for name in reader.names() if name not in model.quantized_names)
    kinds = Counter((layer.shape, plan.layers[layer.name].scheme) for layer in model.layers)
    return dense + sum(count * _layer_bytes(recipe, *kind, model.dtype) for kind, count in kinds.items())


def _layer_bytes(recipe: Recipe, shape: tuple[int, int], scheme: AnyScheme, dtype: torch.dtype) -> int:
    """Return the bytes of the tensors of a layer in a model of a dtype; 0 where only the size of the folder is given."""
    format, layers, (out, columns) = scheme.number_format, FORMATS[str(recipe.format)].layers, shape
    steps = (2 if format.minimum else 1) * layers.scale_dtype(dtype).itemsize
    if scheme.entropy_coded:
        return math.ceil(out * columns * (scheme.average or 0.0) / 8)
    if scheme.average is not None:
        return math.ceil(out * columns * (scheme.average + 8 * steps / (format.group or columns)) / 8)
    if isinstance(layers, GridFormat):
        return sum(tensor.nbytes for tensor in layers.empty("", shape, format, dtype).values())
    if isinstance(format, BlockType):
        return math.ceil(out * columns * format.rate / 8)
    return out * columns * format.bits // 8 + out * format.groups(columns) * steps


def predict_overhead(model: Model, recipe: Recipe) -> Overhead:
    """Predict the bytes of a checkpoint beside the codes of its layers."""
    layers, reader = model.layers, model.reader
    replaced = {name for layer in layers for name in layer.copies(model.weights)}  # with tied copies, not written twice
    dense = {name: reader.nbytes(name) for name in reader.names() if name not in replaced}
    files = _files(recipe.scheme.limit or 0)
    entries = {
        name: _of_tensor(name, reader.dtype(name), reader.shape(name), size, files[0]) for name, size in dense.items()
    }
    for layer in layers:
        size = math.prod(layer.shape) // 3
        name = f"{layer.written(model.weights)}.{Native.KEY}"
        entries[layer.name] = _of_tensor(name, "U8", (size,), size, files[0]) + _of_layer(layer)
    names = [layer.name for layer in layers]
    network = Quantized(scheme=recipe.scheme, quantized=names, version=version("nearplane"))
    config = config_text(model.folder, FORMATS[METHOD].layers.describe(network), model.config.to_dict())
    copied = _beside(model).size()
    packages = ("python", "nearplane", "torch", "transformers", "numba", "safetensors")
    bare = RunRecord(
        recipe=recipe,
        source=str(model.folder),
        versions=dict.fromkeys(packages, "0.00.0"),
        device="cpu",
        windows=256,
        seqlen=2048,
        tokens=10**5,
        text=64 * "0",
        skipped=tuple(model.skipped),
    )
    card = model_card(_final(model, bare), origin_of(model.folder))
    return Overhead(
        dense=dense,
        files=len(config.encode()) + copied + len(card.encode()),
        entries=entries,
        fixed=len(files) * shard_size({})
        + len(index_text({}, {}, 10**7))
        + len(completed_record(bare, model, 10**7).to_json().encode()),
    )


def completed_record(record: RunRecord, model: Model, size: int) -> RunRecord:
    """Return the record of a running run with placeholders for the entries of its end, in their final length."""
    files = [*_files(size), CONFIG, INDEX, *_beside(model).names()]
    return replace(
        record,
        seconds=1234.567890123456,
        products=None
        if record.products is None
        else replace(record.products, errors=dict.fromkeys(get_args(Library), EXAMPLE_ERROR)),
        bytes=size,
        card=CARD_BYTES,
        folder=size,
        files=dict.fromkeys(files, 64 * "0"),
        digest=64 * "0",
    )


def _beside(model: Model) -> Beside:
    """Return the files beside the weights that a checkpoint of a model gets."""
    return Beside(source=model.folder, trust_remote_code=model.trust_remote_code, vocabulary=model.vocabulary)


def _files(size: int) -> list[str]:
    """Return the names of the weight files of a folder of so many bytes."""
    return file_names(max(1, math.ceil(size / MAX_FILE)))


def _of_tensor(name: str, dtype: str, shape: Sequence[int], size: int, file: str) -> float:
    """Return the number of characters of a tensor's name, file and checksum in header and index."""
    header = {name: {"dtype": dtype, "shape": list(shape), "data_offsets": [size, size]}}
    index = index_text({name: file}, {name: 8 * "0"}, 0)
    return len(json.dumps(header, separators=(",", ":"))) + len(index) - len(index_text({}, {}, 0))


def _of_layer(layer: Layer) -> float:
    """Return the estimated characters of a layer in the record: a line per field, a figure per group of rows."""
    written = (field.name for field in fields(LayerRecord) if field.name not in LEFT_OUT_OF_LAYERS)
    lines = sum(len(f'   "{name}": ,\n') + FIGURE_LENGTH for name in written)
    return lines + FIGURE_LENGTH * row_groups(*layer.shape) + 2 * len(layer.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Layers whose types are chosen by measuring.

    Args:
        scheme: Options of their solver.
        layers: Names of these layers, which are in blocks of the network.
        budget: Bits per weight that they get on average, including steps.
        ends: Types of embeddings that follow from the budget, by name.
    """

    scheme: BlockScheme
    layers: frozenset[str]
    budget: float
    ends: dict[str, BlockType] = field(default_factory=dict)


def measured_choice(model: Model, plan: Plan, container: Container, record: RunRecord) -> Choice | None:
    """Return the layers whose types are chosen by measuring, and their budget; None if the recipe names all types.

    Args:
        model: The model to quantize.
        plan: What is decided of its layers so far, with a type of every layer.
        container: Container of these types, not begun.
        record: The run record at the start.

    Raises:
        RecipeError: The layers cannot be as small, or as large, as the size requires.
    """
    scheme = plan.recipe.scheme
    if not isinstance(scheme, BlockScheme) or not scheme.measured:
        return None
    free = [layer for block in model.blocks for layer in block.layers if plan.layers[layer.name].measured]
    free_names = frozenset(layer.name for layer in free)
    if (limit := scheme.limit) is None:
        return Choice(scheme=scheme, layers=free_names, budget=float(str(scheme.grid)))
    ends = []
    if model.embeddings is not None and not model.tied and scheme.embeddings == "auto":
        ends = [layer for layer in model.embeddings.layers if plan.layers[layer.name].measured]
    weights = sum(math.prod(layer.shape) for layer in free)
    names = [CONFIG, FILE, *_beside(model).names()]
    record = replace(record, files=dict.fromkeys(names, 64 * "0"))
    card = len(container.card(_final(model, record)).encode()) + CARD_MARGIN
    record = replace(record, card=card)
    constant = container.size_with() + max_final_record_bytes(model, record) + card + ALIGNMENT * len(free)
    constant -= sum(_bytes(layer, plan.layers[layer.name].number_format) for layer in (*free, *ends))
    for kind in reversed(MEASURED_TYPES):  # untied embeddings get the type of most layers, as in llama.cpp
        types = {layer.name: fitting(kind, layer.shape[1]) for layer in ends}
        others = constant + sum(_bytes(layer, types[layer.name]) for layer in ends)
        budget = 8 * (limit - others) / max(1, weights)
        if budget >= TYPES[kind].rate:
            break
    low, high = (
        others + sum(_bytes(layer, fitting(name, layer.shape[1])) for layer in free)
        for name in (MEASURED_TYPES[0], MEASURED_TYPES[-1])
    )
    if not weights or not low <= limit <= high:
        raise RecipeError(
            f"--size {scheme.size} is {limit:,} bytes, of which about {others:,} are not in layers of variable type. This leaves "
            f"{budget:.2f} bits for each of their {weights:,} weights. Use {low:,} to {high:,} bytes "
            f"({MEASURED_TYPES[0]} to {MEASURED_TYPES[-1]})."
        )
    return Choice(scheme=scheme, layers=free_names, budget=budget, ends=types)


def _bytes(layer: Layer, kind: NumberFormat) -> int:
    """Return the bytes of a layer stored in a type of llama.cpp."""
    assert isinstance(kind, BlockType)
    return layer.shape[0] * (layer.shape[1] // kind.columns) * kind.bytes


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


def max_final_record_bytes(model: Model, record: RunRecord) -> int:
    """Return the maximum number of bytes of the record at the end of a run.

    Args:
        model: The model to quantize.
        record: The run record at the start.
    """
    return max_record_bytes(_final(model, record))


def _final(model: Model, record: RunRecord) -> RunRecord:
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
            **figures,
        )
        for layer in model.layers
    )
    return replace(record, layers=tuple(layers))

"""Bits available to all layers together under a rate or a size, predicted before the run.

Sizes of unquantized tensors and of files beside the weights are exact. The lengths of the layers' entries in headers, index and
record are estimated from shapes; `ledger.py` corrects the estimate by the actual lengths during the run.

A GGUF whose layers get types by measuring is predicted exactly, except for the record inside it, for which the maximum is reserved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import get_args

from nearplane.errors import RecipeError
from nearplane.formats.beside import origin_of
from nearplane.formats.container import Container
from nearplane.formats.gguf.gguf_header import ALIGNMENT, FILE
from nearplane.formats.gguf.mixes import fitting
from nearplane.formats.layer_format import METHOD, Quantized, config_text
from nearplane.formats.native import Native
from nearplane.formats.table import FORMATS
from nearplane.models.kinds import has_head
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.number_formats import TYPES, BlockType, NumberFormat
from nearplane.planning.allocate import MIN_RATE
from nearplane.planning.folder_size import (
    bytes_of_ends,
    files_beside,
    layer_entry,
    max_record_bytes,
    tensor_entry,
    weight_files,
    with_layers,
)
from nearplane.recipe.block_scheme import MEASURED_TYPES, BlockScheme
from nearplane.recipe.layer_plan import Plan
from nearplane.recipe.recipe import Recipe
from nearplane.record.model_card import model_card
from nearplane.record.record import RunRecord
from nearplane.system.matmul_choice import Library
from nearplane.system.paths import CONFIG, INDEX
from nearplane.system.safetensors_files import index_text, shard_size
from nearplane.system.sizes import size_text

SIZE_MARGIN = 0.001  # relative distance between the bytes that a run aims at and the size that was asked for

RESERVED_BYTES = 64  # for record entries that are written last: seconds, bytes

CARD_BYTES = 9999  # placeholder for the size of a model card, in its usual length

CARD_MARGIN = 1000  # bytes of a model card for sentences that depend on what is measured

EXAMPLE_ERROR = 0.12345678901234567  # placeholder for a measured error or divergence, in full length


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
            left = f"{rate:.2f} bits for each of" if rate > 0 else "nothing for"
            raise RecipeError(
                f"--size {recipe.scheme.size} is {size:,} bytes, of which about {overhead:,} are not quantized. This leaves "
                f"{left} {weights:,} weights. Use {smallest:,} to {largest:,} bytes (0.5 to 7 bits per weight)"
                f"{_or_with_ends(model) if rate < MIN_RATE else ''}."
            )
    least = 8 * sum(16 + 3 * layer.shape[1] / 8 for layer in layers) / weights  # header, and exponents of steps
    if rate < least:
        raise RecipeError(
            f"The rate is {rate:.3f} bits per weight, but headers and steps of such small layers take {least:.3f}. Use a "
            f"larger --rate or --size, or leave small layers unquantized with --ignore."
        )
    return rate


def _or_with_ends(model: Model) -> str:
    """Return the rest of a sentence: that embeddings and head can be quantized, too; empty where they are."""
    if model.embeddings is not None or not has_head(model.network):
        return ""
    return f", or quantize embeddings and head, {size_text(bytes_of_ends(model))} of it, with --include-embeddings --include-head"


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


def predict_overhead(model: Model, recipe: Recipe) -> Overhead:
    """Predict the bytes of a checkpoint beside the codes of its layers."""
    layers, reader = model.layers, model.reader
    replaced = {name for layer in layers for name in layer.copies(model.weights)}  # with tied copies, not written twice
    dense = {name: reader.nbytes(name) for name in reader.names() if name not in replaced}
    files = weight_files(recipe.scheme.limit or 0)
    entries = {
        name: tensor_entry(name, reader.dtype(name), reader.shape(name), size, files[0]) for name, size in dense.items()
    }
    for layer in layers:
        size = math.prod(layer.shape) // 3
        name = f"{layer.written(model.weights)}.{Native.KEY}"
        entries[layer.name] = tensor_entry(name, "U8", (size,), size, files[0]) + layer_entry(layer)
    names = [layer.name for layer in layers]
    network = Quantized(scheme=recipe.scheme, quantized=names, version=version("nearplane"))
    config = config_text(model.folder, FORMATS[METHOD].layers.describe(network), model.config.to_dict())
    copied = files_beside(model).size()
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
    card = model_card(with_layers(model, bare), origin_of(model.folder))
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
    files = [*weight_files(size), CONFIG, INDEX, *files_beside(model).names()]
    return replace(
        record,
        seconds=1234.567890123456,
        peak_memory=10**10,
        extra_kl=EXAMPLE_ERROR if record.extra_windows else None,
        products=None
        if record.products is None
        else replace(record.products, errors=dict.fromkeys(get_args(Library), EXAMPLE_ERROR)),
        bytes=size,
        card=CARD_BYTES,
        folder=size,
        files=dict.fromkeys(files, 64 * "0"),
        digest=64 * "0",
    )


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


def measured_choice(model: Model, plan: Plan, container: Container, record: RunRecord) -> Choice:
    """Return the layers whose types of llama.cpp are chosen by measuring, and their budget.

    Args:
        model: The model to quantize.
        plan: What is decided of its layers so far, with a type of every layer.
        container: Container of these types, not begun.
        record: The run record at the start.

    Raises:
        RecipeError: The layers cannot be as small, or as large, as the size requires.
    """
    scheme = plan.recipe.scheme
    assert isinstance(scheme, BlockScheme), "other schemes have no types of blocks"
    free = [layer for layer in model.block_layers if plan.layers[layer.name].measured]
    free_names = frozenset(layer.name for layer in free)
    if (limit := scheme.limit) is None:
        return Choice(scheme=scheme, layers=free_names, budget=float(str(scheme.grid)))
    ends = []
    if model.embeddings is not None and not model.tied and scheme.embeddings == "auto":
        ends = [layer for layer in model.embeddings.layers if plan.layers[layer.name].measured]
    weights = sum(math.prod(layer.shape) for layer in free)
    names = [CONFIG, FILE, *files_beside(model).names()]
    record = replace(record, files=dict.fromkeys(names, 64 * "0"))
    card = len(container.card(with_layers(model, record)).encode()) + CARD_MARGIN
    record = replace(record, card=card)
    constant = container.size_with() + max_record_bytes(with_layers(model, record)) + card + ALIGNMENT * len(free)
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

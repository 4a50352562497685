"""Bits for all layers together: what a rate or a size asks for leaves them, foretold before the run.

Of a folder, exact are the tensors that are not quantized and the files beside the weights. What headers, index and record say of
layers is estimated from their shapes; `ledger.py` corrects that by what they do say, as the run goes on.

A GGUF, in which some layers get types by measuring, is known before the run, to the byte but for the record inside, for which room
is kept: it counts with the most that it can take.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from typing import Any, get_args, get_type_hints

from nearplane.errors import RecipeError
from nearplane.formats.beside import CONFIG, names_copied, size_copied
from nearplane.formats.container import Container
from nearplane.formats.gguf.gguf_header import ALIGNMENT, FILE
from nearplane.formats.gguf.mixes import fitting
from nearplane.formats.layer_format import METHOD, Quantized, config_text
from nearplane.formats.native import Native
from nearplane.formats.table import FORMATS
from nearplane.lattice.number_formats import TYPES
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.planning.allocate import LOW
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.schemes import MEASURED_TYPES, BlockScheme, RateScheme
from nearplane.recipe.sizes import bytes_in
from nearplane.record.record import (
    LayerRecord,
    RunRecord,
    one_line,
    row_groups,
)
from nearplane.system.matmul_choice import Library
from nearplane.system.safetensors_files import INDEX, index_text, shard_size

MARGIN = 0.001  # of a size asked for, by which the aim is below it
SLACK = 64  # bytes kept free for what the record says last: seconds, bytes
FIGURE = 13  # characters that a figure takes in the record, on average: many are null, others have 17 digits
ANY = 0.12345678901234567  # what a trial may have measured of a library
DIGITS = 24  # of a figure: -1.2345678901234567e-308
WHOLE = 13  # digits of a number of bytes or tokens
FEWER = {"row_losses": 15, "lengths": 12}  # of figures that are written to 9 and 6 digits


def aim_of(limit: int) -> int:
    """Return the bytes that a run aims at, for its folder to end just below a limit."""
    return math.floor(limit * (1 - MARGIN)) - SLACK


def budget_of(model: Model, recipe: Recipe, scheme: RateScheme) -> float:
    """Return the bits per quantized weight that the recipe leaves.

    Raises:
        RecipeError: the size leaves more or fewer than can be had, or the rate is less than the side information of small layers.
    """
    layers = model.layers
    weights = sum(math.prod(layer.shape) for layer in layers)
    rate, size = scheme.rate, scheme.bytes()
    if size is not None:
        rest = foretell(model, recipe, scheme).total()
        rate = 8 * (aim_of(size) - rest) / weights
        smallest, largest = (math.ceil((rest + bits * weights / 8 + SLACK + 1) / (1 - MARGIN)) for bits in (LOW, 7))
        if not LOW <= rate <= 7:
            raise RecipeError(
                f"--size {scheme.size} is {size:,} bytes, of which about {rest:,} are not quantized: {rate:.2f} bits are "
                f"left for each of {weights:,} weights. Ask for {smallest:,} to {largest:,} bytes (0.5 to 7 bits per weight)."
            )
    assert rate is not None, "a plan for rates needs a rate or a size"
    least = 8 * sum(16 + 3 * layer.shape[1] / 8 for layer in layers) / weights  # a header, and exponents of steps
    if rate < least:
        raise RecipeError(
            f"{rate:.3f} bits per weight asked for; what is stored beside the codes of such small layers takes {least:.3f}. "
            f"Ask for more than that, or leave small layers out with --ignore."
        )
    return rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretold:
    """Bytes of a folder that are not the codes of its layers.

    Args:
        kept: of the tensors that are not quantized, by name.
        beside: of config.json and the files that are copied.
        once: that headers, index and record take before they say anything of a tensor or a layer.
        said: about how many they take to say what they do of a tensor or a layer, by name; layers have those of the network.
    """

    kept: dict[str, int]
    beside: int
    once: int
    said: dict[str, float]

    def total(self) -> int:
        """Return all of it."""
        return math.ceil(sum(self.kept.values()) + self.beside + self.once + sum(self.said.values()))


def foretell(model: Model, recipe: Recipe, scheme: RateScheme) -> Foretold:
    """Foretell what a checkpoint will hold beside the codes of its layers."""
    layers, reader = model.layers, model.reader
    again = {
        name for layer in layers for name in layer.copies(model.weights)
    }  # tied ones too, which are not written twice
    kept = {name: reader.nbytes(name) for name in reader.names() if name not in again}
    shards = len(model.blocks) + 1
    said = {name: _of_tensor(name, reader.dtype(name), reader.shape(name), size, shards) for name, size in kept.items()}
    for layer in layers:
        size = math.prod(layer.shape) // 3
        name = f"{layer.written(model.weights)}.{Native.KEY}"
        said[layer.name] = _of_tensor(name, "U8", (size,), size, shards) + _of_layer(layer)
    names = [layer.name for layer in layers]
    network = Quantized(scheme=scheme, quantized=names, version=version("nearplane"))
    config = config_text(model.folder, FORMATS[METHOD].config.describe(network))
    copied = size_copied(model.folder, trust_remote_code=model.trust_remote_code)
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
    return Foretold(
        kept=kept,
        beside=len(config.encode()) + copied,
        said=said,
        once=shards * shard_size({})
        + len(index_text({}, {}, 10**7))
        + len(finished(bare, model, 10**7).to_json().encode()),
    )


def finished(record: RunRecord, model: Model, size: int) -> RunRecord:
    """Return the record of a run under way with all that is only known at its end, of the length that it will have."""
    shards = len(model.blocks) + 1
    files = [f"model-{n:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    files += [CONFIG, INDEX, *names_copied(model.folder, trust_remote_code=model.trust_remote_code)]
    return replace(
        record,
        seconds=1234.567890123456,
        products=None
        if record.products is None
        else replace(record.products, errors=dict.fromkeys(get_args(Library), ANY)),
        bytes=size,
        folder=size,
        files=dict.fromkeys(files, 64 * "0"),
        digest=64 * "0",
    )


def _of_tensor(name: str, dtype: str, shape: Sequence[int], size: int, shards: int) -> float:
    """Return the characters that a header and the index take to name a tensor, its file and its checksum."""
    header = {name: {"dtype": dtype, "shape": list(shape), "data_offsets": [size, size]}}
    index = index_text({name: f"model-00001-of-{shards:05d}.safetensors"}, {name: 8 * "0"}, 0)
    return len(json.dumps(header, separators=(",", ":"))) + len(index) - len(index_text({}, {}, 0))


def _of_layer(layer: Layer) -> float:
    """Return about how many characters the record takes for a layer: every field a line, every group of rows a figure."""
    lines = sum(len(f'   "{field.name}": ,\n') + FIGURE for field in fields(LayerRecord))
    return lines + FIGURE * row_groups(*layer.shape) + 2 * len(layer.name)


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
    called = frozenset(layer.name for layer in free)
    if scheme.size is None:
        return Free(layers=called, budget=float(str(scheme.grid)))
    ends = []
    if model.embeddings is not None and not model.tied and scheme.embeddings == "auto":
        ends = [layer for layer in model.embeddings.layers if _is_free(asked, layer)]
    limit, weights = bytes_in(scheme.size), sum(math.prod(layer.shape) for layer in free)
    names = [CONFIG, FILE, *names_copied(model.folder, trust_remote_code=model.trust_remote_code)]
    record = replace(record, files=dict.fromkeys(names, 64 * "0"))
    rest = container.size_with() + longest_record(model, record) + ALIGNMENT * len(free)
    rest -= sum(_bytes(layer, recipe.scheme_of(layer.name).number_format.name) for layer in (*free, *ends))
    for kind in reversed(MEASURED_TYPES):  # of embeddings that are no head: that of most layers, as llama.cpp has it
        types = {layer.name: fitting(kind, layer.shape[1]).name for layer in ends}
        others = rest + sum(_bytes(layer, types[layer.name]) for layer in ends)
        budget = 8 * (limit - others) / max(1, weights)
        if budget >= TYPES[kind].rate:
            break
    low, high = (
        others + sum(_bytes(layer, fitting(name, layer.shape[1]).name) for layer in free)
        for name in (MEASURED_TYPES[0], MEASURED_TYPES[-1])
    )
    if not weights or not low <= limit <= high:
        raise RecipeError(
            f"--size {scheme.size} is {limit:,} bytes, of which about {others:,} are not layers whose type is free: {budget:.2f} "
            f"bits are left for each of their {weights:,} weights. Ask for {low:,} to {high:,} bytes ({MEASURED_TYPES[0]} to {MEASURED_TYPES[-1]})."
        )
    return Free(layers=called, budget=budget, ends=types)


def _is_free(asked: Recipe, layer: Layer) -> bool:
    scheme = asked.scheme_of(layer.name)
    return isinstance(scheme, BlockScheme) and scheme.measured


def _bytes(layer: Layer, name: str) -> int:
    """Return the bytes of a layer in a type."""
    return layer.shape[0] * (layer.shape[1] // TYPES[name].columns) * TYPES[name].bytes


def most_bytes(record: RunRecord) -> int:
    """Return the bytes that the JSON of a record takes at most, whatever its figures become."""

    def widest(part: Any, name: str = "") -> Any:
        if isinstance(part, dict):
            return {key: widest(inner, key) for key, inner in part.items()}
        if isinstance(part, list | tuple):
            return [widest(inner, name) for inner in part]
        digits = {float: FEWER.get(name, DIGITS), int: WHOLE}.get(type(part))
        return part if digits is None else 10 ** (digits - 1)

    return len(one_line(json.dumps(widest(asdict(replace(record, digest=64 * "0"))), indent=1)).encode())


def longest_record(model: Model, record: RunRecord) -> int:
    """Return the bytes that the record of a run takes at most in the end.

    Args:
        model: that is quantized.
        record: as it is when the run begins.
    """
    figures: dict[str, Any] = {
        name: 0.0 for name, kind in get_type_hints(LayerRecord).items() if kind in (float, float | None)
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
            **figures,
        )
        for layer in model.layers
    )
    return most_bytes(replace(record, layers=tuple(layers)))

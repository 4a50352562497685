"""Moving the integers of a checkpoint into another format: every value stays equal bit for bit, or nothing is written.

Which pairs of formats work follows from the formats: `LayerFormat.held` gives a layer's grid in the new format, its
`check` and `pack` refuse what readers do not load and what would be rounded. Every layer is tried before the first is
written. What is written is read back and compared.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from nearplane.errors import FormatError, RecipeError
from nearplane.evaluation.predictions import on_disk
from nearplane.formats.container import Container, written
from nearplane.formats.integers import consecutive
from nearplane.formats.layer_format import Held, LayerFormat
from nearplane.formats.stored import Stored
from nearplane.formats.table import FORMATS
from nearplane.lattice.grid import Grid
from nearplane.models.layers import Layer
from nearplane.models.model import DTYPES, Model
from nearplane.number_formats import BlockType, NumberFormat
from nearplane.planning.folder_size import max_record_bytes
from nearplane.planning.rehearsal import check_loads
from nearplane.planning.request import check_request, quantization_config
from nearplane.planning.run import container_for
from nearplane.planning.tokens_in_file import check_tokens_in_file
from nearplane.recipe.block_scheme import BlockScheme, Ends
from nearplane.recipe.file_formats import FILE_FORMATS, Format
from nearplane.recipe.layer_plan import Plan
from nearplane.recipe.layer_scheme import LayerScheme
from nearplane.recipe.readers import Readers, Weights, readers_of
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.refusals import check_activations
from nearplane.recipe.runtimes import Runtime
from nearplane.recipe.scheme import Scheme, options_of
from nearplane.recipe.schemes import AnyScheme, GridScheme
from nearplane.record.record import RunRecord
from nearplane.record.record_file import read_record
from nearplane.system.paths import RECORD
from nearplane.system.progress import Progress, by_item, silent
from nearplane.system.sizes import check_room

log = logging.getLogger("nearplane")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Result of packing every layer without writing it.

    Args:
        formats: Number format of every layer in the new format, by name in the network.
        dtype: A dtype of models in which the new format stores all steps exactly.
        size: Bytes of the packed layers.
    """

    formats: Mapping[str, NumberFormat]
    dtype: torch.dtype
    size: int


def move_integers(
    source: Path,
    out: Path,
    format: str,
    runtime: Runtime | None = None,
    *,
    trust_remote_code: bool,
    progress: Progress = silent,
) -> int:
    """Write the checkpoint in `source` in another format, with equal values; return the bytes of its weight files.

    Args:
        source, out, format, runtime, trust_remote_code, progress: See `export`.

    Raises:
        RecipeError: The format cannot hold a layer exactly, or its readers would not load the checkpoint.
        FormatError, ModelError: The checkpoint cannot be read, or `out` cannot be written.
    """
    stored = Stored(source)
    if FORMATS[format].layers == stored.layers:
        raise RecipeError(f"{source} has the format {format} already. Copy the folder, or choose another --format.")
    model = _opened(source, stored, trust_remote_code=trust_remote_code)
    record = record_of(source, "The new folder has no run record: %s")
    trial = _tried(source, stored, model, format, readers_of(cast(Format, format), runtime), progress)
    model.dtype = trial.dtype  # that of steps, where they have the model's
    recipe = _recipe(record, model, format, trial.formats, runtime)
    if record is not None and record.recipe.scheme.rows_compensate and not recipe.scheme.rows_compensate:
        log.warning(
            "The new folder has no run record: a recipe with blocks of llama.cpp cannot say whether rows compensated "
            "each other."
        )
        record = None
    plan = Plan.of(recipe.grouped(layer.shape[1] for layer in model.layers), trial.formats).stored_in(trial.formats)
    check_request(model, plan)

    def configured(layers: Sequence[Layer]) -> dict[str, Any]:
        """Return the quantization_config of the new checkpoint."""
        config = quantization_config(model, plan, layers)
        if record is None:  # nobody knows how these codes were solved
            for name in ("order", "damp"):
                config.get("meta", {}).pop(name, None)
        return {name: value for name, value in config.items() if value or name != "meta"}

    check_loads(model, plan, configured)
    size = trial.size + sum(stored.reader.nbytes(name) for name in stored.rest())
    check_room(out, size, joined=0 if recipe.files.one_file else size)
    config = configured(model.layers)
    container = container_for(model, plan, out, config, overwrite=False, trust_remote_code=trust_remote_code)
    check_tokens_in_file(container, model)
    with container:
        if record is not None:
            record = replace(record, recipe=recipe)
            container.room = max_record_bytes(record)
        _write(stored, model, container, progress)
        read = Stored(container.folder, unfinished=container.config)
        _compare(stored, read, progress)
        if record is None:
            container.record_json = ""
        else:
            peak = record.peak_memory
            container.seal(_moved_record(record, plan, read), lambda sealed: replace(sealed, peak_memory=peak))
    return container.size


def record_of(source: Path, warning: str) -> RunRecord | None:
    """Return the run record of a folder; None if it has none that this version of nearplane reads, of which it warns."""
    if not (source / RECORD).is_file():
        return None
    try:
        return read_record(source)  # its digest has been checked
    except FormatError as error:
        log.warning(warning, error)
        return None


def _opened(source: Path, stored: Stored, *, trust_remote_code: bool) -> Model:
    """Return the model of a quantized folder, with its quantized matrices as layers and the dtype of its other tensors.

    Raises:
        FormatError: The network has no matrix of a quantized name.
    """
    names, trust = set(stored.names()), trust_remote_code
    model = on_disk(source, ends=(True, True), trust_remote_code=trust)
    first, last = (
        part is not None and part.layers[0].written(model.weights) in names for part in (model.embeddings, model.head)
    )
    layers = model.block_layers
    dense = [f"^{re.escape(layer.name)}$" for layer in layers if layer.written(model.weights) not in names]
    model = Model(source, model.network, model.reader, ignore=dense, ends=(first, last), trust_remote_code=trust)
    if unknown := sorted(names - {layer.written(model.weights) for layer in model.layers}):
        raise FormatError(
            f"{source}: {unknown[0]} is quantized, but {type(model.network).__name__} has no such matrix that export could move. "
            f"Use --format safetensors."
        )
    sizes: Counter[str] = Counter()
    for name in stored.rest():
        sizes[stored.reader.dtype(name)] += stored.reader.nbytes(name)
    model.dtype = next((DTYPES[name] for name, _ in sizes.most_common() if name in DTYPES), torch.float32)
    return model


def _tried(source: Path, stored: Stored, model: Model, format: str, readers: Readers, progress: Progress) -> Trial:
    """Pack every layer as the new format would, without writing it.

    Steps are stored in the dtype that the format gives them in this model, or else in float16 or float32 if that holds all.

    Raises:
        RecipeError: A layer would change; the message names the first one and the reason.
    """
    layers, formats, size = FORMATS[format].layers, dict[str, NumberFormat](), 0
    dtypes = {layers.scale_dtype(dtype): dtype for dtype in (torch.float32, torch.float16, model.dtype)}
    possible = list(dict.fromkeys(map(layers.scale_dtype, (model.dtype, torch.float16, torch.float32))))
    usual = possible[0]
    for layer in by_item(progress, model.layers, f"trying {format}"):
        name = layer.written(model.weights)
        try:
            held = _held(stored, name, layers)
            layers.check(name, layer.shape, layer.kind, held.format)
            for fault in held.matrix.grid.differences_from(held.format, held.matrix.codes):
                raise FormatError(f"{name}: {fault}.")
            refused: list[FormatError] = []
            for dtype in tuple(possible):
                try:
                    tensors = layers.pack(name, held.matrix, dtype)
                except FormatError as error:
                    refused.append(error)
                    possible.remove(dtype)
            if not possible:
                raise refused[0]
        except (FormatError, RecipeError) as error:
            why = str(error).partition(". ")[0].removesuffix(".")
            why = why if why.startswith(name) else f"{name}: {why}"
            raise RecipeError(
                f"{source} cannot be exported to {format} without a change. {why}. Use another --format, or safetensors, which "
                f"holds all weights decoded."
            ) from error
        if (unread := readers.reason(Weights(held.format, stored.inputs(name) is not None, layer.routed))) is not None:
            raise RecipeError(
                f"{source} cannot be exported to {format} without a change. {name}: {unread}. Use another "
                f"--runtime or --format, or safetensors, which holds all weights decoded."
            )
        formats[layer.name] = held.format
        size += sum(tensor.nbytes for tensor in tensors.values())
    if possible[0] != usual:
        given, needed = (str(dtype).removeprefix("torch.") for dtype in (usual, possible[0]))
        log.warning(
            f"Steps are stored in {needed}, because {given}, the dtype of the other weights, does not hold them. Readers that "
            f"load the model in {given} round them."
        )
    return Trial(formats=formats, dtype=dtypes[possible[0]], size=size)


def _held(stored: Stored, name: str, layers: LayerFormat) -> Held:
    """Return a stored layer on the grid of another format.

    Raises:
        FormatError: The other format has no grid of equal values.
    """
    number_format, matrix = stored.number_format(name), stored.matrix(name, stored.tensors(name))
    if not isinstance(matrix.grid, Grid):
        raise FormatError(f"{name} is entropy-coded, and no grid holds such codes.")
    if not torch.equal(matrix.grid.group, consecutive(matrix.codes.shape[1], number_format.group)):
        raise FormatError(f"{name}: its groups are not runs of neighbouring inputs (act-order).")
    held = layers.held(matrix, number_format)
    if not torch.equal(held.matrix.decode().float(), matrix.decode().float()):
        raise FormatError(f"{name}: {held.format.name} does not hold its values.")
    return held


def _recipe(
    record: RunRecord | None, model: Model, format: str, formats: Mapping[str, NumberFormat], runtime: Runtime | None
) -> Recipe:
    """Return the recipe of the record for the new format; without a record, one with the number formats alone."""
    if record is None:
        ignore = tuple(f"^{re.escape(name)}$" for name in model.ignored)
        base = Recipe(scheme=GridScheme(order="natural"), ignore=ignore)
    else:
        base = replace(record.recipe, kv_cache="none")
        if record.cache_scales:
            log.info("scales of keys and values stay behind: files of %s have no place for them", format)
        for rounded, activations in base.rounded:
            check_activations(activations, rounded, cast(Format, format), None)
        if format in base.scheme.FORMATS and all(formats[each.name] == each.number_format for each in record.layers):
            return replace(base, format=format, runtime=runtime, pre=None, like=None)
    blocks = FILE_FORMATS[format].block_types and any(
        isinstance(each, BlockType) and not (each.single and each.symmetric and each.levels is None)
        for each in formats.values()
    )

    # rows of mxfp4 in a GGUF compensated each other before 0.3, which its recipe cannot say: they have no bound
    layers_of_record = () if record is None or record.tuning is not None else record.layers
    unbounded = {each.name for each in layers_of_record if each.worst_case is None}

    def storing(scheme: AnyScheme, number_format: NumberFormat, *, joined: bool) -> AnyScheme:
        """Return the scheme with another number format: one of llama.cpp's, or integers."""
        options = {each.name: getattr(scheme, each.name) for each in fields(Scheme)}
        options |= {name: getattr(scheme, name) for name in ("polish", "rounds")}
        if blocks:
            return BlockScheme(grid=number_format.name, embeddings=cast(Ends, _dtype_of_embeddings(model)), **options)
        if number_format.levels is not None:
            two_sided = scheme.rows_compensate or (joined and scheme.calibrated and isinstance(scheme, BlockScheme))
            return GridScheme(grid=number_format.name, two_sided=two_sided, **options)
        if isinstance(scheme, GridScheme):
            return replace(scheme, grid=None, **options_of(number_format))
        return GridScheme(**options, **options_of(number_format))

    scheme = storing(base.scheme, Counter(formats.values()).most_common(1)[0][0], joined=bool(unbounded))
    others = {name: storing(base.scheme_of(name), each, joined=name in unbounded) for name, each in formats.items()}
    layers = tuple(
        LayerScheme(pattern=f"^{re.escape(name)}$", scheme=each) for name, each in others.items() if each != scheme
    )
    target = cast(Format, format)
    return replace(
        base, scheme=scheme, layers=layers, format=target, runtime=runtime, allocate=None, pre=None, like=None
    )


def _dtype_of_embeddings(model: Model) -> str:
    """Return the name that a GGUF gives the dtype of the input embeddings."""
    embeddings = model.network.get_input_embeddings()
    name = next(name for name, module in model.network.named_modules() if module is embeddings)
    return model.reader.dtype(model.weights.source_name(f"{name}.weight")).lower()


def _write(stored: Stored, model: Model, container: Container, progress: Progress) -> None:
    """Write all blocks: quantized layers as the new format holds them, all other tensors as they are."""

    def add(layers: Iterable[Layer]) -> None:
        for layer in layers:
            name = layer.written(model.weights)
            container.add(name, _held(stored, name, container.layers).matrix)

    add(() if model.embeddings is None else model.embeddings.layers)
    for index, block in enumerate(by_item(progress, model.blocks, "writing blocks")):
        add(block.layers)
        container.close_block(model.reader.read(model.unquantized(index)))
    add(() if model.head is None else model.head.layers)
    container.close_block(model.reader.read(model.unquantized()))


def _compare(stored: Stored, read: Stored, progress: Progress) -> None:
    """Compare all weights in the new files with those that they were made from.

    Raises:
        FormatError: A quantized layer is missing or differs.
    """
    missing = sorted(set(stored.names()) ^ set(read.names()))
    differing = missing or (
        name
        for name in by_item(progress, [*stored.names()], "reading back")
        if not torch.equal(_values(stored, name), _values(read, name))
    )
    for name in differing:
        raise FormatError(f"{name} reads back differently. This is a fault of nearplane: please report it.")
    rounded = [name for name in read.rest() if not torch.equal(_dense(stored, name), _dense(read, name))]
    if rounded:
        log.warning(
            f"{len(rounded)} tensors that are not quantized are rounded, as in all files of this format; the first is {rounded[0]}."
        )


def _values(stored: Stored, name: str) -> Tensor:
    """Return the float32 values of a quantized layer."""
    return stored.matrix(name, stored.tensors(name)).decode().float()


def _dense(stored: Stored, name: str) -> Tensor:
    """Return an unquantized tensor in float32 or wider."""
    tensor = stored.reader.read([name])[name]
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _moved_record(record: RunRecord, plan: Plan, read: Stored) -> RunRecord:
    """Return the record with the number formats, sizes and checksums of the new files; losses are those of equal values."""
    layers = []
    for layer in record.layers:
        tensors = written(read.tensors(layer.stored))
        format = plan.layers[layer.name].number_format
        layers.append(replace(layer, bytes=tensors.bytes, checksum=tensors.checksum, format=format.name))
    tuning = record.tuning
    if tuning is not None:
        norms = {name: written(read.reader.read([name])).checksum for name in tuning.norms}
        tuning = replace(tuning, norms=norms)
    return replace(record, layers=tuple(layers), tuning=tuning, cache_scales={})

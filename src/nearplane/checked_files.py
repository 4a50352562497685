"""What a checkpoint's files tell by themselves: hashes, sizes, and whether codes and steps are what the record says of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from nearplane.block_types import TYPES
from nearplane.errors import FormatError, ModelError
from nearplane.faults import Fault
from nearplane.formats import FORMATS
from nearplane.formats.beside import CONFIG
from nearplane.formats.config_file import Quantized
from nearplane.formats.container import written
from nearplane.formats.stored import Stored
from nearplane.gguf_header import FILE, RECORD, read_header
from nearplane.lattice.grid import ProductGrid, QuantizedMatrix
from nearplane.lattice.superblock import SuperGrid
from nearplane.record import NAME, LayerRecord, RunRecord, contradictions, digest_of
from nearplane.record_inside import record_inside
from nearplane.shards import sha256

IGNORED = ("README", "LICENSE", "LICENCE", ".")  # beginnings of files that repositories add


Shown = Callable[[Sequence[Any], str], Iterable[Any]]  # passes items through and shows how far they are, with a label


def files(folder: Path, record: RunRecord, shown: Shown) -> Iterator[Fault]:
    """Compare every file with its hash."""
    if (has := digest_of((folder / NAME).read_text(encoding="utf-8"))) != record.digest:
        yield Fault(where=NAME, what=f"it has the digest {has[:16]}.., and says {record.digest[:16]}..")
    found = names(folder) - {NAME}
    for name in sorted(found - record.files.keys()):
        if not name.startswith(IGNORED):
            yield Fault(where=name, what="the record does not know this file")
    for name, wanted in shown([*record.files.items()], "hashing files"):
        if name not in found:
            yield Fault(where=name, what="the file is missing")
        elif (has := sha256(folder / name)) != wanted:
            yield Fault(where=name, what=f"it has the SHA-256 {has[:16]}.., the record says {wanted[:16]}..")


def inside(folder: Path, record: RunRecord) -> Iterator[Fault]:
    """Compare the record in a GGUF, where it has one, with that beside it."""
    path = folder / FILE
    if not path.is_file():
        return
    try:
        if read_header(path).fields.get(RECORD, "").strip() and record_inside(path) != record.inside():
            yield Fault(where=FILE, what=f"the record in it says something else than {NAME} beside it")
    except (FormatError, ModelError) as error:
        yield Fault(where=FILE, what=str(error))


def sums(folder: Path, record: RunRecord) -> Iterator[Fault]:
    """Add up what the record says in two places."""
    known = sorted({NAME, *record.files} & set(names(folder)))
    shards = sum((folder / name).stat().st_size for name in known if shard(name))
    if shards != record.bytes:
        yield Fault(where=NAME, what=f"the weight files have {shards:,} bytes, the record says {record.bytes:,}")
    size = sum((folder / name).stat().st_size for name in known)
    if size != record.folder:
        yield Fault(where=NAME, what=f"the files have {size:,} bytes, the record says {record.folder:,}")
    if record.tokens != record.windows * record.seqlen:
        yield Fault(where=NAME, what=f"{record.windows} windows of {record.seqlen} are not {record.tokens:,} tokens")
    for name, count in Counter(layer.name for layer in record.layers).items():
        if count > 1:
            yield Fault(where=name, what=f"the record has {count} certificates of it")
    for layer, what in contradictions(record):
        yield Fault(where=layer.name, what=what)


def names(folder: Path) -> set[str]:
    """Return the files in a folder and below; what the record names is looked for among these, never opened by its name."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def shard(name: str) -> bool:
    """Return whether a file holds tensors."""
    return name.endswith((".safetensors", ".gguf"))


def opened(folder: Path, faults: list[Fault]) -> Stored | None:
    """Return the tensors of a checkpoint, or None and one fault more where they cannot be read."""
    try:
        return Stored(folder)
    except (FormatError, ModelError) as error:
        faults.append(Fault(where=str(folder), what=str(error)))
        return None


def layers(stored: Stored, record: RunRecord, sound: set[str], shown: Shown) -> Iterator[Fault]:
    """Compare the tensors of every layer with the record, one in memory at a time; `sound` gets the names of good ones."""
    recipe, known = record.recipe, {layer.stored: layer for layer in record.layers}
    format = FORMATS[str(recipe.format)]
    described = format.config.describe(Quantized(scheme=recipe.scheme, quantized=list(known), version=""))
    if stored.layers != format.layers.configured(described):
        yield Fault(where=CONFIG, what=f"its quantization_config is not that of {recipe.format} as the recipe has it")
    for name, text in stored.says().items():  # read first by some programs
        again = stored.reader.folder / name
        if again.is_file() and again.read_bytes() != text.encode():
            yield Fault(where=name, what=f"it is not the quantization_config of {CONFIG}")
    there = dict.fromkeys(stored.names())
    for name in there:
        if name not in known:
            yield Fault(where=name, what=f"a quantized layer that {NAME} does not know")
    for layer in shown(record.layers, "checking layers"):
        if layer.stored not in there:
            yield Fault(where=layer.name, what=f"no tensors named {layer.stored} in the weight files")
            continue
        try:
            tensors = stored.tensors(layer.stored)
            matrix = stored.matrix(layer.stored, tensors)
        except (FormatError, ModelError) as error:
            yield Fault(where=layer.name, what=str(error))
            continue
        found = written(tensors)
        if found.checksum != layer.checksum:
            yield Fault(
                where=layer.name,
                what=f"its tensors have the SHA-256 {found.checksum[:16]}.., the record says {layer.checksum[:16]}..",
            )
        if found.bytes != layer.bytes:
            yield Fault(
                where=layer.name, what=f"its tensors have {found.bytes:,} bytes, the record says {layer.bytes:,}"
            )
        faults = list(_of_the_grid(matrix, layer))
        yield from (Fault(where=layer.name, what=what) for what in faults)
        if not faults:
            sound.add(layer.name)


def _of_the_grid(matrix: QuantizedMatrix, layer: LayerRecord) -> Iterator[str]:
    """Yield what is wrong with codes and grid of a layer by themselves."""
    shape, grid = tuple(matrix.codes.shape), matrix.grid
    if shape != (layer.out_features, layer.in_features):
        yield f"the matrix is {shape[0]} x {shape[1]}, the record says {layer.out_features} x {layer.in_features}"
        return
    if isinstance(grid, ProductGrid):
        if layer.bits is not None or layer.base is None:
            yield f"it is entropy-coded, the record says {layer.bits} bits"
        if not (math.isfinite(grid.base) and grid.base > 0):
            yield f"its step is {grid.base}"
        return
    if layer.bits is None or grid.low is None or grid.high is None:
        yield "it is on a fixed grid, the record says that it is entropy-coded"
        return
    groups = shape[1] // (layer.group_size or shape[1])
    symmetric = grid.low < 0 if grid.levels is None else not bool(grid.zero.any())
    if ((grid.high - grid.low).bit_length(), grid.scale.shape[1], symmetric) != (
        layer.bits,
        groups,
        layer.symmetric,
    ):
        yield (
            f"its codes are {grid.low} to {grid.high} in {grid.scale.shape[1]} groups; the record says {layer.bits} bits, groups "
            f"of {layer.group_size or 'a row'}, {'' if layer.symmetric else 'not '}symmetric"
        )
    if not bool(torch.isfinite(grid.scale).all()) or not (isinstance(grid, SuperGrid) or bool((grid.scale > 0).all())):
        yield "a step is not a positive number"  # blocks of llama.cpp may have steps of either sign, and none at all
    if (
        isinstance(grid, SuperGrid)
        and layer.blocks in TYPES
        and shape[1] != TYPES[layer.blocks].columns * grid.d.shape[1]
    ):
        yield f"it has {grid.d.shape[1]} blocks a row, which are not those of {layer.blocks}, as the record says"
    for what, values in (("code", matrix.codes), ("zero", grid.zero)):
        low, high = (float(x) for x in values.aminmax())
        if (what == "code" and (low < grid.low or high > grid.high)) or not math.isfinite(high - low):
            yield f"a {what} is {low:g} or {high:g}, the grid is {grid.low} to {grid.high}"

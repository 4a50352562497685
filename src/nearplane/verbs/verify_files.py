"""Checks of a checkpoint's files alone against its run record: hashes, sizes, codes and steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nearplane.calibration.cache_scales import cache_tensors
from nearplane.errors import FormatError, ModelError, printable
from nearplane.formats.compressed_tensors.fp4_packed import apart
from nearplane.formats.container import written
from nearplane.formats.find_record import embedded_record
from nearplane.formats.gguf.gguf_header import FILE, RECORD_KEY, read_header
from nearplane.formats.layer_format import Quantized
from nearplane.formats.stored import Stored
from nearplane.formats.table import FORMATS
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.shared_grid import SharedGrid
from nearplane.record.contradictions import contradictions, tuning_contradictions
from nearplane.record.record import LayerRecord, RunRecord
from nearplane.system.files import digest_of, sha256
from nearplane.system.paths import CONFIG, RECORD
from nearplane.system.progress import Progress, by_item

REPOSITORY_FILES = ("README", "LICENSE", "LICENCE", ".")  # beginnings of names of files that repositories add


@dataclass(frozen=True, slots=True)
class Fault:
    """A difference between a checkpoint and its run record.

    Args:
        where: Name of a layer, file or tensor.
        what: Description of what was found and what was expected.
    """

    where: str
    what: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "where", printable(self.where))  # names in files are untrusted
        object.__setattr__(self, "what", printable(self.what))


def sound_files(folder: Path, record: RunRecord, progress: Progress, faults: list[Fault]) -> Stored | None:
    """Compare all files with the record; adds to `faults`, returns the tensors if every layer can be measured."""
    faults += [*_hashes(folder, record, progress), *_inside(folder, record), *_sums(folder, record)]
    try:
        stored = Stored(folder)
    except (FormatError, ModelError) as error:
        faults.append(Fault(str(folder), str(error)))
        return None
    sound: set[str] = set()
    faults += [*_layers(stored, record, sound, progress), *_tuning(stored, record)]
    return stored if len(sound) == len(record.layers) else None


def _hashes(folder: Path, record: RunRecord, progress: Progress) -> Iterator[Fault]:
    """Compare every file with its recorded hash."""
    if (digest := digest_of((folder / RECORD).read_text(encoding="utf-8"))) != record.digest:
        yield Fault(RECORD, f"its digest is {digest[:16]}.., but it names {record.digest[:16]}..")
    existing = names(folder) - {RECORD}
    for name in sorted(existing - record.files.keys()):
        if not name.startswith(REPOSITORY_FILES):
            yield Fault(name, "the record does not list this file")
    for name, expected in by_item(progress, [*record.files.items()], "hashing files"):
        if name not in existing:
            yield Fault(name, "the file is missing")
        elif (digest := sha256(folder / name)) != expected:
            yield Fault(name, f"it has the SHA-256 {digest[:16]}.., the record has {expected[:16]}..")


def _inside(folder: Path, record: RunRecord) -> Iterator[Fault]:
    """Compare the record inside a GGUF, if there is one, with that beside it."""
    path = folder / FILE
    if not path.is_file():
        return
    try:
        if read_header(path).fields.get(RECORD_KEY, "").strip() and embedded_record(path) != record.embedded():
            yield Fault(FILE, f"the record in this file differs from {RECORD} next to it")
    except (FormatError, ModelError) as error:
        yield Fault(FILE, str(error))


def _sums(folder: Path, record: RunRecord) -> Iterator[Fault]:
    """Check sums and repetitions within the record."""
    known = sorted({RECORD, *record.files} & set(names(folder)))
    shards = sum((folder / name).stat().st_size for name in known if shard(name))
    if shards != record.bytes:
        yield Fault(RECORD, f"the weight files have {shards:,} bytes, the record has {record.bytes:,}")
    size = sum((folder / name).stat().st_size for name in known) + record.card  # as written: it may be changed
    if size != record.folder:
        yield Fault(RECORD, f"the files have {size:,} bytes, the record has {record.folder:,}")
    if record.tokens != record.windows * record.seqlen:
        yield Fault(RECORD, f"{record.windows} windows of {record.seqlen} are not {record.tokens:,} tokens")
    for name, count in Counter(layer.name for layer in record.layers).items():
        if count > 1:
            yield Fault(name, f"the record has {count} certificates of it")
    for layer, what in contradictions(record):
        yield Fault(layer.name, what)


def names(folder: Path) -> set[str]:
    """Return the names of all files in a folder. Names in a record are only looked up in this set, never opened."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def shard(name: str) -> bool:
    """Return whether a file name is that of a weight file."""
    return name.endswith((".safetensors", ".gguf"))


def _layers(stored: Stored, record: RunRecord, sound: set[str], progress: Progress) -> Iterator[Fault]:
    """Compare the tensors of every layer with the record, one layer at a time; `sound` receives the names of good ones."""
    recipe = record.recipe.grouped(layer.in_features for layer in record.layers)
    known = {layer.stored: layer for layer in record.layers}
    format = FORMATS[str(recipe.format)]
    rounded = {layer.stored: recipe.inputs_of(layer.name) for layer in record.layers}
    names = [name for name, inputs in rounded.items() if inputs is not None]
    grids = {layer.stored: layer.number_format for layer in record.layers} if names else {}
    kept = recipe.kv_cache != "none"
    quantized = Quantized(
        scheme=recipe.scheme, quantized=list(known), grids=grids, rounded=names, kv_cache=kept, version=""
    )
    described = format.layers.describe(quantized)
    if stored.config.get("kv_cache_scheme") != described.get("kv_cache_scheme"):
        yield Fault(CONFIG, f"its kv_cache_scheme is not that of --kv-cache {recipe.kv_cache}, which is in the record")
    beside = stored.beside().items()
    stored_scales = {name: float(each) if each.numel() == 1 else f"{each.numel()} numbers" for name, each in beside}
    recorded_scales = {name: float(tensor) for name, tensor in cache_tensors(record.cache_scales).items()}
    for name in sorted(stored_scales.keys() | recorded_scales.keys()):
        if stored_scales.get(name) != recorded_scales.get(name):
            found, expected = (of.get(name, "missing") for of in (stored_scales, recorded_scales))
            yield Fault(name, f"it is {found} in the files, and {expected} in the record")
    if stored.layers != format.layers.configured(described):
        yield Fault(CONFIG, f"its quantization_config is not that of {recipe.format} with this recipe")
    for name, text in stored.repeated_files().items():  # some programs read this copy first
        copy = stored.reader.folder / name
        if copy.is_file() and copy.read_bytes() != text.encode():
            yield Fault(name, f"it differs from the quantization_config in {CONFIG}")
    stored_names = dict.fromkeys(stored.names())
    divisors, of_inputs, said = dict[str, float](), dict[str, float](), set[str]()
    for name in stored_names:
        if name not in known:
            yield Fault(name, f"{RECORD} does not list this quantized layer")
    for layer in by_item(progress, record.layers, "checking layers"):
        if layer.stored not in stored_names:
            yield Fault(layer.name, f"the weight files have no tensors named {layer.stored}")
            continue
        try:
            tensors = stored.tensors(layer.stored)
            matrix = stored.matrix(layer.stored, tensors)
            inputs, scale = stored.inputs(layer.stored) or (None, None)
        except (FormatError, ModelError) as error:
            if str(error) not in said:  # of the config, and so of every layer
                yield Fault(layer.name, str(error))
            said.add(str(error))
            continue
        if inputs != (asked := recipe.inputs_of(layer.name)):
            config, recorded = (
                "not rounded" if each is None else f"rounded to {each.name}" for each in (inputs, asked)
            )
            yield Fault(layer.name, f"its inputs are {config} in {CONFIG}, and {recorded} in the record")
        summary = written(tensors)
        if summary.checksum != layer.checksum:
            recorded = layer.checksum[:16]
            what = f"its tensors have the SHA-256 {summary.checksum[:16]}.., the record has {recorded}.."
            yield Fault(layer.name, what)
        if summary.bytes != layer.bytes:
            yield Fault(layer.name, f"its tensors have {summary.bytes:,} bytes, the record has {layer.bytes:,}")
        if isinstance(matrix.grid, SharedGrid):
            divisors[layer.name] = matrix.grid.divisor
        if scale is not None:
            of_inputs[layer.name] = scale
        faults = list(_of_the_grid(matrix, layer))
        yield from (Fault(layer.name, what) for what in faults)
        if not faults:
            sound.add(layer.name)
    for called, scales in (("its global scale", divisors), ("the global scale of its inputs", of_inputs)):
        for name, first in apart(scales):
            yield Fault(
                name, f"{called} is {scales[name]:g}, but {scales[first]:g} of {first}; vLLM takes one for both"
            )


def _of_the_grid(matrix: QuantizedMatrix, layer: LayerRecord) -> Iterator[str]:
    """Yield the faults of the codes and the grid of a layer."""
    shape, format = tuple(matrix.codes.shape), layer.number_format
    if shape != (layer.out_features, layer.in_features):
        yield f"the matrix is {shape[0]} x {shape[1]}, the record has {layer.out_features} x {layer.in_features}"
        return
    if not format.bits and layer.base is None:
        yield "the record has no step for it, which entropy-coded weights need"
    yield from matrix.grid.differences_from(format, matrix.codes)


def _tuning(stored: Stored, record: RunRecord) -> Iterator[Fault]:
    """Compare the tuning part of the record, and the tuned norms, with the files."""
    tuning, where = record.tuning, f"{RECORD}, tuning"
    if tuning is None:
        return
    yield from (Fault(where, what) for what in tuning_contradictions(tuning))
    if [each.name for each in tuning.solved] != [layer.name for layer in record.layers]:
        yield Fault(where, "its losses before tuning do not match the layers")
    kept = next((point.bytes for point in tuning.curve if point.step == tuning.kept), None)
    if kept is not None and kept != sum(layer.bytes for layer in record.layers):
        yield Fault(where, f"the kept state took {kept:,} bytes, but the layers take another number")
    unquantized = set(stored.rest())
    for name, expected in tuning.norms.items():
        if name not in unquantized:
            yield Fault(name, "the record lists this norm as tuned, but it is missing")
        elif (digest := written(stored.reader.read([name])).checksum) != expected:
            what = f"it has the SHA-256 {digest[:16]}.., the record has {expected[:16]}.. of the tuned norm"
            yield Fault(name, what)

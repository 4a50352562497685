"""The checkpoint folder around quantized layers: written shard by shard, unloadable until it is whole, and read back.

Knows names and tensors, not modules. What a layer's tensors look like is said in `compressed_tensors.py`, `gptq.py`
and `native.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from nearplane.errors import FormatError, RecipeError
from nearplane.formats import compressed_tensors, gptq, native
from nearplane.formats.beside import CONFIG, GPTQ_CONFIG, copy_beside, names_copied, size_copied
from nearplane.formats.unfinished import Unfinished
from nearplane.jsonfile import read_object
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.record import NAME as RECORD
from nearplane.schemes import GridScheme, RateScheme
from nearplane.shards import INCOMPLETE, INDEX, ShardReader, ShardWriter, about, sha256, shard_size


class Layout(Protocol):
    """What a format offers; modules and frozen objects both do."""

    @property
    def KEY(self) -> str: ...  # noqa: N802  (a constant of modules)
    @property
    def SUFFIXES(self) -> tuple[str, ...]: ...  # noqa: N802
    def check(
        self,
        name: str,
        shape: tuple[int, int],
        kind: str,
        *,
        bits: int,
        group_size: int | None,
        symmetric: bool,
    ) -> None: ...
    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype: ...
    def pack_layer(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]: ...
    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]: ...
    def unpack_layer(self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> QuantizedMatrix: ...


class GridLayout(Layout, Protocol):
    """What a format of grids offers beside: its tensors' shapes follow from the grid alone."""

    def empty(
        self, name: str, shape: tuple[int, int], *, bits: int, group_size: int | None, dtype: torch.dtype
    ) -> dict[str, Tensor]: ...


FORMATS: dict[str, Any] = {  # of `Layout`
    "compressed-tensors": compressed_tensors,
    "gptq": gptq.V1,
    "gptq_v2": gptq.V2,
    native.METHOD: native.DEFAULT,
}


def layout_of(config: Mapping[str, Any]) -> Layout:
    """Return the format of a quantization_config.

    Raises:
        FormatError: it is none of `FORMATS`, or a version that is not understood.
    """
    method = config.get("quant_method")
    if method == native.METHOD:
        return native.Native.of(config)
    name = config.get("checkpoint_format") or config.get("format") or "gptq" if method == "gptq" else method
    if not isinstance(name, str) or name not in FORMATS:
        raise FormatError(f"Weights quantized as {method} ({name}) are not understood, only {', '.join(FORMATS)}.")
    layout: Layout = FORMATS[name]
    return layout


def layout_for(format: str | None, scheme: GridScheme | RateScheme) -> Any:
    """Return the format that a scheme's layers are written in: with its coder, where codes are entropy-coded."""
    match scheme:
        case RateScheme():
            return native.Native(coder=scheme.coder, classes=scheme.classes)
        case GridScheme():
            return FORMATS[str(format)]


def open_writer(
    out: Path,
    source: Path,
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    shards: int,
    overwrite: bool = False,
    trust_remote_code: bool = False,
) -> Writer:
    """Return a writer for the folder `out`; nothing is touched before its `with` block begins.

    Inside the block `out` is locked; see `Unfinished`, which also says what becomes of `out`.

    Args:
        out: a new or empty folder, or with `overwrite` one that this program wrote.
        source: the folder of the model that is quantized.
        config: quantization_config as the format made it.
        dtype: of the model; scales have what `scale_dtype` makes of it.
        shards: how often `close_block` will be called.
        overwrite: replace a checkpoint in `out`.
        trust_remote_code: copy the model's Python files.

    Raises:
        RecipeError: `out` is in use, or it is, holds or lies in `source`.
    """
    check_apart(out, source)
    place = Unfinished(out, overwrite=overwrite)
    check_apart(place.folder, source)
    return Writer(place, source, config, dtype, shards, trust_remote_code)


def check_apart(out: Path, source: Path) -> None:
    """Refuse an output folder that is, holds or lies in the model's.

    Raises:
        RecipeError: it does.
    """
    here, there = out.resolve(), source.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise RecipeError(f"The output {out} is, holds or lies in the model's folder {source}. Choose another folder.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The tensors of one layer in the file: their bytes, and the SHA-256 over names, dtypes, shapes and contents."""

    bytes: int
    checksum: str


def written(tensors: Mapping[str, Tensor]) -> Written:
    """Return size and checksum of a layer's tensors: of a line "NAME DTYPE SIZE SIZE ..." and the bytes of each, sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {about(tensor)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return Written(bytes=sum(tensor.nbytes for tensor in tensors.values()), checksum=digest.hexdigest())


class Writer:
    """Writes a checkpoint beside the place that it is for, INCOMPLETE and without config.json until it is whole.

    Set `record_json` before the `with` block ends; `config`, the quantization_config, may be replaced before the first layer.
    """

    def __init__(
        self,
        place: Unfinished,
        source: Path,
        config: Mapping[str, Any],
        dtype: torch.dtype,
        shards: int,
        trust_remote_code: bool,
    ) -> None:
        self.record_json: str | None = None
        self._place, self._out, self._source, self.config = place, place.folder, source, dict(config)
        self._layout = layout_of(config)
        self._scale_dtype = self._layout.scale_dtype(dtype)
        self._total = shards
        self._remote_code = trust_remote_code
        self._shards: ShardWriter
        self._pending: dict[str, Tensor] = {}
        self._size, self._first = 0, ""

    @property
    def size(self) -> int:
        """Bytes of the shards written so far."""
        return self._size

    @property
    def size_beside(self) -> int:
        """Bytes of all other files of the folder but the record, once all shards are written."""
        return self._size_beside(self._shards.index())

    def _size_beside(self, index: str) -> int:
        texts = [config_text(self._source, self.config), index]
        if self.config["quant_method"] == "gptq":
            texts.append(json_text(self.config))
        return size_copied(self._source, trust_remote_code=self._remote_code) + sum(len(t.encode()) for t in texts)

    def size_with(self, *rest: Mapping[str, tuple[str, Sequence[int], int]]) -> int:
        """Return the bytes of the folder but the record, if it ended with these shards, the first with what is collected too.

        Args:
            rest: (dtype in safetensors, shape, bytes) of tensors by name; a shard without any is none.
        """
        ours = {name: (about(each).split()[0], tuple(each.shape), each.nbytes) for name, each in self._pending.items()}
        shards = [shard for shard in (ours | (dict(rest[0]) if rest else {}), *rest[1:]) if shard]
        index = self._shards.index({name: size for shard in shards for name, (_, _, size) in shard.items()})
        return self._size + self._size_beside(index) + sum(map(shard_size, shards))

    def __enter__(self) -> Writer:
        with disk(self._place.out):
            self._place.__enter__()
            self._shards = ShardWriter(self._out, self._total, checksums=isinstance(self._layout, native.Native))
        return self

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of every file of the folder but the record, once all shards are written."""
        texts = {CONFIG: config_text(self._source, self.config), INDEX: self._shards.index()}
        if self.config["quant_method"] == "gptq":
            texts[GPTQ_CONFIG] = json_text(self.config)
        found = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
        found |= {name: sha256(self._out / name) for name in self._shards.names}
        for name in names_copied(self._source, trust_remote_code=self._remote_code):
            found[name] = sha256(self._source / name)
        return dict(sorted(found.items()))

    def add(self, name: str, matrix: QuantizedMatrix, bias: Tensor | None = None) -> Written:
        """Collect one layer for the next shard and return what its tensors are, bias not counted.

        What was packed is read back as a reader would, and compared.

        Raises:
            FormatError: the format cannot hold the matrix, or the config does not describe it.
        """
        matrix = matrix.to("cpu")
        tensors = self._layout.pack_layer(name, matrix, self._scale_dtype)
        self._first = self._first or name  # also where it is given again
        if isinstance(self._layout, native.Native) and name == self._first:
            tensors |= self._layout.stop(name)
        if not matrix.same_as(self._layout.unpack_layer(name, tensors, self.config)):
            raise FormatError(
                f"{name}: what was packed reads back differently: the config describes another grid than its."
            )
        self._pending |= tensors
        if bias is not None:
            self._pending[f"{name}.bias"] = bias
        return written(tensors)

    def close_block(self, rest: Mapping[str, Tensor]) -> int:
        """Write one shard: the layers collected since the last one, and `rest` as it is. Return its size in bytes."""
        if twice := self._pending.keys() & rest.keys():
            raise FormatError(f"{', '.join(sorted(twice))}: given as part of a quantized layer and again as it was.")
        size = self._shards.write(self._pending | dict(rest))
        self._pending = {}
        self._size += size
        return size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        except BaseException as failed:
            self._place.__exit__(type(failed), failed, failed.__traceback__)
            raise
        self._place.__exit__(kind, error, trace)

    def _finish(self) -> None:
        """Write what belongs to the checkpoint beside its shards, config.json last."""
        if self._pending or self.record_json is None:
            raise FormatError(
                f"{self._place.out}: layers without a shard, or no record. Call close_block, set record_json."
            )
        with disk(self._place.out):
            copy_beside(self._source, self._out, trust_remote_code=self._remote_code)
            if self.config["quant_method"] == "gptq":
                (self._out / GPTQ_CONFIG).write_text(json_text(self.config))
            (self._out / RECORD).write_text(self.record_json)
            try:
                (self._out / CONFIG).write_text(config_text(self._source, self.config))
                self._shards.finish()
            except BaseException:
                (self._out / CONFIG).unlink(missing_ok=True)
                raise


def config_text(source: Path, config: Mapping[str, Any]) -> str:
    """Return the config.json of a folder with a quantization_config."""
    return json_text(read_config(source) | {"quantization_config": dict(config)})


def quantization_of(folder: Path) -> dict[str, Any] | None:
    """Return the quantization_config of a folder's config.json, or None where weights are not quantized.

    Raises:
        FormatError: there is no config.json, or it is not JSON, or the folder is not finished.
    """
    if (folder / INCOMPLETE).exists():
        raise FormatError(
            f"{folder} is incomplete: the run that writes it is under way or died. Run it again with --overwrite."
        )
    config = read_config(folder).get("quantization_config")
    if config is not None and not isinstance(config, dict):
        raise FormatError(
            f"{folder / CONFIG}: quantization_config is {str(config)[:40]!r}, expected an object. Fetch it again."
        )
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json.

    Raises:
        FormatError: there is none, or it is no JSON object.
    """
    return read_object(folder / CONFIG, expected="A model's folder has one that save_pretrained or quantize wrote")


class Stored:
    """The quantized layers of a folder, by the names of their tensors; each is read when it is asked for.

    Raises:
        FormatError: the folder holds none, or its format is not understood.
    """

    def __init__(self, folder: Path) -> None:
        config = quantization_of(folder)
        if config is None:
            raise FormatError(f"{folder / CONFIG} has no quantization_config: expected what nearplane quantize wrote.")
        self.config, self.layout, self.reader = config, layout_of(config), _reader(folder, config)
        self._parts = _layers(self.layout, self.reader)

    def names(self) -> list[str]:
        """Return the names of all quantized layers."""
        return list(self._parts)

    def rest(self) -> list[str]:
        """Return the names of the tensors that are not quantized."""
        parts = {part for parts in self._parts.values() for part in parts}
        return [name for name in self.reader.names() if name not in parts]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one layer, checked against the checksums that the folder has."""
        return self.reader.read(self._parts[name])

    def matrix(self, name: str, tensors: Mapping[str, Tensor]) -> QuantizedMatrix:
        """Return what the tensors of one layer mean."""
        return self.layout.unpack_layer(name, tensors, self.config)


def read_matrices(
    folder: Path, *, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> Iterator[tuple[str, QuantizedMatrix]]:
    """Yield (name, matrix) of every quantized layer of a folder, one in memory at a time.

    Args:
        shapes: of all parameters of the model that it is read for, see `weight_shapes`: what does not fit takes no memory.

    Raises:
        FormatError: a layer is not what its format says or the model expects, or the format is not understood.
    """
    if quantization_of(folder) is None:
        return
    stored = Stored(folder)
    for name in stored.names():
        tensors = stored.tensors(name)
        if shapes is not None:
            part = next(iter(tensors))
            _check_shape(
                f"{stored.reader.file(part)}: {part}", f"{name}.weight", stored.layout.shape_of(name, tensors), shapes
            )
        yield name, stored.matrix(name, tensors)


def _check_shape(called: str, name: str, found: tuple[int, int], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a matrix that the model does not expect; of names that it does not have, what is larger than all it has."""
    wanted = shapes.get(name)
    if wanted is None and math.prod(found) > (most := max(math.prod(shape) for shape in shapes.values())):
        raise FormatError(
            f"{called} holds a matrix {found[0]} x {found[1]}; no weight of the model that config.json describes has more than "
            f"{most:,} elements. The two do not belong together; fetch the folder again."
        )
    if wanted is not None and found != wanted:
        raise FormatError(
            f"{called} holds a matrix {found[0]} x {found[1]}, config.json asks for {' x '.join(map(str, wanted))}. The two do not "
            f"belong together; fetch the folder again."
        )


def read_dense(
    folder: Path, *, transposed: Collection[str] = (), shapes: Mapping[str, tuple[int, ...]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (parameter name, tensor) of a folder as if it had never been quantized, one in memory at a time.

    A quantized layer is its float32 values `scale * (code - zero)` as `name.weight`: (out, in), or (in, out) where
    that name is in `transposed`, as Conv1D modules have them. Everything else is as stored.

    Args:
        transposed: see `stored_transposed`.
        shapes: as for `read_matrices`.

    Raises:
        FormatError: a layer is not what its format says or the model expects, or the format is not understood.
    """
    config = quantization_of(folder)
    reader = _reader(folder, config)
    layers = {} if config is None else _layers(layout_of(config), reader)
    packed = {part for parts in layers.values() for part in parts}
    for name in reader.names():
        if name not in packed:
            yield name, reader.read([name])[name]
    for name, matrix in read_matrices(folder, shapes=shapes):
        values = matrix.decode()
        yield f"{name}.weight", values.T.contiguous() if f"{name}.weight" in transposed else values


def _reader(folder: Path, config: Mapping[str, Any] | None) -> ShardReader:
    """Return a reader of a folder, which is complete if its format can tell."""
    reader = ShardReader(folder)
    if config is not None and config.get("quant_method") == native.METHOD:
        reader.check_complete()
    return reader


def _layers(layout: Layout, reader: ShardReader) -> dict[str, list[str]]:
    """Return the names of the tensors of every quantized layer, by the name of the layer."""
    names = set(reader.names())
    layers = [name.removesuffix(f".{layout.KEY}") for name in reader.names() if name.endswith(f".{layout.KEY}")]
    return {layer: [part for s in layout.SUFFIXES if (part := f"{layer}.{s}") in names] for layer in layers}


def json_text(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"


class disk:  # noqa: N801  (a context manager used like a function)
    """Turn what the file system refuses into a sentence."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError):
            raise FormatError(
                f"{self.folder} could not be written ({error}). Free some space or choose another folder, and run again; "
                f"what was written so far does not load."
            ) from error

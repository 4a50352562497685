"""A checkpoint that is being written: which files it has, and that nobody takes it for whole before it is.

What all kinds of checkpoints have in common is here: layers are packed and read back, blocks are written as they come, and the
result takes the place of OUT at the end. A subclass says what its files are; `Folder` is the one of safetensors.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearplane.errors import FormatError, RecipeError
from nearplane.formats.beside import CONFIG, copy_beside, names_copied, size_copied
from nearplane.formats.layer_format import ConfigFile, LayerFormat, config_text
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.record.record import RunRecord
from nearplane.system.files import sha256
from nearplane.system.output_folder import Unfinished
from nearplane.system.paths import RECORD
from nearplane.system.progress import peak_memory
from nearplane.system.safetensors_files import INDEX, ShardReader, ShardWriter, TensorReader, about, shard_size

Kind = tuple[str, Sequence[int], int]  # of a tensor: dtype in safetensors, shape, bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a checkpoint is written, and whose.

    Args:
        out: a new or empty folder, or with `overwrite` one that this program wrote.
        source: the folder of the model that is quantized.
        overwrite: replace a checkpoint in `out`.
        trust_remote_code: copy the model's Python files.
        network: config.json as transformers completes it, for formats that say the shape of the network themselves.
        tokenizer: folder with its tokenizer as tokenizer.json, if it has one, for formats that say it themselves; None: `source`.
        resumes: keep what a run that was stopped left, see `Container.found`.
    """

    out: Path
    source: Path
    overwrite: bool = False
    trust_remote_code: bool = False
    network: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Path | None = None
    resumes: bool = False


class Container(ABC):
    """Writes a checkpoint beside the place that it is for; nothing is touched before its `with` block begins.

    Inside the block `out` is locked; see `Unfinished`, which also says what becomes of it. Call `seal`, or set `record_json`,
    before the block ends: then the record and config.json are written and the folder takes the place of `out`. `config`, the
    quantization_config, and `room`, the bytes that files keep free for a record of the run, may be set before the first layer.

    Args:
        place: where.
        format: how a layer's tensors look, and what the config says of them.
        config: the quantization_config as `format` made it.
        dtype: of the model; steps have what `scale_dtype` makes of it.
        shards: how often `close_block` will be called.

    Raises:
        RecipeError: `out` is in use, or it is, holds or lies in `source`.
    """

    def __init__(
        self, place: Place, format: Format, config: Mapping[str, Any], *, dtype: torch.dtype, shards: int
    ) -> None:
        check_apart(place.out, place.source)
        self.place, self.layers, self.says, self.config = place, format.layers, format.config, dict(config)
        self.shards = shards
        self.record_json: str | None = None
        self.room = 0
        self.size = 0  # bytes of what `close_block` wrote so far
        with disk(place.out):  # that may not even be looked at
            self._unfinished = Unfinished(place.out, overwrite=place.overwrite, resumes=place.resumes)
        self.folder = self._unfinished.folder  # where files are written meanwhile
        check_apart(self.folder, place.source)
        self._scale_dtype = self.layers.scale_dtype(dtype)
        self.pending: dict[str, Tensor] = {}  # of layers, for the next block
        self._first = ""

    @abstractmethod
    def begin(self) -> None:
        """Get ready to write into `folder`, which is there."""

    @abstractmethod
    def write(self, tensors: Mapping[str, Tensor]) -> int:
        """Write the tensors of one block; return the bytes that they take on disk."""

    @abstractmethod
    def size_with(self, *rest: Mapping[str, Kind]) -> int:
        """Return the bytes of all files but the record, if the checkpoint ended with these blocks.

        Args:
            rest: tensors by name that are still to come, by block; the first is written with what is collected. A block without
                any is none.
        """

    @abstractmethod
    def weight_digests(self) -> dict[str, str]:
        """Return the SHA-256 of the files of weights, once all blocks are written."""

    @abstractmethod
    def close(self) -> None:
        """Complete the files of weights, and take the mark INCOMPLETE away: all other files are there."""

    def texts(self) -> dict[str, str]:
        """Return the files that say how weights are quantized, config.json last."""
        return self.says.files(self.config) | {CONFIG: config_text(self.place.source, self.config)}

    def size_beside(self) -> int:
        """Return the bytes of all files but those of weights and the record."""
        copied = size_copied(self.place.source, trust_remote_code=self.place.trust_remote_code)
        return copied + sum(len(text.encode()) for text in self.texts().values())

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of every file but the record, once all blocks are written."""
        found = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in self.texts().items()}
        for name in names_copied(self.place.source, trust_remote_code=self.place.trust_remote_code):
            found[name] = sha256(self.place.source / name)
        return dict(sorted((found | self.weight_digests()).items()))

    def finish(self) -> None:
        """Write every other file but the record; what makes readers take the checkpoint for whole comes last."""
        copy_beside(self.place.source, self.folder, trust_remote_code=self.place.trust_remote_code)
        try:
            for name, text in self.texts().items():
                (self.folder / name).write_text(text)
            self.close()
        except BaseException:
            (self.folder / CONFIG).unlink(missing_ok=True)
            raise

    def tell(self, record: RunRecord) -> None:
        """Write the record into the files, where they have room for it; most kinds have none."""
        del record

    def seal(self, record: RunRecord, timed: Callable[[RunRecord], RunRecord]) -> RunRecord:
        """Complete the record, which says last how much all is and how long it took; return it. Call it behind the last block.

        Args:
            record: but for that.
            timed: fills in the seconds, once all other files are read.
        """
        record = replace(record, bytes=self.size)
        self.tell(record)
        record = replace(record, files=self.digests(), peak_memory=peak_memory())
        record = timed(record).in_folder(self.size_with())
        self.record_json = record.to_json()
        return record

    def state(self) -> dict[str, Any] | None:
        """Return as JSON what was written, all of it on disk, for `go_on`; None: this kind of checkpoint begins anew."""
        return None

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Go on behind what `state` tells of, in place of `begin`; files that it does not name are deleted.

        Raises:
            FormatError: a file is missing, or is not what was written; says which.
        """
        raise NotImplementedError

    def __enter__(self) -> Container:
        with disk(self.place.out):
            self._unfinished.__enter__()
            if not self.found:
                self.begin()
        return self

    @property
    def found(self) -> bool:
        """Whether a run left what can be gone on with: then call `go_on` or `begin_anew` before anything else."""
        return self.place.resumes and self._unfinished.goes_on

    @property
    def whole(self) -> bool:
        """Whether a run left all of it: then there is nothing to do inside the `with` block."""
        return self.found and self._unfinished.whole

    def begin_anew(self) -> None:
        """Delete what a run left, and begin."""
        with disk(self.place.out):
            self._unfinished.clear()
            self.size, self.pending, self._first = 0, {}, ""
            self.begin()

    def add(self, name: str, matrix: QuantizedMatrix, bias: Tensor | None = None) -> Written:
        """Collect one layer for the next block and return what its tensors are, bias not counted.

        What was packed is read back as a reader would, and compared.

        Raises:
            FormatError: the format cannot hold the matrix, or the config does not describe it.
        """
        matrix = matrix.to("cpu")
        tensors = self.layers.pack(name, matrix, self._scale_dtype)
        self._first = self._first or name  # also where it is given again
        if name == self._first:
            tensors |= self.layers.beside_the_first(name)
        if not matrix.same_as(self.layers.unpack(name, tensors, self.says.grid_of(self.config, name))):
            raise FormatError(
                f"{name}: what was packed reads back differently: the config describes another grid than its."
            )
        self.pending |= tensors
        if bias is not None:
            self.pending[f"{name}.bias"] = bias
        return written(tensors)

    def close_block(self, rest: Mapping[str, Tensor]) -> int:
        """Write the layers collected since the last block, and `rest` as it is. Return the bytes that they take on disk."""
        if twice := self.pending.keys() & rest.keys():
            raise FormatError(f"{', '.join(sorted(twice))}: given as part of a quantized layer and again as it was.")
        size = self.write(self.pending | dict(rest))
        self.pending = {}
        self.size += size
        return size

    def __exit__(self, kind: type[BaseException] | None, *raised: Any) -> None:
        try:
            if kind is None and not self.whole:
                if self.pending or self.record_json is None:
                    raise FormatError(
                        f"{self.place.out}: layers without a shard, or no record. Call close_block, set record_json."
                    )
                with disk(self.place.out):
                    (self.folder / RECORD).write_text(self.record_json)
                    self.finish()
        except BaseException as failed:
            self._unfinished.__exit__(type(failed), failed, failed.__traceback__)
            raise
        self._unfinished.__exit__(kind, *raised)


class Folder(Container):
    """A folder of safetensors: a shard for each block; without config.json and marked INCOMPLETE until it is whole."""

    _writer: ShardWriter

    def begin(self) -> None:
        """Begin the first shard."""
        self._writer = ShardWriter(self.folder, self.shards, checksums=self.layers.CHECKSUMS)

    def write(self, tensors: Mapping[str, Tensor]) -> int:
        """Write one shard."""
        return self._writer.write(tensors)

    def state(self) -> dict[str, Any]:
        """Return which shards were written, flushed to disk."""
        return {"size": self.size, "first": self._first, "shards": self._writer.state()}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Go on behind the shards of a run that was stopped."""
        self.begin()
        self._writer.go_on(state["shards"])
        self.size, self._first = int(state["size"]), str(state["first"])

    def size_with(self, *rest: Mapping[str, Kind]) -> int:
        """Return the bytes of the folder but the record, if it ended with these shards."""
        ours = {name: (about(each).split()[0], tuple(each.shape), each.nbytes) for name, each in self.pending.items()}
        blocks: Sequence[Mapping[str, Kind]] = (ours | dict(rest[0]) if rest else ours, *rest[1:])
        shards = [shard for shard in blocks if shard]
        index = self._writer.index({name: size for shard in shards for name, (_, _, size) in shard.items()})
        return self.size + sum(map(shard_size, shards)) + len(index.encode()) + self.size_beside()

    def weight_digests(self) -> dict[str, str]:
        """Return the SHA-256 of every shard and of the index, once all shards are written."""
        return self._writer.digests() | {INDEX: hashlib.sha256(self._writer.index().encode()).hexdigest()}

    def close(self) -> None:
        """Write the index."""
        self._writer.finish()


class Format(NamedTuple):
    """A format: how a layer's tensors look, what the config says of them, which files there are, and what reads their tensors."""

    layers: LayerFormat
    config: ConfigFile
    container: type[Container] = Folder
    reader: Callable[..., TensorReader] = ShardReader


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


@contextmanager
def disk(folder: Path) -> Iterator[None]:
    """Turn what the file system refuses into a sentence."""
    try:
        yield
    except OSError as error:
        raise FormatError(
            f"{folder} could not be written ({error}). Free some space or choose another folder, and run again; "
            f"what was written so far does not load."
        ) from error

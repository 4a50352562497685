"""A checkpoint while it is written: its files, and the marks by which readers refuse it until it is complete.

All kinds of checkpoints share this code: it packs layers and reads them back, writes block by block, and puts the
result in the place of OUT at the end. A subclass defines the files; `Folder` writes a folder of safetensors.
"""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearplane.errors import FormatError
from nearplane.formats.beside import Beside, changed_card, origin_of
from nearplane.formats.layer_format import INPUT_SCALE, LayerFormat, config_text
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.record.model_card import model_card
from nearplane.record.record import RunRecord
from nearplane.system.files import sha256
from nearplane.system.output_folder import Unfinished, readable_errors
from nearplane.system.paths import CARD, CONFIG, RECORD
from nearplane.system.progress import peak_memory
from nearplane.system.safetensors_files import Kind, ShardReader, TensorReader, kind_of
from nearplane.system.shard_writer import ShardWriter

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place of a checkpoint on disk, and the model that it is made from.

    Args:
        out: A new or empty folder, or with `overwrite` one that this program wrote.
        source: The folder of the model that is quantized.
        overwrite: Whether a checkpoint in `out` may be replaced.
        trust_remote_code: Whether the model's Python files are copied.
        vocabulary: Names of the files that the class of the model's tokenizer reads; see `Beside`.
        network: config.json as transformers completes it, for formats with a header that describes the network.
        tokenizer: The folder of tokenizer.json, for formats that store the tokenizer; None: `source`.
        reader: Reader of the model's dense tensors, for formats that plan all tensors first; None: it is made from `source`.
        resumes: Whether the files of a stopped run are kept, see `Container.resumable`.
        like: A GGUF of the model whose header and unquantized tensors the new one takes.
    """

    out: Path
    source: Path
    overwrite: bool = False
    trust_remote_code: bool = False
    vocabulary: Sequence[str] = ()
    network: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Path | None = None
    reader: TensorReader | None = None
    resumes: bool = False
    like: Any = None


class Container(ABC):
    """Writer of a checkpoint, in a temporary folder beside `out`; it touches nothing before its `with` block begins.

    `out` is locked inside the block, see `Unfinished`. Call `seal`, or set `record_json`, before the block ends: then
    the record (none if the text is empty) and config.json are written, and the folder takes the place of `out`.
    `config` (the quantization_config) and `room` (the bytes that files reserve for the run record) may be set before the
    first layer.

    Args:
        place: The output folder and the model's folder.
        format: The tensors of a layer, and the config that describes them.
        config: The quantization_config as `format` made it.
        dtype: The model's dtype; `scale_dtype` gives the dtype of steps from it.
        shards: The number of calls of `close_block`.

    Raises:
        RecipeError: `out` is in use, or `out` and `source` are the same folder or one lies in the other.
        ModelError: A file of `source` cannot be copied, see `Beside.check`.
    """

    def __init__(
        self, place: Place, format: Format, config: Mapping[str, Any], *, dtype: torch.dtype, shards: int
    ) -> None:
        self.place, self.layers, self.config = place, format.layers, dict(config)
        self.shards = shards
        self.record_json: str | None = None
        self._origin, self._card = origin_of(place.source), ""
        self.room = 0
        self.size = 0  # bytes that `close_block` has written so far; after `join` those of the weight files
        overwrite, resumes = place.overwrite, place.resumes
        self._beside = Beside(
            source=place.source, trust_remote_code=place.trust_remote_code, vocabulary=place.vocabulary
        )
        self._beside.check()
        self._beside = replace(self._beside, known=self._beside.names())  # without what is added during the run
        self._unfinished = Unfinished(place.out, overwrite=overwrite, resumes=resumes, sources=[place.source])
        self.folder = self._unfinished.folder  # files are written here until the checkpoint is complete
        self._scale_dtype = self.layers.scale_dtype(dtype)
        self.pending: dict[str, Tensor] = {}  # tensors of the layers of the next block
        self._first = ""

    @abstractmethod
    def begin(self) -> None:
        """Prepare to write into `folder`, which exists."""

    @abstractmethod
    def write(self, tensors: Mapping[str, Tensor]) -> int:
        """Write the tensors of one block; return their bytes on disk."""

    @abstractmethod
    def size_with(self, *blocks: Mapping[str, Kind]) -> int:
        """Return the bytes of all files but the record and the model card, if the checkpoint ended with these blocks.

        Args:
            blocks: The tensors of each later block, by name; collected layers join the first. Empty blocks do not count.
        """

    def join(self) -> None:  # noqa: B027
        """Make the weight files of what was written, and refuse what has changed since; all blocks are written by then."""

    @abstractmethod
    def weight_digests(self) -> dict[str, str]:
        """Return the SHA-256 of every weight file, after `join`."""

    @abstractmethod
    def close(self) -> None:
        """Complete the weight files and delete the mark INCOMPLETE; all other files exist by then."""

    def texts(self) -> dict[str, str]:
        """Return the files that describe the quantization, config.json last."""
        return self.layers.files(self.config) | {
            CONFIG: config_text(self.place.source, self.config, self.place.network)
        }

    def size_beside(self) -> int:
        """Return the bytes of all files except the weight files, the record and the model card."""
        return self._beside.size() + sum(len(text.encode()) for text in self.texts().values())

    def tokenizer_read_again(self) -> dict[str, str]:
        """Return the texts of the tokenizer's files as readers of this format make them; {} where the files are copied."""
        return {}

    def card(self, record: RunRecord) -> str:
        """Return the model card of a record; files, sizes of the folder and times may be missing in it."""
        return model_card(record, self._origin)

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of every file except the record and the model card, once all blocks are written."""
        hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in self.texts().items()}
        for name in self._beside.names():
            hashes[name] = sha256(self.place.source / name)
        return dict(sorted((hashes | self.weight_digests()).items()))

    def finish(self) -> None:
        """Write all other files except the record; those by which readers accept the checkpoint come last."""
        self._beside.copy(self.folder)
        if self._card:
            (self.folder / CARD).write_text(self._card, encoding="utf-8")
        try:
            for name, text in self.texts().items():
                (self.folder / name).write_text(text)
            self.close()
        except BaseException:
            (self.folder / CONFIG).unlink(missing_ok=True)
            raise

    def embed(self, record: RunRecord) -> None:
        """Embed the record in the weight files, where a format has a place for it; most have none."""
        del record

    def seal(self, record: RunRecord, timed: Callable[[RunRecord], RunRecord]) -> RunRecord:
        """Add sizes, hashes, memory and time to the record and return it. Call this after the last block.

        A model card is written too, unless the checkpoint to be replaced has one that a user changed.

        Args:
            record: The record without these values.
            timed: The function that adds the seconds, called after all other files were hashed.
        """
        with readable_errors(self.place.out):
            self.join()
        record = replace(record, bytes=self.size)
        self.embed(record)
        record = replace(record, files=self.digests(), peak_memory=peak_memory())
        if changed_card(self.place.out):
            remedy = f"nearplane card {self.place.out} --overwrite replaces it"
            log.warning("%s was changed by hand and is kept as it is; %s.", self.place.out / CARD, remedy)
        else:
            self._card = self.card(record)
        record = replace(record, card=len(self._card.encode()))
        record = timed(record).in_folder(self.size_with() + record.card)
        self.record_json = record.to_json()
        return record

    def state(self) -> dict[str, Any] | None:
        """Flush all files to disk and return their state as JSON, for `resume`; None: this kind cannot resume."""
        return None

    def resume(self, state: Mapping[str, Any]) -> None:
        """Resume after the blocks in `state`, instead of `begin`; files that `state` does not list are deleted.

        Raises:
            FormatError: A file is missing or changed; the message names it.
        """
        raise NotImplementedError

    def __enter__(self) -> Container:
        with readable_errors(self.place.out):
            self._unfinished.__enter__()
            self._beside.log_left_out(self.place.out)
            if not self.resumable:
                self.begin()
        return self

    @property
    def resumable(self) -> bool:
        """Whether a stopped run can be resumed; if so, call `resume` or `restart` first."""
        return self.place.resumes and self._unfinished.resumable

    @property
    def whole(self) -> bool:
        """Whether a stopped run had written all files; then nothing is left to do inside the `with` block."""
        return self.resumable and self._unfinished.whole

    def restart(self) -> None:
        """Delete the files of the stopped run and begin."""
        with readable_errors(self.place.out):
            self._unfinished.clear()
            self.size, self.pending, self._first = 0, {}, ""
            self.begin()

    def add(
        self, name: str, matrix: QuantizedMatrix, bias: Tensor | None = None, *, input_scale: float | None = None
    ) -> Written:
        """Collect one layer for the next block and return the size and checksum of its tensors without the bias.

        The packed tensors are unpacked as a reader would do it, and compared with the matrix, where its codes are.

        Args:
            name: Name of the layer in the checkpoint.
            matrix: The quantized matrix.
            bias: The layer's bias, if it is stored here.
            input_scale: Number by which runtimes divide the steps of its rounded inputs, if they do.

        Raises:
            FormatError: The format cannot hold the matrix, or the config does not describe it.
        """
        if not self.layers.packs_on_device(matrix):
            matrix = matrix.to("cpu")
        tensors = self.layers.pack(name, matrix, self._scale_dtype)
        self._first = self._first or name  # also where a layer is added again
        if name == self._first:
            tensors |= self.layers.beside_the_first(name)
        if not matrix.same_as(self.layers.unpack(name, tensors, self.layers.grid_of(self.config, name))):
            raise FormatError(f"{name}: the packed layer reads back differently: the config describes another grid.")
        tensors = {full_name: tensor.cpu() for full_name, tensor in tensors.items()}
        if input_scale is not None:
            tensors[f"{name}.{INPUT_SCALE}"] = torch.tensor([input_scale], dtype=torch.float32)
        self.pending |= tensors
        if bias is not None:
            self.pending[f"{name}.bias"] = bias
        return written(tensors)

    def close_block(self, unquantized: Mapping[str, Tensor]) -> int:
        """Write the layers collected since the last block, and unquantized tensors. Return their bytes on disk."""
        if duplicates := self.pending.keys() & unquantized.keys():
            raise FormatError(f"{', '.join(sorted(duplicates))}: given as part of a quantized layer and unquantized.")
        size = self.write(self.pending | dict(unquantized))
        self.pending = {}
        self.size += size
        return size

    def __exit__(self, kind: type[BaseException] | None, *raised: Any) -> None:
        try:
            if kind is None and not self.whole:
                if self.pending or self.record_json is None:
                    raise FormatError(
                        f"{self.place.out}: layers without a shard, or no record. Call close_block and set record_json."
                    )
                with readable_errors(self.place.out):
                    if self.record_json:
                        (self.folder / RECORD).write_text(self.record_json)
                    self.finish()
        except BaseException as failure:
            self._unfinished.__exit__(type(failure), failure, failure.__traceback__)
            raise
        self._unfinished.__exit__(kind, *raised)


class Folder(Container):
    """A folder of safetensors; until the end it has a part per block, lacks config.json and is marked INCOMPLETE."""

    _writer: ShardWriter

    def begin(self) -> None:
        """Begin the first part."""
        self._writer = ShardWriter(self.folder, self.shards, checksums=self.layers.CHECKSUMS, kind=self.layers.METADATA)

    def write(self, tensors: Mapping[str, Tensor]) -> int:
        """Write one part."""
        return self._writer.write(tensors)

    def state(self) -> dict[str, Any]:
        """Flush the parts to disk and return their state."""
        return {"size": self.size, "first": self._first, "shards": self._writer.state()}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Resume after the parts of a stopped run."""
        self.begin()
        self._writer.resume(state["shards"])
        self.size, self._first = int(state["size"]), str(state["first"])

    def size_with(self, *blocks: Mapping[str, Kind]) -> int:
        """Return the bytes of the folder without the record, if it ended with these blocks."""
        kinds = {
            name: (kind_of(each).split()[0], tuple(each.shape), each.nbytes) for name, each in self.pending.items()
        }
        all_blocks: Sequence[Mapping[str, Kind]] = (kinds | dict(blocks[0]) if blocks else kinds, *blocks[1:])
        return self._writer.size_with(*(block for block in all_blocks if block)) + self.size_beside()

    def join(self) -> None:
        """Join the parts to files."""
        self.size = self._writer.join()

    def weight_digests(self) -> dict[str, str]:
        """Return the SHA-256 of every file and of the index."""
        return self._writer.digests()

    def close(self) -> None:
        """Join the parts, unless `seal` has done it, and write the index."""
        self.join()
        self._writer.finish()


class Format(NamedTuple):
    """A container format: the tensors of a layer with their config, the files, and the reader of the tensors."""

    layers: LayerFormat
    container: Callable[..., Container] = Folder
    reader: Callable[..., TensorReader] = ShardReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Size in bytes and checksum of one layer's tensors in the file, see `written`."""

    bytes: int
    checksum: str


def written(tensors: Mapping[str, Tensor]) -> Written:
    """Return size and checksum of a layer's tensors: SHA-256 of "NAME DTYPE SIZE SIZE ..." lines and bytes, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {kind_of(tensor)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return Written(bytes=sum(tensor.nbytes for tensor in tensors.values()), checksum=digest.hexdigest())

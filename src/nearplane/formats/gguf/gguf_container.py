"""Writer of OUT/model.gguf: first the header, then every tensor at the position that the header gives.

The types of all layers determine all sizes before the solve, so that each network block is written once it is solved.
config.json, the tokenizer's files and the run record lie beside the file, for the commands that read OUT.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import struct
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from nearplane.errors import INSTALL, FormatError, RecipeError
from nearplane.formats.container import Container, Format, Place
from nearplane.formats.gguf import nvfp4_blocks
from nearplane.formats.gguf.architecture import architecture_of, rope_factors, tell
from nearplane.formats.gguf.gguf_header import (
    DIVISORS,
    FILE,
    FOUR_BITS,
    GLOBAL_SCALE,
    KEY_PREFIX,
    MARKED,
    METADATA,
    NUMBER,
    RECORD_KEY,
    SCALE,
    SHA_SIZE,
    STAR,
    SUMS,
    TENSORS,
    Info,
    metadata_digest,
    nbytes,
    padded,
    parts_of,
    read_header,
)
from nearplane.formats.gguf.gguf_reader import DENSE, divisors_of
from nearplane.formats.gguf.names import is_scale, llama_names, reshaping, rule_of, stacked_name
from nearplane.formats.gguf.tokenizer_files import tokenizer_files
from nearplane.formats.layer_format import read_config
from nearplane.number_formats import GGUF_TYPES
from nearplane.record.record import RunRecord
from nearplane.system.files import flush_all, sha256
from nearplane.system.paths import INCOMPLETE, RECORD
from nearplane.system.safetensors_files import DTYPE_NAMES, Kind, TensorReader
from nearplane.system.source_storage import source_reader

EMBEDDING_TENSORS = ("token_embd.weight", "output.weight")
logger = logging.getLogger("nearplane")


def gguf_package() -> ModuleType:
    """Return the package gguf, which writes headers.

    Raises:
        RecipeError: The package is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise RecipeError(f"--format gguf needs the package gguf. Run {INSTALL['gguf']}.") from error
    logging.getLogger("gguf").setLevel(logging.ERROR)
    package: ModuleType = gguf
    return package


class GGUFFile(Container):
    """A GGUF and the files beside it, marked INCOMPLETE until the end.

    Raises:
        RecipeError: llama.cpp would not load the file or compute something else, or for a reason of `Container`.
    """

    def __init__(
        self, place: Place, format: Format, config: Mapping[str, Any], *, dtype: torch.dtype, shards: int
    ) -> None:
        super().__init__(place, format, config, dtype=dtype, shards=shards)
        gguf_package()
        self._network = dict(place.network)
        self._prepare()
        self._file: BinaryIO | None = None
        self._record = b""
        self.begin()

    def _prepare(self) -> None:
        """Refuse networks that llama.cpp does not compute, and name their tensors."""
        self._header()
        self._source = self.place.reader or source_reader(self.place.source, read_config(self.place.source))
        llama_names(self._source.names(), self._network)  # refuses tensors that llama.cpp does not have

    def begin(self) -> None:
        """Reset the state; the file is created with the first block, as types of layers may change until then."""
        if self._file is not None:
            self._file.close()
        self._file, self._size = None, 0  # bytes of the file
        self._infos: dict[str, Info] = {}  # by name in the checkpoint
        self._sums: dict[str, str] = {}

    def _header(self) -> Any:
        """Return a `gguf.GGUFWriter` with all metadata except those of the tensors."""
        gguf = gguf_package()
        from nearplane.formats.gguf.tokenizer import vocabulary  # imports the package gguf

        writer = gguf.GGUFWriter(None, architecture_of(self._network).name)
        writer.add_name(self.place.source.name)
        tell(writer, self._network)
        writer.add_file_type(self._file_type())
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        folder = self.place.tokenizer or self.place.source
        vocabulary(folder, self._network["vocab_size"], self.config.get("pre")).write(writer, folder)
        return writer

    def _file_type(self) -> int:
        """Return llama.cpp's number for files of the most frequent type of layers."""
        types = list(self.config["types"].values())
        usual = f"MOSTLY_{max(sorted(set(types)), key=types.count) if types else 'f16'}".upper()
        known = gguf_package().LlamaFileType.__members__
        return int(next(known[usual + end] for end in ("", "_M", "_MOE") if usual + end in known))

    def _begin_file(self, path: Path) -> int:
        """Write the header; return the number of bytes that the file will have in the end."""
        import gguf

        writer, factors = self._header(), rope_factors(self._network)
        planned = planned_tensors(self._source, self._network, self.config)
        names = [*planned, *("" for _ in factors)]
        writer.add_string(f"{KEY_PREFIX}quantization_config", json.dumps(self.config))
        writer.add_string(RECORD_KEY, " " * max(self.room, 1))  # overwritten in the end, as are the hashes
        writer.add_string(METADATA, "0" * SHA_SIZE)
        writer.add_array(TENSORS, names)
        writer.add_array(SUMS, ["0" * SHA_SIZE * (planned[name][1][0] if STAR in name else 1) for name in names])
        if marked := [name for name, _, kind in planned.values() if kind == nvfp4_blocks.KIND.number]:
            count = sum(math.prod(shape) for name, shape, _ in planned.values() if is_scale(name))
            writer.add_array(MARKED, marked)
            writer.add_array(FOUR_BITS, [False] * len(marked))
            writer.add_array(DIVISORS, [0.0] * count)  # overwritten once they are known
        tensors = [*planned.values(), *((name, tuple(each.shape), 0) for name, each in factors.items())]
        for name, shape, kind in tensors:
            size = nbytes(path, name, shape, kind)
            writer.add_tensor_info(name, shape, torch.empty(0).numpy().dtype, size, gguf.GGMLQuantizationType(kind))
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        return padded(path.stat().st_size) + sum(padded(nbytes(path, *each)) for each in tensors)

    def _open(self) -> BinaryIO:
        """Write the header and reserve space for the data."""
        path = self.folder / FILE
        size = self._begin_file(path)
        file = path.open("r+b")
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # detects a full disk now
        except AttributeError:  # not on this operating system
            file.truncate(size)
        self._find_places(path)
        path.chmod((self.folder / INCOMPLETE).stat().st_mode)
        return file

    def _find_places(self, path: Path) -> None:
        """Read the positions of tensors from the header; tensors that no checkpoint has keep the file's names."""
        header = read_header(path)
        self._fields, self._places, self._size, self._infos = header.fields, header.places, header.size, {}
        for name, info in zip(header.fields[TENSORS], header.tensors, strict=True):
            self._infos |= parts_of(info, name or info.name)
        self._divisors = list(divisors_of(path, header, self._infos))

    def state(self) -> dict[str, Any]:
        """Flush the file to disk and return the tensors that were written."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        return {"size": self.size, "first": self._first, "sums": self._sums}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Resume after the tensors of a stopped run; all others are written again."""
        path, sums = self.folder / FILE, dict(state["sums"])
        if not sums:
            path.unlink(missing_ok=True)
            return
        if not path.is_file():
            raise FormatError(f"{path} is missing, so the stopped run cannot be resumed. Start again with --overwrite.")
        self._find_places(path)
        if path.stat().st_size != self._size:
            raise FormatError(
                f"{path} has changed, so the stopped run cannot be resumed. Start again with --overwrite."
            )
        self._sums, self.size, self._first = sums, int(state["size"]), str(state["first"])
        self._check_tensors(path, "so the stopped run cannot be resumed")
        self._file = path.open("r+b")

    def _check_tensors(self, path: Path, fault: str) -> None:
        """Refuse a file in which a tensor is not the one that was written; `fault` says what follows from it."""
        with path.open("rb") as file:
            for name, info in self._infos.items():
                if name in self._sums:
                    file.seek(info.begin)
                    if hashlib.sha256(file.read(info.size)).hexdigest() != self._sums[name]:
                        raise FormatError(f"{path}: {name} has changed, {fault}. Start again with --overwrite.")

    def join(self) -> None:
        """Compare the file with what was written to it."""
        path, fault = self.folder / FILE, "although only this run writes it"
        if self._file is not None:
            self._file.flush()
            if not path.is_file() or path.stat().st_size != self._size:
                what = "has changed" if path.is_file() else "is missing"
                raise FormatError(f"{path} {what}, {fault}. Start again with --overwrite.")
            if str(read_header(path).fields) != str(self._fields):
                raise FormatError(f"{path}: its header has changed, {fault}. Start again with --overwrite.")
            self._check_tensors(path, fault)

    def write(self, tensors: Mapping[str, Tensor]) -> int:
        """Write the tensors of one block; return their bytes, with the first block also those of the header."""
        size = 0
        try:
            if self._file is None:
                tensors = {**tensors, **self._start()}
                size = self._size - sum(map(self._share, self._infos))
            assert self._file is not None, "opened above"
            size += self._store(self._file, tensors)
            self._file.flush()
        except OSError as error:
            raise FormatError(
                f"{self.folder / FILE} could not be written ({error}). Free some space and repeat the command. The folder is "
                f"marked {INCOMPLETE} and does not load."
            ) from error
        return size

    def _start(self) -> dict[str, Tensor]:
        """Create the file; return tensors that no checkpoint has."""
        self._file = self._open()
        return rope_factors(self._network)

    def _share(self, name: str) -> int:
        """Return the bytes of a tensor that are counted when its block is written."""
        info = self._infos[name]
        return padded(info.begin + info.size) - padded(info.begin)

    def _store(self, file: BinaryIO, tensors: Mapping[str, Tensor]) -> int:
        """Write tensors of the checkpoint; return their bytes with the padding after them."""
        size = 0
        for name, tensor in tensors.items():
            stem, _, suffix = name.rpartition(".")
            if suffix == GLOBAL_SCALE:
                self._list(file, name, float(tensor))
            elif suffix in self.layers.SUFFIXES:
                name = f"{stem}.weight"
            if (info := self._infos.get(name)) is not None:  # llama.cpp needs no others
                rule = rule_of(info.name, self._fields, dims=1 if info.type not in DENSE else tensor.dim())
                self._put(file, name, info, rule.into(tensor.detach().cpu()))
                size += self._share(name)
        return size

    def _list(self, file: BinaryIO, name: str, divisor: float) -> None:
        """Write a global scale into the list of the header."""
        place = self._divisors.index(name)
        self._fields[DIVISORS][place] = divisor
        file.seek(self._places[DIVISORS].start + 4 + 8 + 4 * place)  # after type and number of entries
        file.write(struct.pack("<f", divisor))

    def _put(self, file: BinaryIO, name: str, info: Info, tensor: Tensor) -> None:
        """Write one tensor in the type that the header gives."""
        if info.type in DENSE:
            tensor = tensor.to(DENSE[info.type])
            if not bool(torch.isfinite(tensor).all()):
                remedy = "Use --embeddings bf16" if info.name in EMBEDDING_TENSORS else "Remove it from --ignore"
                raise FormatError(f"{name} has values that {DTYPE_NAMES[tensor.dtype]} cannot represent. {remedy}.")
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        if len(data) != info.size:
            raise FormatError(f"{name} has {len(data)} bytes, expected {info.size} for {info.name}.")
        if name in self._sums:
            raise FormatError(f"{name} was given twice.")
        file.seek(info.begin)
        file.write(data)
        self._sums[name] = hashlib.sha256(data).hexdigest()

    def embed(self, record: RunRecord) -> None:
        """Embed the part of the record that is equal in all runs, see `RunRecord.embedded`."""
        text = record.embedded().to_json().encode()
        if len(text) > self.room:
            logger.warning(
                f"{FILE} has no run record, which takes {len(text):,} bytes where {self.room:,} are reserved. {RECORD} next to "
                f"{FILE} is complete."
            )
        else:
            self._record = text

    def size_with(self, *blocks: Mapping[str, Kind]) -> int:
        """Return the bytes of the folder without the record, with all tensors whatever `blocks` are."""
        size = self._size
        if not size:  # the file does not exist yet
            with tempfile.TemporaryDirectory() as place:
                size = self._begin_file(Path(place) / FILE)
        return size + self.size_beside()

    def tokenizer_read_again(self) -> dict[str, str]:
        """Return the texts of the tokenizer's files as they are made again from the header."""
        with tempfile.TemporaryDirectory() as place:
            self._begin_file(path := Path(place) / FILE)
            return tokenizer_files(path, read_header(path, lists=True).fields)

    def weight_digests(self) -> dict[str, str]:
        """Close the file and return its SHA-256, once all blocks are written."""
        self._close()
        return {FILE: sha256(self.folder / FILE)}

    def _close(self) -> None:
        """Write the checksums and the record into the header, and close the file."""
        if self._file is None:
            return
        if missing := sorted(self._infos.keys() - self._sums.keys()):
            raise FormatError(f"{self.folder / FILE}: {len(missing)} tensors were not given, first {missing[0]}.")
        sums: dict[str, str] = {}  # by tensor in the file
        for name, info in self._infos.items():
            sums[info.name] = sums.get(info.name, "") + self._sums[name]
        text = b"".join(struct.pack("<Q", len(each)) + each.encode() for each in sums.values())
        path = self.folder / FILE
        for key, skipped, content in (
            (SUMS, 4 + 8, text),  # after type and number of entries
            (RECORD_KEY, 8, self._record),  # after the length
            (METADATA, 8, metadata_digest(path, read_header(path)).encode()),
        ):
            self._file.seek(self._places[key].start + skipped)
            self._file.write(content)
        self._file.close()
        self._file = None

    def close(self) -> None:
        """Close the file and delete the mark INCOMPLETE."""
        self._close()
        flush_all(self.folder)
        (self.folder / INCOMPLETE).unlink(missing_ok=True)


def planned_tensors(
    source: TensorReader, network: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Return (name in the file, shape, type) of every tensor by name in the checkpoint, in file order.

    Behind the blocks of a layer in nvfp4 comes its global scale, in a stack those of all experts.

    Args:
        source: Reader of the model's tensors; only their shapes and dtypes are looked at.
        network: config.json as transformers completes it.
        config: The quantization_config.

    Raises:
        RecipeError: The experts of a block, which are one tensor, have several types, or llama.cpp lacks a tensor or would
            compute the network differently.
    """
    architecture = architecture_of(network).name
    tell(gguf_package().GGUFWriter(None, architecture), network)  # refuses networks that llama.cpp does not compute
    new_names = llama_names(source.names(), network)
    plan: dict[str, tuple[str, tuple[int, ...], int]] = {}
    types, experts = config["types"], Counter(map(stacked_name, new_names))
    layer_of = {f"{layer}.weight": layer for layer in types}
    for name, new in new_names.items():
        stored, part = torch.empty(source.shape(name), device="meta"), new.rsplit(".", 2)[-2]
        dims = stored.dim()
        shape = tuple(reshaping(new, architecture, dims=dims).into(stored).shape)
        if new.startswith("position_embd") or dims == 1 or part.endswith("norm") or part.startswith("ffn_gate_inp"):
            kind = NUMBER["F32"]
        elif name in layer_of:
            kind = GGUF_TYPES[types[layer_of[name]]].number
        elif new in EMBEDDING_TENSORS:
            dtype = config.get("embeddings") or source.dtype(name)
            kind = NUMBER.get(dtype.upper(), NUMBER["F32"])
        else:  # like the unquantized tensors of llama.cpp's quantizer
            kind = NUMBER["BF16" if source.dtype(name) == "BF16" else "F16"]
        joint = stacked_name(name)
        planned = (new, shape if joint == name else (experts[joint], *shape), kind)
        if (first := plan.setdefault(joint, planned)) != planned:
            ours, theirs = (gguf_package().GGMLQuantizationType(each).name for each in (kind, first[2]))
            raise RecipeError(
                f"{name} would have the type {ours}, but in another expert {theirs}. A GGUF has one tensor for all experts of "
                f"a block: use one type, for example --layer '\\.experts\\.=grid:q4_k'."
            )
        if kind == nvfp4_blocks.KIND.number:
            nvfp4_blocks.check_scaled(name, new, name.replace(".weight", ".bias") in new_names, network)
            layer, stored_layer = (each.removesuffix("weight") for each in (joint, new))
            count = 1 if joint == name else experts[joint]
            plan[layer + GLOBAL_SCALE] = (stored_layer + SCALE, (count,), NUMBER["F32"])
    return plan

"""Folders of safetensors files: readers of tensors by name, and the header and index of such files.

Memory use is small: a reader opens a file only while it copies tensors from it. If the index holds checksums, every tensor
that is read is checked. This module handles tensors and names, not their meaning; `shard_writer.py` writes such folders.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nearplane.errors import FormatError, ModelError
from nearplane.system.files import read_object
from nearplane.system.memory import is_refused, system_limit
from nearplane.system.paths import INDEX, WEIGHTS_FILE, refuse_unfinished

DTYPE_NAMES = {  # names of dtypes in safetensors
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# order of tensors in a file by dtype, the widest first, so that the data of each is aligned
FILE_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)
Kind = tuple[str, Sequence[int], int]  # dtype in safetensors, shape and bytes of a tensor


def checksum(tensor: Tensor) -> str:
    """Return the CRC-32 of "DTYPE SIZE SIZE ..." and the bytes of a contiguous tensor on the CPU, as 8 hexadecimal digits."""
    content = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return f"{zlib.crc32(content, zlib.crc32(kind_of(tensor).encode())):08x}"


def kind_of(tensor: Tensor) -> str:
    """Return "DTYPE SIZE SIZE ..." of a tensor, with the dtype's name in safetensors."""
    return " ".join([DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), *map(str, tensor.shape)])


def index_text(weight_map: Mapping[str, str], checksums: Mapping[str, str] | None, size: int) -> str:
    """Return the text of an index: the file of every tensor, its checksum if there are any, and the total bytes."""
    index: dict[str, object] = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    if checksums is not None:
        index["checksums"] = dict(sorted(checksums.items()))
    return json.dumps(index, indent=2) + "\n"


def shard_header(tensors: Mapping[str, Kind], kind: str = "pt") -> bytes:
    """Return the first bytes of a safetensors file with these tensors (dtype, shape, bytes), up to the data of the first.

    They are those of `safetensors.torch.save_file`, which orders tensors by dtype, then by name, as the header lists them.

    Args:
        tensors: Dtype in safetensors, shape and bytes of every tensor.
        kind: Value of "format" in the metadata.
    """
    header: dict[str, object] = {"__metadata__": {"format": kind}}
    begin = 0
    for name in file_order(tensors):
        dtype, shape, size = tensors[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_order(tensors: Mapping[str, Kind]) -> list[str]:
    """Return the names of tensors (dtype, shape, bytes) in the order in which a file holds them."""
    places = {dtype: place for place, dtype in enumerate(FILE_ORDER)}
    return sorted(tensors, key=lambda name: (places.get(tensors[name][0], len(places)), name))


def shard_size(tensors: Mapping[str, Kind], kind: str = "pt") -> int:
    """Return the size in bytes of a safetensors file with these tensors; see `shard_header`."""
    return len(shard_header(tensors, kind)) + sum(size for _, _, size in tensors.values())


class TensorInfo(NamedTuple):
    """Description of a tensor in a file.

    Args:
        dtype: Name of its dtype in safetensors ("BF16", "F32", ...).
        shape: Shape of the tensor.
        nbytes: Size of its data in bytes.
        file: File that holds the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path


class TensorReader(ABC):
    """Reader of the tensors of a checkpoint by name, for any file format.

    Attributes:
        folder: Folder of the checkpoint.
        checksums: Checksum of every tensor, if the folder lists them.
        infos: Descriptions of all tensors by name, in file order.
    """

    folder: Path
    checksums: dict[str, str] | None = None
    infos: dict[str, TensorInfo]

    def names(self) -> list[str]:
        """Return the names of all tensors, in file order."""
        return list(self.infos)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as `read` returns it, without reading it."""
        return self.infos[name].shape

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype of a tensor as `read` returns it, without reading it."""
        return self.infos[name].dtype

    def nbytes(self, name: str) -> int:
        """Return the bytes of a tensor as `read` returns it, without reading it."""
        return self.infos[name].nbytes

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self.infos[name].file

    @abstractmethod
    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors into memory of their own; the files are closed again."""

    def same(self, one: str, other: str) -> bool:
        """Return whether two tensors have equal shapes and values."""
        if self.shape(one) != self.shape(other):
            return False
        tensors = self.read([one, other])
        return torch.equal(tensors[one], tensors[other].to(tensors[one].dtype))

    def check_network(self, config: Mapping[str, Any]) -> None:  # noqa: B027
        """Refuse a config.json, as transformers completes it, that contradicts what the files say about the network."""

    def kept(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return an unquantized tensor as such files store it, or None if they leave it out."""
        return tensor


class ShardReader(TensorReader):
    """Reader of the tensors of a folder of safetensors files by name.

    Args:
        folder: Folder of the files.
        unfinished: Whether the folder may be marked as incomplete.

    Raises:
        ModelError: The folder holds no safetensors files, or one is truncated or unreadable.
    """

    def __init__(self, folder: Path, *, unfinished: bool = False) -> None:
        self.folder = folder
        if not unfinished:
            refuse_unfinished(folder)
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError(
                f"{folder} contains no .safetensors file. Convert the checkpoint with save_pretrained first."
            )
        if (folder / INDEX).exists():
            names, self.checksums = read_index(folder / INDEX)
            if (folder / WEIGHTS_FILE).exists() and WEIGHTS_FILE not in names:  # which transformers reads instead
                raise ModelError(
                    f"{folder} holds {WEIGHTS_FILE} and {INDEX}, which names other files. Delete the one that does not belong to "
                    f"the model."
                )
            files = [folder / name for name in names]
        elif folder / WEIGHTS_FILE in files:
            files = [folder / WEIGHTS_FILE]  # other files (adapters, the same in another layout) are not the model
        elif len(files) > 1 and not unfinished:
            raise ModelError(
                f"{folder} holds {len(files)} .safetensors files, but no {INDEX} that says which of them are the model. Fetch the "
                f"folder again."
            )
        self.infos = {}
        for path in files:
            header = read_shard_header(path)[1]
            for name in sorted(header):
                about, (begin, end) = header[name], header[name]["data_offsets"]
                self.infos[name] = TensorInfo(about["dtype"], tuple(about["shape"]), end - begin, path)

    def check_complete(self) -> None:
        """Check that the index has a checksum for every tensor and for no other.

        Raises:
            FormatError: There are no checksums, or a tensor is missing or unknown.
        """
        if self.checksums is None:
            raise FormatError(f"{self.folder / INDEX} is missing or has no checksums. Fetch the file again.")
        for name in [*self.checksums, *self.infos]:
            if name not in self.infos or name not in self.checksums:
                fault = f"missing from {self.folder}" if name in self.checksums else f"not in {self.folder / INDEX}"
                raise FormatError(
                    f"{name} is {fault}: a file is damaged, or belongs to another checkpoint. Fetch the folder again."
                )

    def verify(self) -> None:
        """Check every tensor against the checksums of the index, on all cores and without copies.

        Raises:
            FormatError: A tensor is missing, or differs from its checksum.
        """
        self.check_complete()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for path, group in groupby(self.infos, self.file):
                names = list(group)
                with _opened(path) as file:
                    tensors = [file.get_tensor(name) for name in names]  # memory-mapped, not copied
                    for name, digest in zip(names, pool.map(checksum, tensors), strict=True):
                        self._check(name, digest)

    def _check(self, name: str, digest: str) -> None:
        if self.checksums is not None and self.checksums.get(name) != digest:
            raise FormatError(
                f"{self.infos[name].file}: tensor {name} has the checksum {digest}, but {INDEX} has {self.checksums.get(name)}: "
                f"one file is damaged or belongs to another checkpoint. Fetch the folder again."
            )

    def same(self, one: str, other: str) -> bool:
        """Return whether two tensors have equal shapes and values; they are not copied into memory."""
        with _opened(self.file(one)) as file, _opened(self.file(other)) as second:
            tensor, compared = file.get_tensor(one), second.get_tensor(other)
            return tensor.shape == compared.shape and torch.equal(tensor, compared.to(tensor.dtype))

    def tensor(self, file: Any, name: str) -> Tensor:
        """Return a copy of one tensor of an open file, so that its memory map can be closed."""
        tensor: Tensor = file.get_tensor(name).clone()
        return tensor

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors into memory of their own; the files are closed again.

        Raises:
            FormatError: A tensor differs from its checksum in the index.
        """
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            by_file[self.infos[name].file].append(name)
        tensors: dict[str, Tensor] = {}
        for path, group in by_file.items():
            with _opened(path) as file:
                for name in group:
                    try:
                        tensors[name] = self.tensor(file, name)
                    except SafetensorError as error:
                        raise ModelError(
                            f"{path}: tensor {name} cannot be read ({error}). Fetch the file again."
                        ) from error
                    if self.checksums is not None:
                        self._check(name, checksum(tensors[name]))
        return tensors


def read_index(path: Path) -> tuple[list[str], dict[str, str] | None]:
    """Return the names of the weight files in an index, and its checksums of tensors or None.

    A file name that leads out of the folder is refused; a file in the folder may be a link (the hub's cache has links).

    Raises:
        ModelError: The file is not an index of shards.
    """
    expected = "Expected an index of shards. Fetch the file again"
    index = read_object(path, expected=expected, error=ModelError)
    shards, sums = index.get("weight_map"), index.get("checksums")
    for part, mapping in (("weight_map", shards), ("checksums", {} if sums is None else sums)):
        if not isinstance(mapping, dict) or not all(isinstance(value, str) for value in mapping.values()):
            raise ModelError(f"{path}: {part} is not an object that maps names to text. {expected}.")
    assert isinstance(shards, dict), "was looked at"
    names = sorted(set(shards.values()))
    if not names:
        raise ModelError(f"{path}: weight_map names no file. {expected}.")
    for name in names:
        if not inside(name):
            raise ModelError(
                f"{path} names the file {name!r}. Expected a name that stays within the folder and ends in .safetensors. Do not "
                f"use this checkpoint unless you trust its source."
            )
    return names, sums


def inside(name: str) -> bool:
    """Return whether a name is that of a safetensors file in a folder or below it."""
    parts = re.split(r"[/\\]", name)
    return name.endswith(".safetensors") and not {"", ".", ".."} & set(parts) and ":" not in name and name.isprintable()


def read_shard_header(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the first bytes of a safetensors file up to the data, and the description of every tensor in them by name.

    Raises:
        ModelError: The file is missing, truncated or unreadable.
    """
    with _opened(path), path.open("rb") as file:  # safetensors has checked the header that is read here
        length = file.read(8)
        text = file.read(int.from_bytes(length, "little"))
    tensors: dict[str, Any] = json.loads(text)
    tensors.pop("__metadata__", None)
    return length + text, tensors


def _opened(path: Path) -> Any:
    """Return the context of `safe_open`; its errors name the file."""
    if not path.is_file():  # a pipe would never end
        by_index = f", but {INDEX} names it" if (path.parent / INDEX).exists() else ""
        missing = "is a broken link" if path.is_symlink() else f"is missing{by_index}"
        fault = "is not a file" if path.exists() else missing
        raise ModelError(f"{path} {fault}. Fetch the file again.")
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        if is_refused(error):  # the file is mapped into memory
            raise system_limit(error) from error
        if not os.access(path, os.R_OK):  # of which safetensors says that there is no such file
            raise ModelError(f"{path} cannot be read: Permission denied.") from error
        if str(path) != str(path).encode(errors="ignore").decode():
            raise ModelError(f"The path {path} is not valid UTF-8. Rename its folders or the file.") from error
        raise ModelError(f"{path} is not a readable safetensors file ({error}). Fetch the file again.") from error

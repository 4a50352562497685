"""Reads a GGUF that nearplane wrote, tensor by tensor, under the names that the checkpoint had; needs no other package.

    "GGUF", version, number of tensors, number of keys; keys and values; of every tensor name, sizes, type, place; the data

Values are skipped but for numbers and short text, so that a vocabulary of 200,000 tokens costs nothing.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from nearplane.errors import FormatError, ModelError
from nearplane.formats.gguf.architecture import Rule, rule_of, unused
from nearplane.formats.gguf.blocks import TYPES
from nearplane.jsonfile import read_object
from nearplane.shards import NAMES, TensorReader, refuse_unfinished

FILE = "model.gguf"
MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
DENSE = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # types that hold values as they are
BLOCKS = {kind.number: kind for kind in TYPES.values()}
LONGEST = 1 << 24  # bytes of a text, and entries of our own lists
MOST_DIMS = 4
OURS = "nearplane."
TENSORS, SUMS = (
    f"{OURS}tensors",
    f"{OURS}sha256",
)  # of every tensor its name in the checkpoint, and the SHA-256 of its data


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """One tensor of a file.

    Args:
        name: in llama.cpp.
        shape: (out, in), or (in,).
        type: number of it.
        begin, size: of its data in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    begin: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What stands before the data.

    Args:
        fields: numbers and text by key, and lists under our own keys.
        places: where the value of each of our lists begins in the file.
        tensors: in file order.
        size: of the file as the header has it.
    """

    fields: dict[str, Any]
    places: dict[str, int]
    tensors: list[Info]
    size: int


def read_header(path: Path) -> Header:
    """Read what stands before the data of a GGUF.

    Raises:
        ModelError: it is none, damaged, or of types that nearplane does not write.
    """
    try:
        with path.open("rb") as file:
            return _header(path, file)
    except (OSError, struct.error, ValueError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        raise ModelError(f"{path} is not a readable GGUF file ({error}). Fetch it again.") from error


def _header(path: Path, file: BinaryIO) -> Header:
    if file.read(4) != MAGIC:
        raise ModelError(f"{path} is not a GGUF file: it does not begin with GGUF. Fetch it again.")
    version, tensors, keys = _number(file, "I"), _number(file, "Q"), _number(file, "Q")
    if version != VERSION or tensors > LONGEST or keys > LONGEST:
        raise ModelError(
            f"{path} is a GGUF of version {version} with {tensors} tensors; nearplane reads version {VERSION}, which it writes."
        )
    fields: dict[str, Any] = {}
    places: dict[str, int] = {}
    for _ in range(keys):
        key = _text(file)
        kind = _number(file, "I")
        places[key] = file.tell()
        fields[key] = _value(file, kind, keep=key.startswith(OURS))
    raw = []
    for _ in range(tensors):
        name, dims = _text(file), _number(file, "I")
        if not 1 <= dims <= MOST_DIMS:
            raise ModelError(f"{path}: {name} has {dims} dimensions. Fetch the file again.")
        shape = tuple(_number(file, "Q") for _ in range(dims))[::-1]
        raw.append((name, shape, _number(file, "I"), _number(file, "Q")))
    alignment = int(fields.get("general.alignment", ALIGNMENT))
    if alignment < 1 or alignment & (alignment - 1):
        raise ModelError(f"{path}: its alignment is {alignment}. Fetch the file again.")
    begin, end = padded(file.tell(), alignment), 0
    found = []
    for name, shape, kind, offset in raw:
        size = nbytes(path, name, shape, kind)
        if offset % alignment or offset != end:
            raise ModelError(f"{path}: the data of {name} is not where it is expected. Fetch the file again.")
        end = padded(offset + size, alignment)
        found.append(Info(name=name, shape=shape, type=kind, begin=begin + offset, size=size))
    return Header(fields=fields, places=places, tensors=found, size=begin + end)


def nbytes(path: Path, name: str, shape: tuple[int, ...], kind: int) -> int:
    """Return the bytes of a tensor.

    Raises:
        ModelError: its type is none that nearplane writes.
    """
    if kind in DENSE:
        return math.prod(shape) * DENSE[kind].itemsize
    block = BLOCKS.get(kind)
    if block is None or len(shape) != 2 or shape[1] % block.columns:
        raise ModelError(
            f"{path}: {name} has the type {kind} and sizes {shape}; nearplane reads {', '.join(TYPES)}, f32, f16 and bf16."
        )
    return shape[0] * (shape[1] // block.columns) * block.bytes


def padded(size: int, alignment: int = ALIGNMENT) -> int:
    """Return where what follows begins."""
    return -(-size // alignment) * alignment


def _number(file: BinaryIO, code: str) -> Any:
    return struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0]


def _text(file: BinaryIO) -> str:
    size = _number(file, "Q")
    if size > LONGEST or len(data := file.read(size)) < size:
        raise OverflowError(f"a text of {size} bytes")
    return data.decode()


def _value(file: BinaryIO, kind: int, *, keep: bool) -> Any:
    """Read a value; of a list nothing is kept unless asked for."""
    if kind in NUMBERS:
        return _number(file, NUMBERS[kind])
    if kind == TEXT:
        return _text(file)
    if kind != LIST:
        raise OverflowError(f"a value of type {kind}")
    inner, count = _number(file, "I"), _number(file, "Q")
    if keep:
        if count > LONGEST:
            raise OverflowError(f"a list of {count}")
        return [_value(file, inner, keep=True) for _ in range(count)]
    if inner in NUMBERS:
        file.seek(count * struct.calcsize(f"<{NUMBERS[inner]}"), 1)
        return None
    for _ in range(count):
        if inner != TEXT:
            raise OverflowError("a list of lists")
        size = _number(file, "Q")
        if size > LONGEST:
            raise OverflowError(f"a text of {size} bytes")
        file.seek(size, 1)
    return None


class GGUFReader(TensorReader):
    """The tensors of `model.gguf` in a folder, by the names that the original checkpoint has.

    A quantized one is `NAME.weight_TYPE`: (out, bytes of a row) uint8. What is read is checked against the SHA-256 in the file.

    Args:
        folder: that holds it.
        unfinished: whether it may be one that is being written.

    Raises:
        ModelError: there is none, it is damaged, or another program wrote it.
    """

    def __init__(self, folder: Path, *, unfinished: bool = False) -> None:
        self.folder, self.path = folder, folder / FILE
        self.checksums = None
        if not unfinished:
            refuse_unfinished(folder)
        if not self.path.is_file():
            raise ModelError(f"{folder} holds no {FILE}, although its config.json says so. Fetch it again.")
        header = self.header = read_header(self.path)
        names, sums = (_texts(header.fields.get(key), len(header.tensors)) for key in (TENSORS, SUMS))
        if names is None or sums is None:
            raise ModelError(
                f"{self.path} was not written by nearplane: it has no key {TENSORS} that names its tensors. nearplane reads GGUF "
                f"files of its own."
            )
        if (size := self.path.stat().st_size) != header.size:
            raise ModelError(
                f"{self.path} has {size:,} bytes, its header describes {header.size:,}: it is cut off or damaged. Fetch it again."
            )
        self._infos: dict[str, Info] = {}
        self._sums: dict[str, str] = {}
        for info, name, found in zip(header.tensors, names, sums, strict=True):
            if not name:  # made of the config: factors of rotary frequencies
                continue
            called = name if info.type in DENSE else f"{name}_{BLOCKS[info.type].name}"
            self._check(info)
            if called in self._infos:
                raise ModelError(f"{self.path}: {name} is there twice. Fetch it again.")
            self._infos[called] = info
            if not unfinished:
                self._sums[called] = found

    def names(self) -> list[str]:
        """Return the names of all tensors, in file order."""
        return list(self._infos)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor: of blocks (out, bytes of a row)."""
        info = self._infos[name]
        if info.type in DENSE:
            return info.shape[::-1] if self._rule(info).transposed else info.shape
        return info.shape[0], info.size // info.shape[0]

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype of a tensor: U8 of blocks."""
        return NAMES[DENSE.get(self._infos[name].type, torch.uint8)]

    def nbytes(self, name: str) -> int:
        """Return the bytes of a tensor."""
        return self._infos[name].size

    def file(self, name: str) -> Path:
        """Return the file."""
        del name
        return self.path

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors as the checkpoint has them: rows in its order.

        Raises:
            FormatError: the data of one is not what was written.
        """
        tensors = {}
        with self.path.open("rb") as file:
            for name in names:
                info = self._infos[name]
                file.seek(info.begin)
                data = bytearray(file.read(info.size))
                if len(data) != info.size:
                    raise ModelError(f"{self.path}: tensor {name} is cut off. Fetch the file again.")
                if name in self._sums and (found := hashlib.sha256(data).hexdigest()) != self._sums[name]:
                    raise FormatError(
                        f"{self.path}: the data of {name} has the SHA-256 {found[:16]}.., the file says "
                        f"{self._sums[name][:16]}..: it is damaged. Fetch the folder again."
                    )
                tensors[name] = self._rule(info).back(_tensor(data, info))
        return tensors

    def kept(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return what the file holds of a tensor of the original, after it is read back; None if it needs none of it."""
        config = read_object(self.folder / "config.json", expected="Fetch it again")
        tied = all(info.name != "output.weight" for info in self.header.tensors)
        if unused(name, {"tie_word_embeddings": tied} | config):  # which may leave out what is the default of its type
            return None
        info = self._infos.get(name)
        if info is None or info.type not in DENSE:
            return tensor  # nothing is like it
        rule = self._rule(info)
        return rule.back(rule.into(tensor).to(DENSE[info.type]))

    def _check(self, info: Info) -> None:
        """Refuse a tensor that the metadata do not fit."""
        try:
            heads = self._rule(info).heads
        except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
            raise ModelError(
                f"{self.path}: what it says of {info.name} is not complete ({error!r}). Fetch it again."
            ) from error
        if not all(info.shape) or heads < 0 or (heads and info.shape[0] % (2 * heads)):
            raise ModelError(
                f"{self.path}: {info.name} has the sizes {info.shape}, for {heads} heads. The two do not belong together; fetch "
                f"the file again."
            )

    def _rule(self, info: Info) -> Rule:
        return rule_of(info.name, self.header.fields, dims=len(info.shape) if info.type in DENSE else 1)


def _tensor(data: bytearray, info: Info) -> Tensor:
    if info.type in DENSE:
        return torch.frombuffer(data, dtype=DENSE[info.type]).reshape(info.shape)
    return torch.frombuffer(data, dtype=torch.uint8).reshape(info.shape[0], -1)


def _texts(found: object, count: int) -> list[str] | None:
    """Return a list of so many texts, None if it is something else."""
    good = isinstance(found, list) and len(found) == count and all(isinstance(each, str) for each in found)
    return found if isinstance(found, list) and good else None

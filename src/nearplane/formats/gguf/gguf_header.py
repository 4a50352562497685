"""What stands before the data of a GGUF: keys and values, and where every tensor is. Needs no torch and no other package.

    "GGUF", version, number of tensors, number of keys; keys and values; of every tensor name, sizes, type, place; the data

Values are skipped but for numbers and text, so that a vocabulary of 200,000 tokens costs nothing. Among the keys are those that
nearplane adds: the record of the run, names of tensors in the checkpoint, their hashes.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from nearplane.errors import ModelError
from nearplane.lattice.number_formats import TYPES

FILE = "model.gguf"
MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
NUMBER = {"F32": 0, "F16": 1, "BF16": 30}  # of types that hold values as they are
WIDTH = {NUMBER["F32"]: 4, NUMBER["F16"]: 2, NUMBER["BF16"]: 2}  # bytes of such a value
BLOCKS = {kind.number: kind for kind in TYPES.values()}
LONGEST = 1 << 28  # bytes of a text
MOST = 1 << 24  # tensors, keys, and entries of our own lists
MOST_DIMS = 4
OURS = "nearplane."
RECORD_KEY = f"{OURS}record"  # of the run, as JSON, filled up with spaces
TENSORS = f"{OURS}tensors"  # of every tensor its name in the checkpoint; of experts with a star
SUMS = f"{OURS}sha256"  # and the SHA-256 of its data; of experts one for each
EVERY = "*"  # stands for the number of an expert in the name of a tensor that holds a matrix of all
LONG = 64  # letters of a SHA-256


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """One tensor of a file.

    Args:
        name: in llama.cpp.
        shape: (out, in), or (in,); of experts (experts, out, in).
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
    if version != VERSION or tensors > MOST or keys > MOST:
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
    alignment = int(fields.get("general.alignment", ALIGNMENT))
    if alignment < 1 or alignment & (alignment - 1):
        raise ModelError(f"{path}: its alignment is {alignment}. Fetch the file again.")
    found: list[Info] = []
    end = 0
    for _ in range(tensors):
        name, dims = _text(file), _number(file, "I")
        if not 1 <= dims <= MOST_DIMS:
            raise ModelError(f"{path}: {name} has {dims} dimensions. Fetch the file again.")
        shape = tuple(_number(file, "Q") for _ in range(dims))[::-1]
        kind, offset = _number(file, "I"), _number(file, "Q")
        size = nbytes(path, name, shape, kind)
        if offset % alignment or offset != end:
            raise ModelError(f"{path}: the data of {name} is not where it is expected. Fetch the file again.")
        end = padded(offset + size, alignment)
        found.append(Info(name=name, shape=shape, type=kind, begin=offset, size=size))
    begin = padded(file.tell(), alignment)
    placed = [replace(info, begin=begin + info.begin) for info in found]
    return Header(fields=fields, places=places, tensors=placed, size=begin + end)


def nbytes(path: Path, name: str, shape: tuple[int, ...], kind: int) -> int:
    """Return the bytes of a tensor.

    Raises:
        ModelError: its type is none that nearplane writes.
    """
    if kind in WIDTH:
        return math.prod(shape) * WIDTH[kind]
    block = BLOCKS.get(kind)
    if block is None or len(shape) not in (2, 3) or shape[-1] % block.columns:
        raise ModelError(
            f"{path}: {name} has the type {kind} and sizes {shape}; nearplane reads {', '.join(TYPES)}, f32, f16 and bf16."
        )
    return math.prod(shape) // block.columns * block.bytes


def apart(info: Info, name: str) -> dict[str, Info]:
    """Return the tensors of the checkpoint that lie in one of the file, by their names: itself, or of experts one each.

    Args:
        info: of the tensor in the file.
        name: of it in the checkpoint, with `EVERY` where it holds a matrix of all experts.
    """
    if EVERY not in name:
        return {name: info}
    size = info.size // info.shape[0]
    return {
        name.replace(EVERY, str(expert)): replace(
            info, shape=info.shape[1:], begin=info.begin + expert * size, size=size
        )
        for expert in range(info.shape[0])
    }


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
        if count > MOST:
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

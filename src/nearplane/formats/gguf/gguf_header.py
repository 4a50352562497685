"""Header of a GGUF: keys and values, and the place of every tensor. Needs no torch and no other package.

    "GGUF", version, number of tensors, number of keys; keys and values; name, sizes, type, place of tensors; the data

Lists are skipped, so that a vocabulary of 200,000 tokens costs nothing; only those under nearplane's own keys are read:
the names of the tensors in the checkpoint, and their hashes. Other own keys hold the run record and a hash of the metadata.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from nearplane.errors import ModelError
from nearplane.number_formats import GGUF_TYPES

FILE = "model.gguf"
LONE = "nearplane-gguf-"  # prefix of the temporary folder of a GGUF without a folder
MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
NUMBER = {"F32": 0, "F16": 1, "BF16": 30}  # of the types without blocks
WIDTH = {NUMBER["F32"]: 4, NUMBER["F16"]: 2, NUMBER["BF16"]: 2}  # bytes of such a value
BLOCKS = {kind.number: kind for kind in GGUF_TYPES.values()}
MAX_TEXT_BYTES = 1 << 28
MAX_ENTRIES = 1 << 24  # tensors, keys, and entries of nearplane's own lists
MOST_DIMS = 4
KEY_PREFIX = "nearplane."  # of nearplane's own keys
RECORD_KEY = f"{KEY_PREFIX}record"  # the run record as JSON, padded with spaces
TENSORS = f"{KEY_PREFIX}tensors"  # name of every tensor in the checkpoint; experts with a star
SUMS = f"{KEY_PREFIX}sha256"  # SHA-256 of the data of every tensor; one per expert
DIVISORS = f"{KEY_PREFIX}global_scales"  # global scales in the order of their tensors, which hold rounded reciprocals
GLOBAL_SCALE = "weight_global_scale"  # suffix of such a number's name in the checkpoint, and in the file:
SCALE = "scale"
MARKED = "general.tensor_extra.name"  # tensors of llama.cpp's choice of inputs
FOUR_BITS = "general.tensor_extra.prec_a4"  # whether their inputs may be rounded to 4 bits
LIKE_KEY = f"{KEY_PREFIX}like"  # name of the file of which `--like` took the header; `TENSORS` are then of `Content`
STAR = "*"  # replaces the expert's number in the name of a tensor with the matrices of all experts
METADATA = f"{KEY_PREFIX}metadata_sha256"  # SHA-256 of the metadata of network and tokenizer
# general keys that change what tensors are
NETWORK_KEYS = ("general.architecture", "general.alignment", MARKED, FOUR_BITS)
SHA_SIZE = 64  # letters of a SHA-256 in hexadecimal


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """Header entry of one tensor.

    Args:
        name: Name of the tensor in llama.cpp.
        shape: (out, in), (in,), or (experts, out, in).
        type: Number of its type.
        begin, size: Position and length of its data in the file, in bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    begin: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Contents of a header.

    Args:
        fields: Numbers and texts by key, and lists under nearplane's own keys.
        places: Positions of the bytes of every value in the file, by key.
        tensors: Entries of the tensors in file order.
        size: Size of the file in bytes, computed from the header.
    """

    fields: dict[str, Any]
    places: dict[str, range]
    tensors: list[Info]
    size: int

    @property
    def own(self) -> bool:
        """Whether nearplane wrote the file: other programs have none of its keys."""
        return any(key.startswith(KEY_PREFIX) for key in self.fields)

    def texts(self, path: Path, key: str) -> list[str]:
        """Return a list of nearplane's own with one text for every tensor; `path` is that of the file, for the error.

        Raises:
            ModelError: There is no such list.
        """
        texts, count = self.fields.get(key), len(self.tensors)
        if not isinstance(texts, list) or len(texts) != count or not all(isinstance(each, str) for each in texts):
            raise ModelError(f"{path} has no valid key {key}. Fetch the file again.")
        return texts


def read_header(path: Path, *, lists: bool = False) -> Header:
    """Read the header of a GGUF.

    Args:
        path: Path of the file.
        lists: Whether the lists of all keys are read, among them the vocabulary.

    Raises:
        ModelError: The file is no GGUF, is damaged, or has types that nearplane does not write.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is not a file")  # a pipe would never end
        with path.open("rb") as file:
            return _header(path, file, lists)
    except (OSError, struct.error, ValueError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        raise ModelError(f"{path} is not a readable GGUF file ({error}). Fetch the file again.") from error


def _header(path: Path, file: BinaryIO, lists: bool) -> Header:
    if file.read(4) != MAGIC:
        raise ModelError(f"{path} is not a GGUF file: its first bytes are not GGUF. Fetch the file again.")
    version, tensors, keys = _number(file, "I"), _number(file, "Q"), _number(file, "Q")
    if version != VERSION:
        raise ModelError(f"{path} is a GGUF of version {version}; nearplane reads only version {VERSION}.")
    if max(tensors, keys) > MAX_ENTRIES:
        raise ModelError(
            f"{path} has {tensors:,} tensors and {keys:,} keys; expected at most {MAX_ENTRIES:,}. Fetch the file again."
        )
    fields: dict[str, Any] = {}
    places: dict[str, range] = {}
    for _ in range(keys):
        key = _text(file)
        kind = _number(file, "I")
        begin = file.tell()
        fields[key] = _value(file, kind, keep=lists or key.startswith(KEY_PREFIX))
        places[key] = range(begin, file.tell())
    alignment = int(fields.get("general.alignment", ALIGNMENT))
    if alignment < 1 or alignment & (alignment - 1):
        raise ModelError(f"{path}: its alignment is {alignment}. Fetch the file again.")
    infos: list[Info] = []
    end = 0
    for _ in range(tensors):
        name, dims = _text(file), _number(file, "I")
        if not 1 <= dims <= MOST_DIMS:
            raise ModelError(f"{path}: {name} has {dims} dimensions. Fetch the file again.")
        shape = tuple(_number(file, "Q") for _ in range(dims))[::-1]
        kind, offset = _number(file, "I"), _number(file, "Q")
        size = nbytes(path, name, shape, kind)
        if offset % alignment or offset != end:
            raise ModelError(f"{path}: the data of {name} is not at the expected place. Fetch the file again.")
        end = padded(offset + size, alignment)
        infos.append(Info(name=name, shape=shape, type=kind, begin=offset, size=size))
    begin = padded(file.tell(), alignment)
    moved = [replace(info, begin=begin + info.begin) for info in infos]
    return Header(fields=fields, places=places, tensors=moved, size=begin + end)


def metadata_digest(path: Path, header: Header) -> str:
    """Return the SHA-256 of the metadata of network and tokenizer, and of the names, shapes and types of all tensors.

    Other `general` keys, such as the name, may be edited. The run record and the hashes of tensors check themselves.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for key, place in sorted(header.places.items()):
            if key in NETWORK_KEYS or not (key.startswith("general.") or key in (RECORD_KEY, SUMS, METADATA)):
                file.seek(place.start - 4)  # with the type of the value
                digest.update(f"{key}\n".encode() + file.read(4 + len(place)))
    for info in header.tensors:
        digest.update(f"{info.name} {info.shape} {info.type}\n".encode())
    return digest.hexdigest()


def check_metadata(path: Path, header: Header) -> None:
    """Refuse a GGUF that is truncated, or one of nearplane whose metadata were changed.

    Raises:
        ModelError: The file has another size than its header says, or its metadata differ from their SHA-256.
    """
    if (size := path.stat().st_size) != header.size:
        raise ModelError(f"{path} has {size:,} bytes, expected {header.size:,}. Fetch the file again.")
    expected = header.fields.get(METADATA)
    if expected is not None and (digest := metadata_digest(path, header)) != expected:
        raise ModelError(
            f"{path}: its metadata have the SHA-256 {digest[:16]}.., but the file lists {str(expected)[:16]}..: they "
            f"were changed after nearplane wrote them, or are damaged. Fetch the file again."
        )


def nbytes(path: Path, name: str, shape: tuple[int, ...], kind: int) -> int:
    """Return the size of a tensor in bytes.

    Raises:
        ModelError: nearplane does not write its type.
    """
    if kind in WIDTH:
        return math.prod(shape) * WIDTH[kind]
    block = BLOCKS.get(kind)
    if block is None or len(shape) not in (2, 3) or shape[-1] % block.columns:
        raise ModelError(
            f"{path}: {name} has type {kind} and shape {shape}; nearplane reads {', '.join(GGUF_TYPES)}, f32, f16 and bf16."
        )
    return math.prod(shape) // block.columns * block.bytes


def parts_of(info: Info, name: str) -> dict[str, Info]:
    """Return the header entries of a tensor's parts by name in the checkpoint: the tensor itself, or one per expert.

    Args:
        info: Header entry of the tensor.
        name: Name of the tensor in the checkpoint, with `STAR` where it holds the matrices of all experts.
    """
    if STAR not in name:
        return {name: info}
    size = info.size // info.shape[0]
    return {
        name.replace(STAR, str(expert)): replace(
            info, shape=info.shape[1:], begin=info.begin + expert * size, size=size
        )
        for expert in range(info.shape[0])
    }


def padded(size: int, alignment: int = ALIGNMENT) -> int:
    """Round a size up to a multiple of the alignment."""
    return -(-size // alignment) * alignment


def _number(file: BinaryIO, code: str) -> Any:
    return struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0]


def _text(file: BinaryIO) -> str:
    size = _number(file, "Q")
    if size > MAX_TEXT_BYTES or len(text := file.read(size)) < size:
        raise OverflowError(f"a text of {size} bytes")
    return text.decode()


def _value(file: BinaryIO, kind: int, *, keep: bool) -> Any:
    """Read a value; a list is skipped unless `keep` is set."""
    if kind in NUMBERS:
        return _number(file, NUMBERS[kind])
    if kind == TEXT:
        return _text(file)
    if kind != LIST:
        raise OverflowError(f"a value of type {kind}")
    inner, count = _number(file, "I"), _number(file, "Q")
    if keep:
        if count > MAX_ENTRIES:
            raise OverflowError(f"a list of {count}")
        return [_value(file, inner, keep=True) for _ in range(count)]
    if inner in NUMBERS:
        file.seek(count * struct.calcsize(f"<{NUMBERS[inner]}"), 1)
        return None
    for _ in range(count):
        if inner != TEXT:
            raise OverflowError("a list of lists")
        size = _number(file, "Q")
        if size > MAX_TEXT_BYTES:
            raise OverflowError(f"a text of {size} bytes")
        file.seek(size, 1)
    return None

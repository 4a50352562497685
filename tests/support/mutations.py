"""Mutations of the files of a model, drawn with a `random.Random`: bits, lengths, offsets, tensors, headers, metadata.

Most know how a file is built, as blind ones are refused by its first check. Each is made in place; copy the folder before.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edits import TEXT, VALUES, edit, edit_json

SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "U16": 2, "U32": 4,
    "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
HUGE = (0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """What was done to which file.

    Args:
        kind: bits, lengths, offsets, tensors, truncation, header, metadata or files.
        file: name of the file.
        what: in words.
    """

    kind: str
    file: str
    what: str


# ── bytes of any file ──


def damaged(content: bytes, rng: random.Random, head: int = 64) -> tuple[bytes, str, str]:
    """Flip, overwrite, cut, repeat, move or append bytes; the first `head` are hit as often as all else: (bytes, kind, what)."""
    data = bytearray(content)
    reach = len(data) if rng.random() < 0.5 else min(len(data), head)
    at, length = rng.randrange(max(reach, 1)), rng.choice((1, 2, 4, 8, 32, 1000))
    match rng.choice(("flip", "flip", "flip", "value", "cut", "append", "insert", "delete", "repeat", "move", "zeros")):
        case "flip" if data:
            for _ in range(rng.choice((1, 1, 1, 4, 40))):
                data[at] ^= 1 << rng.randrange(8)
                at = rng.randrange(reach)
            return bytes(data), "bits", f"bits flipped, the last at {at}"
        case "value":
            data[at : at + 8] = rng.choice(HUGE).to_bytes(8, "little")
            return bytes(data), "lengths", f"another number at {at}"
        case "cut":
            return (
                bytes(data[: rng.choice((at, len(data) - 1, 0, rng.randrange(len(data) + 1)))]),
                "truncation",
                f"cut at {at}",
            )
        case "append":
            return bytes(data) + rng.randbytes(length), "truncation", f"{length} bytes appended"
        case "insert":
            return (
                bytes(data[:at]) + rng.randbytes(length) + bytes(data[at:]),
                "offsets",
                f"{length} bytes inserted at {at}",
            )
        case "delete":
            return bytes(data[:at] + data[at + length :]), "offsets", f"{length} bytes deleted at {at}"
        case "repeat":
            return bytes(data[: at + length]) + bytes(data[at:]), "offsets", f"{length} bytes repeated at {at}"
        case "move" if data:
            other = rng.randrange(len(data))
            data[at : at + length], data[other : other + length] = data[other : other + length], data[at : at + length]
            return bytes(data), "offsets", f"{length} bytes at {at} and {other} exchanged"
    filler = rng.choice((b"\0", b"\xff"))
    data[at : at + length] = filler * len(data[at : at + length])
    return bytes(data), "bits", f"{length} bytes at {at} are {filler!r}"


# ── safetensors ──


def safetensors(content: bytes, rng: random.Random) -> tuple[bytes, str, str]:
    """Mutate a file of safetensors: blindly, or its header or its tensors knowingly."""
    begin = 8 + int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:begin]), bytearray(content[begin:])
    names = [name for name in header if name != "__metadata__"]
    one, other = rng.choice(names), rng.choice(names)
    about, (first, last) = header[one], header[one]["data_offsets"]
    match rng.choice(
        (
            "damage",
            "damage",
            "length",
            "offsets",
            "dtype",
            "shape",
            "entry",
            "edit",
            "text",
            "swap",
            "copy",
            "meaning",
            "values",
        )
    ):
        case "length":
            length = rng.choice((*HUGE, begin - 8 + 1, begin - 8 - 1, begin - 16, len(content), len(content) - 8))
            return (length % 2**64).to_bytes(8, "little") + content[8:], "lengths", f"a header of {length} bytes"
        case "offsets":
            new = rng.choice(
                ([last, first], [first + 1, last], [first, last + 1], [first - 4, last - 4], [0, 0], [first], [first, 2**63],
                 [first, None], [float(first), last], [str(first), last], [-1, last], header[other]["data_offsets"], [0, len(data)])
            )  # fmt: skip
            about["data_offsets"] = new
            return _joined(header, data), "offsets", f"{one} at {new}"
        case "dtype":
            about["dtype"] = rng.choice((*SIZES, "F4", "f32", "", None, 3, "F8_E4M3FNUZ", "C64"))
            return _joined(header, data), "header", f"{one} is {about['dtype']}"
        case "shape":
            shape = about["shape"]
            about["shape"] = rng.choice(
                (shape[::-1], [*shape, 1], [1, *shape], [math.prod(shape)], [], [0], [2 * n for n in shape], [-n for n in shape],
                 [2**31, 2**31, 4], [2**32 + n for n in shape], None, [str(n) for n in shape], [float(n) for n in shape], shape[:-1])
            )  # fmt: skip
            return _joined(header, data), "header", f"{one} has the shape {str(about['shape'])[:60]}"
        case "entry":
            return _entry(header, data, one, other, rng)
        case "edit":
            what = edit_json(header, rng)
            return _joined(header, data), "header", what
        case "text":
            kind = rng.choice(list(TEXT))
            text = TEXT[kind](content[8:begin], rng)
            return len(text).to_bytes(8, "little") + text + bytes(data), "header", f"header: {kind}"
        case "swap":
            fitting = [name for name in names if _size(header[name]) == last - first]
            other = rng.choice(fitting)
            kind = rng.choice(("data", "name"))
            if kind == "name":
                header[one], header[other] = header[other], header[one]
            else:
                about["data_offsets"], header[other]["data_offsets"] = (
                    header[other]["data_offsets"],
                    about["data_offsets"],
                )
            return _joined(header, data), "tensors", f"{kind} of {one} and {other} exchanged"
        case "copy":
            begin, end = header[other]["data_offsets"]
            length = min(end - begin, last - first)
            data[first : first + length] = data[begin : begin + length]
            return _joined(header, data), "tensors", f"{one} begins with the data of {other}"
        case "meaning":
            return _meaning(header, data, one, rng)
        case "values" if last > first:
            at = rng.randrange(first, last)
            new = rng.choice(
                (b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\x7c", b"\0\xfe", b"\xff" * 16, b"\0" * 16, rng.randbytes(64))
            )
            data[at : at + len(new)] = new[: last - at]
            return _joined(header, data), "tensors", f"other values in {one}"
    return damaged(content, rng, begin)


def _size(about: Mapping[str, Any]) -> int:
    begin, end = about["data_offsets"]
    return int(end - begin)


def _joined(header: Mapping[str, Any], data: bytes | bytearray) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(data)


def _entry(header: dict[str, Any], data: bytearray, one: str, other: str, rng: random.Random) -> tuple[bytes, str, str]:
    """Delete, rename, repeat or add an entry."""
    match rng.choice(("delete", "rename", "twice", "added", "gone", "metadata")):
        case "delete":
            del header[one]
            return _joined(header, data), "tensors", f"the entry of {one} is deleted"
        case "rename":
            stem, dot, end = one.rpartition(".")
            new = rng.choice(
                (
                    "",
                    "x",
                    one + "x",
                    f"{one}\0",
                    f"../{one}",
                    "a" * 10_000,
                    f"{stem}{dot}weight",
                    f"{stem}.extra{dot}{end}",
                    end,
                )
            )
            return (
                _joined({new if name == one else name: about for name, about in header.items()}, data),
                "tensors",
                f"{one} is {new[:40]!r}",
            )
        case "twice":
            text = json.dumps(header, separators=(",", ":"))[:-1] + f",{json.dumps(one)}:{json.dumps(header[other])}}}"
            text += " " * (-len(text) % 8)
            return (
                len(text).to_bytes(8, "little") + text.encode() + bytes(data),
                "tensors",
                f"{one} is there twice, once as {other}",
            )
        case "added":
            length = rng.choice((0, 4, 64))
            stem = one.rpartition(".")[0]
            name = f"{stem}.{rng.choice(('extra', 'weight', 'bias', 'weight_g_idx', 'weight_zero_point', 'weight_coded', 'scales'))}"
            dtype = rng.choice(("F32", "U8", "I32"))
            header[name] = {
                "dtype": dtype,
                "shape": [length // SIZES[dtype]],
                "data_offsets": [len(data), len(data) + length],
            }
            return _joined(header, data + bytes(length)), "tensors", f"{name} is added"
        case "gone":  # with its data: a whole file without this tensor
            begin, end = header.pop(one)["data_offsets"]
            for about in header.values():
                if "data_offsets" in about and about["data_offsets"][0] >= end:
                    about["data_offsets"] = [n - (end - begin) for n in about["data_offsets"]]
            return _joined(header, data[:begin] + data[end:]), "tensors", f"{one} is left out"
    header["__metadata__"] = rng.choice(
        (*VALUES, {"format": "tf"}, {"format": "x" * 10**6}, {str(n): "" for n in range(10**4)})
    )
    return _joined(header, data), "header", f"__metadata__ is {str(header['__metadata__'])[:30]}"


def _meaning(header: dict[str, Any], data: bytearray, one: str, rng: random.Random) -> tuple[bytes, str, str]:
    """Give the bytes of a tensor another dtype and shape that fit them."""
    about, size = header[one], _size(header[one])
    about["dtype"] = rng.choice([dtype for dtype, width in SIZES.items() if size % width == 0])
    count = size // SIZES[about["dtype"]]
    rows = rng.choice([n for n in {1, 2, *about["shape"]} if n and count % n == 0] or [1])
    about["shape"] = rng.choice(([count], [rows, count // rows], [count // rows, rows]))
    return _joined(header, data), "header", f"{one} is {about['dtype']} {about['shape']}"


# ── GGUF ──

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
WORDS = ("llama", "qwen2", "qwen3", "gemma2", "gpt2", "phi3", "bert", "", "LLAMA", "x" * 3000, "\0", "qwen3moe")


@dataclass(slots=True, kw_only=True)
class Entry:
    """A tensor of a GGUF, with its sizes in the order of the file."""

    name: bytes
    sizes: list[int]
    type: int
    offset: int


@dataclass(slots=True, kw_only=True)
class GGUF:
    """The parts of a GGUF: keys as (name, type, bytes of the value)."""

    version: int
    keys: list[tuple[bytes, int, bytes]]
    entries: list[Entry]
    data: bytes
    counts: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, content: bytes) -> GGUF:
        """Take a file apart."""
        version, tensors, keys = struct.unpack_from("<IQQ", content, 4)
        at, found, entries = 24, [], []

        def text(at: int) -> tuple[bytes, int]:
            (length,) = struct.unpack_from("<Q", content, at)
            return content[at + 8 : at + 8 + length], at + 8 + length

        def behind(kind: int, at: int) -> int:
            if kind == 8:
                return text(at)[1]
            if kind != 9:
                return at + struct.calcsize(NUMBERS[kind])
            inner, count = struct.unpack_from("<IQ", content, at)
            at += 12
            for _ in range(count):
                at = behind(inner, at)
            return at

        for _ in range(keys):
            name, at = text(at)
            (kind,) = struct.unpack_from("<I", content, at)
            end = behind(kind, at + 4)
            found.append((name, kind, content[at + 4 : end]))
            at = end
        for _ in range(tensors):
            name, at = text(at)
            (dims,) = struct.unpack_from("<I", content, at)
            *sizes, type_, offset = struct.unpack_from(f"<{dims}QIQ", content, at + 4)
            at += 4 + 8 * dims + 12
            entries.append(Entry(name=name, sizes=sizes, type=type_, offset=offset))
        return cls(version=version, keys=found, entries=entries, data=content[-(-at // 32) * 32 :])

    def joined(self) -> bytes:
        """Put the file together."""
        tensors, keys = self.counts or (len(self.entries), len(self.keys))
        parts = [b"GGUF", struct.pack("<IQQ", self.version, tensors, keys)]
        for name, kind, value in self.keys:
            parts += [_text(name), struct.pack("<I", kind), value]
        for entry in self.entries:
            sizes = [n % 2**64 for n in entry.sizes]
            parts += [
                _text(entry.name),
                struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, entry.type, entry.offset % 2**64),
            ]
        head = b"".join(parts)
        return head + bytes(-len(head) % 32) + self.data


def _text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def gguf(content: bytes, rng: random.Random) -> tuple[bytes, str, str]:
    """Mutate a GGUF: blindly, or its keys or its tensors knowingly."""
    parts = GGUF.of(content)
    one, other = rng.choice(parts.entries), rng.choice(parts.entries)
    name = one.name.decode()
    match rng.choice(
        ("damage", "damage", "counts", "key", "key", "key", "ours", "place", "type", "shape", "swap", "entry", "data")
    ):
        case "counts":
            parts.counts = [len(parts.entries), len(parts.keys)]
            which = rng.randrange(2)
            parts.counts[which] = rng.choice((*HUGE, parts.counts[which] + 1, parts.counts[which] - 1))
            return parts.joined(), "lengths", f"{parts.counts[0]} tensors and {parts.counts[1]} keys"
        case "key":
            return _key(parts, rng)
        case "ours":
            return _own_list(parts, rng)
        case "place":
            one.offset = rng.choice((*HUGE, one.offset + 32, one.offset - 32, one.offset + 1, other.offset))
            return parts.joined(), "offsets", f"{name} at {one.offset}"
        case "type":
            one.type = rng.choice((0, 1, 2, 3, 6, 7, 8, 9, 10, 12, 13, 14, 20, 30, 99, other.type, 2**32 - 1))
            return parts.joined(), "header", f"{name} is of type {one.type}"
        case "shape":
            one.sizes = rng.choice(
                (one.sizes[::-1], [*one.sizes, 1], [1, *one.sizes], [math.prod(one.sizes)], [0], [2 * n for n in one.sizes],
                 [2**32, 2**32], [2**63, 2], [-n for n in one.sizes], [], [1] * 9, [2**31] * 4)
            )  # fmt: skip
            return parts.joined(), "header", f"{name} has the sizes {one.sizes}"
        case "swap":
            what = rng.choice(("name", "offset", "type", "sizes"))
            first, second = getattr(one, what), getattr(other, what)
            setattr(one, what, second)
            setattr(other, what, first)
            return parts.joined(), "tensors", f"{what} of {name} and {other.name.decode()} exchanged"
        case "entry":
            place = parts.entries.index(one)
            match rng.choice(("delete", "twice", "rename")):
                case "delete":
                    del parts.entries[place]
                case "twice":
                    parts.entries.insert(place, copy.deepcopy(other))
                case _:
                    one.name = rng.choice(
                        (
                            b"",
                            b"x",
                            one.name + b"x",
                            b"\xff\xfe",
                            b"../" + one.name,
                            b"x" * 10_000,
                            b"blk.0",
                            other.name,
                        )
                    )
            return parts.joined(), "tensors", f"{name} deleted, twice or renamed"
        case "data":
            data, size = bytearray(parts.data), rng.choice((1, 32, 4096))
            data[one.offset : one.offset + size] = data[other.offset : other.offset + size]
            parts.data = bytes(data[: len(parts.data)])
            return parts.joined(), "tensors", f"{name} begins with the data of {other.name.decode()}"
    return damaged(content, rng, len(content) - len(parts.data))


def _key(parts: GGUF, rng: random.Random) -> tuple[bytes, str, str]:
    """Change the name, the type or the value of a key; the lists of a tokenizer are not chosen more often than others."""
    place = rng.randrange(len(parts.keys))
    name, kind, value = parts.keys[place]
    title = name.decode()
    match rng.choice(("value", "value", "value", "name", "type", "delete", "twice", "added")):
        case "name":
            parts.keys[place] = (
                rng.choice((b"", name[:-1], name + b"x", b"\xff", name.upper(), rng.choice(parts.keys)[0])),
                kind,
                value,
            )
            return parts.joined(), "metadata", f"{title} is renamed"
        case "type":
            new = rng.choice((*range(13), 99))
            parts.keys[place] = (name, new, value)
            return parts.joined(), "metadata", f"{title} is of type {new}"
        case "delete":
            del parts.keys[place]
            return parts.joined(), "metadata", f"{title} is deleted"
        case "twice":
            parts.keys.append((name, kind, rng.choice(parts.keys)[2] if rng.random() < 0.5 else value))
            return parts.joined(), "metadata", f"{title} is there twice"
        case "added":
            parts.keys.append(
                (
                    rng.choice((b"general.alignment", b"nearplane.x", b"llama.block_count")),
                    4,
                    struct.pack("<I", rng.choice((0, 3, 64, 2**31))),
                )
            )
            return parts.joined(), "metadata", f"{parts.keys[-1][0].decode()} is added"
    if kind in NUMBERS:
        code = NUMBERS[kind]
        (number,) = struct.unpack(f"<{code}", value)
        new = rng.choice((0, 1, number + 1, number * 2, number / 2, 1e30, math.nan, 2**31))
        try:
            value = struct.pack(f"<{code}", new if code in "fd" else bool(new) if code == "?" else int(new))
        except (struct.error, ValueError, OverflowError):
            value = b"\xff" * len(value)
    elif kind == 8:
        text = value[8:]
        value = _text(rng.choice((rng.choice(WORDS).encode(), text[:-1], text + b"x", text.upper(), b"\xff\xfe")))
    else:
        value = rng.choice(
            (
                value[:4] + struct.pack("<Q", rng.choice(HUGE)) + value[12:],
                struct.pack("<I", rng.randrange(14)) + value[4:],
            )
        )
    parts.keys[place] = (name, kind, value)
    return parts.joined(), "metadata", f"{title} has another value"


def _own_list(parts: GGUF, rng: random.Random) -> tuple[bytes, str, str]:
    """Swap, repeat or change entries of the names or the hashes of tensors that nearplane keeps in a GGUF."""
    name = rng.choice((b"nearplane.tensors", b"nearplane.sha256"))
    place = next((place for place, key in enumerate(parts.keys) if key[0] == name), None)
    if place is None:
        return _key(parts, rng)
    value, texts, at = parts.keys[place][2], [], 12
    while at < len(value):
        (length,) = struct.unpack_from("<Q", value, at)
        texts.append(value[at + 8 : at + 8 + length])
        at += 8 + length
    one, other = rng.randrange(len(texts)), rng.randrange(len(texts))
    match rng.choice(("swap", "repeat", "change", "drop")):
        case "swap":
            texts[one], texts[other] = texts[other], texts[one]
        case "repeat":
            texts[one] = texts[other]
        case "change":
            texts[one] = rng.choice(
                (
                    b"",
                    texts[one][:-1],
                    texts[one] + b"x",
                    texts[one].replace(b"*", b"0"),
                    b"\xff",
                    texts[one].replace(b"0", b"*"),
                )
            )
        case _:
            del texts[one]
    parts.keys[place] = (name, 9, value[:4] + struct.pack("<Q", len(texts)) + b"".join(map(_text, texts)))
    return parts.joined(), "metadata", f"{name.decode()}: entries {one} and {other}"


# ── folders ──

BYTES: Mapping[str, Callable[[bytes, random.Random], tuple[bytes, str, str]]] = {
    ".safetensors": safetensors,
    ".gguf": gguf,
}


def mutate(folder: Path, rng: random.Random, *, weights: float = 0.7) -> Mutation:
    """Mutate one file of a model's folder: of weights with this probability, else of text, and rarely the files as such."""
    paths = sorted(path for path in folder.iterdir() if path.suffix in BYTES)
    path = rng.choice(paths)
    if rng.random() < 0.03:
        return _files(path, rng.choice(sorted(folder.iterdir())), rng)
    texts = sorted(path.name for path in folder.glob("*.json"))
    if rng.random() < weights or not texts:
        content, kind, what = BYTES[path.suffix](path.read_bytes(), rng)
        path.write_bytes(content)
        return Mutation(kind=kind, file=path.name, what=what)
    done = edit(folder, rng, texts)
    return Mutation(kind="metadata", file=done.file, what=done.what)


def of_bytes(path: Path, rng: random.Random) -> Mutation:
    """Mutate the bytes of one file."""
    content, kind, what = damaged(path.read_bytes(), rng)
    path.write_bytes(content)
    return Mutation(kind=kind, file=path.name, what=what)


def _files(path: Path, other: Path, rng: random.Random) -> Mutation:
    """Put something else in the place of a file."""
    kind = rng.choice(("missing", "empty", "folder", "pipe", "endless", "itself", "other"))
    content = other.read_bytes()
    path.unlink()
    match kind:
        case "empty":
            path.write_bytes(b"")
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "endless":
            path.symlink_to("/dev/zero")
        case "itself":
            path.symlink_to(path.name)
        case "other":
            path.write_bytes(content)
    return Mutation(kind="files", file=path.name, what=f"{kind} ({other.name})" if kind == "other" else kind)

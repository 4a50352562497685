"""Mutations of a GGUF that know its form: counts, keys, entries of tensors, and the lists that nearplane keeps in it."""

from __future__ import annotations

import copy
import math
import random
import struct
from dataclasses import dataclass, field

from mutated_bytes import HUGE, damaged

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

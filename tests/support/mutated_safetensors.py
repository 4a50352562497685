"""Mutations of a file of safetensors that know its form: the length of its header, entries of tensors, their data."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from typing import Any

from edits import TEXT, VALUES, edit_json
from mutated_bytes import HUGE, damaged

SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "U16": 2, "U32": 4,
    "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


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
                (shape[::-1], [*shape, 1], [1, *shape], shape[:-1], [math.prod(shape)], [], [0], None, [2**31, 2**31, 4],
                 [2 * n for n in shape], [-n for n in shape], [2**32 + n for n in shape], [*map(str, shape)], [*map(float, shape)])
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
            end = rng.choice(("extra", "weight", "bias", "weight_g_idx", "weight_zero_point", "weight_coded", "scales"))
            name = f"{stem}.{end}"
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

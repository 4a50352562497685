"""What the tensors of a GGUF that llama.cpp's converter wrote hold: rows of a checkpoint's tensors, in another order.

    tensor = rows of one or several tensors of the checkpoint, one after the other

In the header of a file by `--like`, every entry of `nearplane.tensors` is such a description as JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nearplane.formats.gguf.gguf_header import Info

Change = Callable[[Tensor], Tensor]
CHANGES: Mapping[str, tuple[Change, Change]] = {  # of values, into the file and back
    "": (lambda x: x, lambda x: x),
    "+1": (lambda x: x.float() + 1, lambda x: x - 1),  # Gemma's norms
    "+1 rounded": (lambda x: (x + 1).float(), lambda x: x - 1),  # the same in a checkpoint of float16
    "-exp": (lambda x: -x.float().exp(), lambda x: (-x).log()),  # decays of state-space models
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strided:
    """Numbers of rows: `start + i * strides[0] + j * strides[1] + ...` for i, j, ... below `shape`, last fastest.

    Args:
        start: The first number.
        shape, strides: Lengths and distances; (8, 2), (16, 8) are the halves of 8 heads of 16 rows.
    """

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __len__(self) -> int:
        return math.prod(self.shape)

    def index(self) -> Tensor:
        """Return the numbers (n,) as int64."""
        numbers = torch.tensor([self.start])
        for length, stride in zip(self.shape, self.strides, strict=True):
            numbers = (numbers[:, None] + stride * torch.arange(length)).reshape(-1)
        return numbers


def is_vector(shape: Sequence[int]) -> bool:
    """Return whether a tensor has one dimension, apart from those of length 1."""
    return math.prod(shape) == max(shape, default=0)


def strided(numbers: Tensor) -> Iterator[Strided]:
    """Yield numbers (n,) as few runs of `Strided`."""
    if (whole := _nested(numbers)) is not None:
        yield whole
        return
    breaks = ((numbers[1:] - numbers[:-1]) != 1).nonzero()[:, 0] + 1
    for run in torch.tensor_split(numbers, breaks):
        yield Strided(start=int(run[0]), shape=(len(run),), strides=(1,))


def _nested(numbers: Tensor) -> Strided | None:
    """Return numbers as one `Strided`; None if they are not regular."""
    start = int(numbers[0])
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    while len(numbers) > 1:
        steps = numbers[1:] - numbers[:-1]
        other = (steps != steps[0]).nonzero()
        length = int(other[0]) + 1 if len(other) else len(numbers)
        if len(numbers) % length or steps[0] < 0:
            return None
        runs = numbers.view(-1, length)
        if not torch.equal(runs - runs[:, :1], (runs[:1] - runs[0, 0]).expand_as(runs)):
            return None
        shape, strides, numbers = (length, *shape), (int(steps[0]), *strides), runs[:, 0]
    return Strided(start=start, shape=shape or (1,), strides=strides or (1,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of one tensor of the checkpoint.

    Args:
        name: Name of the tensor.
        shape: Its shape; of a quantized layer (out, in).
        rows: The rows along all its dimensions but the last; of a vector, its numbers.
    """

    name: str
    shape: tuple[int, ...]
    rows: Strided

    @property
    def flat(self) -> tuple[int, int]:
        """Number of rows of the whole tensor and their length; numbers of a vector are rows of length 1."""
        columns = 1 if is_vector(self.shape) else self.shape[-1]
        return math.prod(self.shape) // columns, columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Content of a tensor in the file.

    Args:
        parts: Its rows; none: made by the converter from the config.
        turned: Whether its last two dimensions are exchanged; it then has one part.
        change: Name of a function of its values, see `CHANGES`.
        kept: Whether it is not quantized; in Q8_0 it is then no layer's.
    """

    parts: tuple[Part, ...] = ()
    turned: bool = False
    change: str = ""
    kept: bool = True

    def to_json(self) -> str:
        """Return the content as JSON."""
        parts = [[p.name, p.shape, p.rows.start, p.rows.shape, p.rows.strides] for p in self.parts]
        fields = {"parts": parts, "turned": self.turned, "change": self.change, "kept": self.kept}
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Content:
        """Read the JSON of `to_json`.

        Raises:
            ValueError, KeyError, TypeError: It is not such JSON.
        """
        fields = json.loads(text)
        parts = tuple(
            Part(
                name=str(name), shape=_lengths(shape),
                rows=Strided(start=int(start), shape=_lengths(count), strides=tuple(map(int, strides))),
            )
            for name, shape, start, count, strides in fields["parts"]
        )  # fmt: skip
        turned, change, kept = bool(fields["turned"]), str(fields["change"]), bool(fields["kept"])
        content = cls(parts=parts, turned=turned, change=change, kept=kept)
        if change not in CHANGES or (turned and (len(parts) != 1 or not kept)):
            raise ValueError(f"the change {change!r} of {len(parts)} parts")
        for part in parts:
            largest = part.rows.start + sum(
                (n - 1) * s for n, s in zip(part.rows.shape, part.rows.strides, strict=True)
            )
            if min(part.rows.start, *part.rows.strides) < 0 or largest >= part.flat[0]:
                raise ValueError(f"rows to {largest} of {part.name}")
        return content

    def pieces(self, info: Info) -> list[tuple[Info, Part]]:
        """Return where each part lies in the file; the one part of a turned tensor is the whole tensor.

        Raises:
            ValueError: The parts are not the whole tensor.
        """
        count = sum(len(part.rows) for part in self.parts)
        columns = {part.flat[1] for part in self.parts}
        values = math.prod(info.shape)
        if len(columns) != 1 or count * (width := columns.pop()) != values:
            raise ValueError(f"{count} rows of {info.name}, which has the shape {info.shape}")
        if self.turned:
            return [(info, self.parts[0])]
        pieces, begin, bytes_of_row = [], info.begin, info.size // count
        for part in self.parts:
            size = len(part.rows) * bytes_of_row
            pieces.append((replace(info, shape=(len(part.rows), width), begin=begin, size=size), part))
            begin += size
        return pieces


def _lengths(numbers: Any) -> tuple[int, ...]:
    lengths = tuple(map(int, numbers))
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths {lengths}")
    return lengths

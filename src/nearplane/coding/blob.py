"""A matrix of integers and its scales as one run of bytes: encode, decode, size. docs/format.md specifies the bytes."""

from __future__ import annotations

import math
import os
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from nearplane.coding.bit_stream import varint
from nearplane.coding.chunk import Patches
from nearplane.coding.encoder_choices import Choices, choose, payload_bits, tally
from nearplane.coding.header_bits import read_header, read_shape, write_header
from nearplane.coding.layout import MAX_EXPONENT, MAX_SIDE, TANS, VERSION, Header, Layout, chunk_edges, frequencies
from nearplane.coding.packed_matrix import PackedMatrix, pack
from nearplane.coding.payload import decode_chunks, encode_chunks, run
from nearplane.coding.symbols import scatter
from nearplane.errors import FormatError

if TYPE_CHECKING:
    from torch import Tensor


class Ladders(Protocol):
    """Scales of rows and columns in tensors, see `Contents`: what `lattice.grid.ProductGrid` is, which coding does not import."""

    @property
    def base(self) -> float: ...

    @property
    def columns(self) -> Tensor: ...

    @property
    def column_resolution(self) -> int: ...

    @property
    def rows(self) -> Tensor: ...

    @property
    def row_resolution(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A matrix of unbounded integers and the logarithmic scales it is decoded with.

        value[i, j] = row_scale[i] * codes[i, j] * column_scale[j]

    Args:
        codes: (out, in) int32.
        base: of the column scales, positive, a fixed point of `stored_base`.
        columns: (in,) int32 exponents in steps of 1/column_resolution octave, at most 32768 in magnitude.
        column_resolution: a power of two, 1 ... 64.
        rows: (out,) int32 exponents; all zero costs nothing.
        row_resolution: a power of two, 1 ... 64.

    Raises:
        ValueError: a shape, a dtype or a value is not one of these.
    """

    codes: NDArray[np.int32]
    base: float
    columns: NDArray[np.int32]
    column_resolution: int
    rows: NDArray[np.int32]
    row_resolution: int

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or 0 in self.codes.shape or max(self.codes.shape) > MAX_SIDE:
            raise ValueError(f"codes of shape {self.codes.shape}; a matrix of at least 1 x 1 can be coded")
        out, width = self.codes.shape
        for name, array, shape in (
            ("codes", self.codes, (out, width)),
            ("columns", self.columns, (width,)),
            ("rows", self.rows, (out,)),
        ):
            if array.dtype != np.int32 or array.shape != shape:
                raise ValueError(f"{name}: expected {shape} of int32, found {array.shape} of {array.dtype}")
        for name, array in (("columns", self.columns), ("rows", self.rows)):
            if max(int(array.max()), -int(array.min())) > MAX_EXPONENT:
                raise ValueError(f"{name}: exponents reach {np.abs(array).max()}, at most {MAX_EXPONENT} can be stored")
        for resolution in (self.column_resolution, self.row_resolution):
            if resolution not in (1, 2, 4, 8, 16, 32, 64):
                raise ValueError(f"a ladder of {resolution} steps per octave; 1, 2, 4 ... 64 are possible")
        if not (self.base > 0 and math.isfinite(self.base) and stored_base(self.base) == self.base):
            raise ValueError(f"base {self.base} cannot be stored; the nearest that can is stored_base(base)")

    @classmethod
    def of(cls, codes: Tensor, ladders: Ladders) -> Self:
        """Return codes (out, in) in a tensor, on any device, with their scales."""
        found, columns, rows = (
            np.ascontiguousarray(part.cpu().numpy(), np.int32) for part in (codes, ladders.columns, ladders.rows)
        )
        return cls(
            codes=found,
            base=ladders.base,
            columns=columns,
            column_resolution=ladders.column_resolution,
            rows=rows,
            row_resolution=ladders.row_resolution,
        )

    @property
    def column_scale(self) -> NDArray[np.float32]:
        """float32(base * 2 ** (columns / column_resolution)), rounded once: (in,)."""
        with np.errstate(over="ignore"):
            return (self.base * np.exp2(self.columns / self.column_resolution)).astype(np.float32)

    @property
    def row_scale(self) -> NDArray[np.float32]:
        """float32(2 ** (rows / row_resolution)): (out,)."""
        with np.errstate(over="ignore"):
            return np.exp2(self.rows / self.row_resolution).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a matrix takes: `side` bytes that do not grow with its rows, and `payload` bits that do."""

    side: int
    payload: float

    @property
    def bits(self) -> float:
        """All of it."""
        return 8 * self.side + self.payload

    @property
    def bytes(self) -> int:
        """All of it, in whole bytes."""
        return self.side + math.ceil(self.payload / 8)


def stored_base(x: float) -> float:
    """Return the base nearest to x > 0 that can be stored: float32 of 2 ** (k / 256), k = -32768 ... 32767."""
    return _base(_rung(x))


def _rung(x: float) -> int:
    """Return the number, 0 ... 65535, that stands for the stored base nearest to x."""
    return min(max(round(256 * math.log2(x)) + 32768, 0), 65535)


def _base(rung: int) -> float:
    """Return the base that a stored number stands for."""
    return float(np.float32(2.0 ** ((rung - 32768) / 256)))


def encode(contents: Contents, *, threads: int | None = None) -> NDArray[np.uint8]:
    """Code a matrix; the bytes do not depend on the number of threads.

    Args:
        threads: at most so many at a time; None takes one per core. A chunk is the work of one.

    Returns:
        The bytes, one-dimensional uint8.
    """
    choices = _choices(contents)
    header, arrangement = choices.header, choices.layout
    bits, _ = write_header(header, arrangement)
    start = bytes([VERSION << 4 | TANS]) + varint(header.shape[0]) + varint(header.shape[1])
    tables = frequencies(header, arrangement)
    coded = encode_chunks(arrangement, tables, _plain(contents.codes), _threads(threads, arrangement))
    head = start + bits.bytes() + b"".join(varint(len(c)) + zlib.crc32(c).to_bytes(4, "little") for c in coded)
    return np.frombuffer(bytearray().join([head, zlib.crc32(head).to_bytes(4, "little"), *coded]), np.uint8)


def _plain(codes: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return codes in rows, in memory that may be written, though nothing does: kernels are compiled once, for such."""
    return np.require(codes, requirements=["C", "W"])


def _choices(contents: Contents) -> Choices:
    """Return a header for a matrix, and the layout that follows from it."""
    out, width = contents.codes.shape
    header = Header(
        shape=(out, width),
        base=_rung(contents.base),
        columns=contents.columns,
        column_resolution=contents.column_resolution,
        rows=contents.rows,
        row_resolution=contents.row_resolution,
        corrections=np.zeros(width, np.int32),
        row_levels=np.zeros(out, np.int32),
    )
    return choose(header, _plain(contents.codes))


def _threads(threads: int | None, layout: Layout) -> int:
    """Return how many threads work: as many as given, or one per core, and at most one per chunk."""
    return min(threads or os.cpu_count() or 1, len(chunk_edges(layout.total)) - 1)


def size(contents: Contents) -> Size:
    """Return what `encode` would take: from histograms, without coding."""
    choices = _choices(contents)
    header = choices.header
    bits, of_rows = write_header(header, choices.layout)
    start = 1 + len(varint(header.shape[0])) + len(varint(header.shape[1]))
    payload = payload_bits(choices, tally(choices, _plain(contents.codes)))
    return Size(side=start + (bits.count - of_rows) // 8 + 4, payload=of_rows + payload)


def shape_of(blob: NDArray[np.uint8], *, name: str = "matrix") -> tuple[int, int]:
    """Return (out, in) from the first bytes, which are not checked against the checksum."""
    return read_shape(blob, name)[0]


def decode(
    blob: NDArray[np.uint8], *, name: str = "matrix", threads: int | None = None, shape: tuple[int, int] | None = None
) -> Contents:
    """Return exactly what was encoded.

    Args:
        name: of the matrix, for messages.
        shape: (out, in) that the caller expects; refused before memory is taken where the header says otherwise.

    Raises:
        FormatError: the bytes are damaged, cut short, or of another version; says where.
    """
    header, arrangement, symbols, (rows, columns, delta) = _symbols(blob, name, threads, shape)
    codes = np.empty(header.shape, np.int32)

    def some(begin: int, end: int) -> None:
        scatter(symbols, arrangement.groups, arrangement.orders, begin, end, codes)

    run(_threads(threads, arrangement), some, header.shape[0])
    codes[rows, columns] += delta
    return _contents(header, codes)


def _contents(header: Header, codes: NDArray[np.int32]) -> Contents:
    """Return codes with the scales of a header."""
    return Contents(
        codes=codes,
        base=_base(header.base),
        columns=header.columns,
        column_resolution=header.column_resolution,
        rows=header.rows,
        row_resolution=header.row_resolution,
    )


def decode_packed(
    blob: NDArray[np.uint8], *, name: str = "matrix", threads: int | None = None, shape: tuple[int, int] | None = None
) -> PackedMatrix:
    """Return what a runtime multiplies with: nibbles or int8 by groups of columns, and patches. See `decode`."""
    header, arrangement, symbols, patches = _symbols(blob, name, threads, shape)
    scales = _contents(header, np.broadcast_to(np.int32(0), header.shape))
    return pack(arrangement, symbols, patches, scales.column_scale, scales.row_scale)


def _symbols(
    blob: NDArray[np.uint8], name: str, threads: int | None, shape: tuple[int, int] | None
) -> tuple[Header, Layout, NDArray[np.uint8], Patches]:
    """Decode all symbols, and what is to be added to codes that were escaped."""
    if blob.dtype != np.uint8 or blob.ndim != 1:
        raise ValueError(f"a coded matrix is one-dimensional uint8, found {blob.ndim} dimensions of {blob.dtype}")
    blob = np.require(blob, requirements=["C", "W"])  # kernels are compiled once, for memory that may be written
    found = shape_of(blob, name=name)
    if shape is not None and tuple(shape) != found:
        raise FormatError(
            f"{name}: holds {found[0]} x {found[1]} weights, expected {shape[0]} x {shape[1]}; the file is damaged"
        )
    header, arrangement, bits = read_header(blob, name)
    return header, arrangement, *decode_chunks(bits, header, arrangement, _threads(threads, arrangement))

"""Coded matrix of integers and scales in one array of bytes: encode, decode, size; specified in docs/format.md."""

from __future__ import annotations

import math
import os
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from nearplane.coding.bit_stream import DAMAGED, BitReader, varint
from nearplane.coding.chunk import Patches
from nearplane.coding.encoder_choices import Choices, choose, payload_bits, tally
from nearplane.coding.header_bits import read_header, read_shape, write_header
from nearplane.coding.layout import MAX_EXPONENT, MAX_SIDE, TANS, VERSION, Header, Layout, chunk_edges, frequencies
from nearplane.coding.packed_matrix import PackedMatrix, pack
from nearplane.coding.payload import Streams, decode_chunks, encode_chunks, read_streams, run
from nearplane.coding.symbols import scatter
from nearplane.errors import FormatError, NumericalError

if TYPE_CHECKING:
    from torch import Tensor


SHAPE_BYTES = 16  # of a blob, from which `shape_of` reads


class Ladders(Protocol):
    """Scales of rows and columns, see `Contents`; `lattice.product_grid.ProductGrid` has them, but is not imported here."""

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
    """A matrix of unbounded integers with logarithmic scales of rows and columns.

        value[i, j] = row_scale[i] * codes[i, j] * column_scale[j]

    Args:
        codes: (out, in) int32.
        base: Base of the column scales, positive, a fixed point of `stored_base`.
        columns: (in,) int32 exponents in units of 1/column_resolution octave, at most 32768 in magnitude.
        column_resolution: Number of exponents per octave, a power of two, 1 ... 64.
        rows: (out,) int32 exponents; if all are zero they take no bits.
        row_resolution: Number of exponents per octave, a power of two, 1 ... 64.

    Raises:
        ValueError: A shape, a dtype or a value is invalid.
    """

    codes: NDArray[np.int32]
    base: float
    columns: NDArray[np.int32]
    column_resolution: int
    rows: NDArray[np.int32]
    row_resolution: int

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or 0 in self.codes.shape or max(self.codes.shape) > MAX_SIDE:
            raise ValueError(f"The codes have shape {self.codes.shape}; expected a matrix of at least 1 x 1.")
        out, width = self.codes.shape
        for name, array, shape in (
            ("codes", self.codes, (out, width)),
            ("columns", self.columns, (width,)),
            ("rows", self.rows, (out,)),
        ):
            if array.dtype != np.int32 or array.shape != shape:
                raise ValueError(f"{name}: expected {shape} of int32, got {array.shape} of {array.dtype}.")
        for name, array in (("columns", self.columns), ("rows", self.rows)):
            if max(int(array.max()), -int(array.min())) > MAX_EXPONENT:
                raise ValueError(f"{name}: exponents reach {np.abs(array).max()}; the limit is {MAX_EXPONENT}.")
        for resolution in (self.column_resolution, self.row_resolution):
            if resolution not in (1, 2, 4, 8, 16, 32, 64):
                raise ValueError(f"The scales have {resolution} steps per octave; expected 1, 2, 4 ... 64.")
        if not (self.base > 0 and math.isfinite(self.base) and stored_base(self.base) == self.base):
            raise ValueError(f"The base {self.base} cannot be stored; use stored_base(base).")

    @classmethod
    def of(cls, codes: Tensor, ladders: Ladders) -> Self:
        """Return the contents of codes (out, in) in a tensor on any device, with their scales."""
        integers, columns, rows = (
            np.ascontiguousarray(part.cpu().numpy(), np.int32) for part in (codes, ladders.columns, ladders.rows)
        )
        return cls(
            codes=integers,
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
    """Size of a coded matrix: `side` bytes that do not grow with its rows, and `payload` bits that do."""

    side: int
    payload: float

    @property
    def bits(self) -> float:
        """Total size in bits."""
        return 8 * self.side + self.payload

    @property
    def bytes(self) -> int:
        """Total size in whole bytes."""
        return self.side + math.ceil(self.payload / 8)


def stored_base(x: float) -> float:
    """Return the base nearest to x > 0 that can be stored: float32 of 2 ** (k / 256), k = -32768 ... 32767.

    Raises:
        NumericalError: x is not a positive finite number.
    """
    if not 0 < x < math.inf:
        raise NumericalError(
            f"The step is {x}: a weight or sensitivity is NaN, Inf or negative, or the weights leave the range of their dtype."
        )
    return _base(_base_exponent(x))


def _base_exponent(x: float) -> int:
    """Return the number 0 ... 65535 that is stored for the base nearest to x."""
    return min(max(round(256 * math.log2(x)) + 32768, 0), 65535)


def _base(exponent: int) -> float:
    """Return the base for a stored number."""
    return float(np.float32(2.0 ** ((exponent - 32768) / 256)))


def encode(contents: Contents, *, threads: int | None = None) -> NDArray[np.uint8]:
    """Code a matrix; the bytes do not depend on the number of threads.

    Args:
        threads: Maximum number of threads; None: one per core. Each chunk is coded by one thread.

    Returns:
        The bytes as one-dimensional uint8.
    """
    choices = _choices(contents)
    header, arrangement = choices.header, choices.layout
    bits, _ = write_header(header, arrangement)
    start = bytes([VERSION << 4 | TANS]) + varint(header.shape[0]) + varint(header.shape[1])
    tables = frequencies(header, arrangement)
    coded = encode_chunks(arrangement, tables, _as_kernel_input(contents.codes), _thread_count(threads, arrangement))
    head = start + bits.bytes() + b"".join(varint(len(c)) + zlib.crc32(c).to_bytes(4, "little") for c in coded)
    return np.frombuffer(bytearray().join([head, zlib.crc32(head).to_bytes(4, "little"), *coded]), np.uint8)


def _as_kernel_input(codes: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return codes in contiguous writable memory, the only kind that kernels are compiled for; nothing writes to it."""
    return np.require(codes, requirements=["C", "W"])


def _choices(contents: Contents) -> Choices:
    """Return the encoder's choices for a matrix: header, layout and sample."""
    out, width = contents.codes.shape
    header = Header(
        shape=(out, width),
        base=_base_exponent(contents.base),
        columns=contents.columns,
        column_resolution=contents.column_resolution,
        rows=contents.rows,
        row_resolution=contents.row_resolution,
        corrections=np.zeros(width, np.int32),
        row_levels=np.zeros(out, np.int32),
    )
    return choose(header, _as_kernel_input(contents.codes))


def _thread_count(threads: int | None, layout: Layout) -> int:
    """Return the number of threads to use: `threads` or one per core, at most one per chunk."""
    return min(threads or os.cpu_count() or 1, len(chunk_edges(layout.total)) - 1)


def size(contents: Contents) -> Size:
    """Return the size of the result of `encode`, estimated from histograms without coding."""
    choices = _choices(contents)
    header = choices.header
    bits, of_rows = write_header(header, choices.layout)
    start = 1 + len(varint(header.shape[0])) + len(varint(header.shape[1]))
    payload = payload_bits(choices, tally(choices, _as_kernel_input(contents.codes)))
    return Size(side=start + (bits.count - of_rows) // 8 + 4, payload=of_rows + payload)


def shape_of(blob: NDArray[np.uint8], *, name: str = "matrix") -> tuple[int, int]:
    """Return (out, in) from the first bytes; the checksum is not verified."""
    return read_shape(blob, name)[0]


def decode(
    blob: NDArray[np.uint8], *, name: str = "matrix", threads: int | None = None, shape: tuple[int, int] | None = None
) -> Contents:
    """Return exactly the contents that were encoded.

    Args:
        blob: Bytes of the coded matrix.
        name: Name of the matrix for messages.
        threads: Maximum number of threads; None: one per core.
        shape: Expected (out, in); another shape is refused before memory is allocated.

    Raises:
        FormatError: The bytes are damaged, truncated, or of another version of the format.
    """
    header, arrangement, symbols, (rows, columns, delta) = _symbols(blob, name, threads, shape)
    codes = np.empty(header.shape, np.int32)

    def scatter_rows(begin: int, end: int) -> None:
        scatter(symbols, arrangement.groups, arrangement.orders, begin, end, codes)

    run(_thread_count(threads, arrangement), scatter_rows, header.shape[0])
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


def scales_of(header: Header) -> Contents:
    """Return the scales of a header; all codes are 0."""
    return _contents(header, np.broadcast_to(np.int32(0), header.shape))


def decode_packed(
    blob: NDArray[np.uint8], *, name: str = "matrix", threads: int | None = None, shape: tuple[int, int] | None = None
) -> PackedMatrix:
    """Return the matrix in the form of a runtime: nibbles or int8 by groups of columns, and patches. See `decode`."""
    header, arrangement, symbols, patches = _symbols(blob, name, threads, shape)
    scales = scales_of(header)
    return pack(arrangement, symbols, patches, scales.column_scale, scales.row_scale)


def _symbols(
    blob: NDArray[np.uint8], name: str, threads: int | None, shape: tuple[int, int] | None
) -> tuple[Header, Layout, NDArray[np.uint8], Patches]:
    """Decode all symbols, and the patches that are added to escaped codes."""
    header, arrangement, bits = _read_header(blob, name, shape)
    return header, arrangement, *decode_chunks(bits, header, arrangement, _thread_count(threads, arrangement))


class Coded(NamedTuple):
    """A blob of which everything is read but the lanes."""

    header: Header
    layout: Layout
    streams: Streams


def streams_of(blob: NDArray[np.uint8], name: str) -> Coded:
    """Read everything but the lanes, and check all checksums. See `decode`."""
    header, arrangement, bits = _read_header(blob, name, None)
    return Coded(header, arrangement, read_streams(bits, header, arrangement))


def _read_header(blob: NDArray[np.uint8], name: str, shape: tuple[int, int] | None) -> tuple[Header, Layout, BitReader]:
    """Check the form of a blob, and read its header."""
    if blob.dtype != np.uint8 or blob.ndim != 1:
        raise ValueError(f"A coded matrix must be one-dimensional uint8; got {blob.ndim} dimensions of {blob.dtype}.")
    blob = np.require(blob, requirements=["C", "W"])  # kernels are compiled for writable memory only
    stored = shape_of(blob, name=name)
    if shape is not None and tuple(shape) != stored:
        raise FormatError(f"{name} has {stored[0]} x {stored[1]} weights, expected {shape[0]} x {shape[1]}. {DAMAGED}")
    return read_header(blob, name)

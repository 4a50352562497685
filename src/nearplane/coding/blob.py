"""Coded matrix of integers and scales in one array of bytes: encode, decode, size; specified in docs/format.md."""

from __future__ import annotations

import math
import os
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from nearplane.coding.bit_stream import varint
from nearplane.coding.chunk import Patches
from nearplane.coding.encoder_choices import Choices, choose, payload_bits, tally
from nearplane.coding.header_bits import read_header, read_shape, write_header
from nearplane.coding.layout import MAX_SIDE, TANS, VERSION, Header, Layout, chunk_edges, frequencies
from nearplane.coding.packed_matrix import PackedMatrix, pack
from nearplane.coding.payload import Streams, decode_chunks, encode_chunks, read_streams, run
from nearplane.coding.scales import Scales
from nearplane.coding.symbols import scatter

if TYPE_CHECKING:
    from torch import Tensor


SHAPE_BYTES = 16  # of a blob, from which `shape_of` reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A matrix of unbounded integers with logarithmic scales of rows and columns.

        value[i, j] = row_scale[i] * codes[i, j] * column_scale[j]

    Args:
        codes: (out, in) int32.
        scales: Scales of `out` rows and `in` columns.

    Raises:
        ValueError: A shape or a dtype is invalid.
    """

    codes: NDArray[np.int32]
    scales: Scales

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or 0 in self.codes.shape or max(self.codes.shape) > MAX_SIDE:
            raise ValueError(f"The codes have shape {self.codes.shape}; expected a matrix of at least 1 x 1.")
        out, width = self.codes.shape
        for name, array, shape in (
            ("codes", self.codes, (out, width)),
            ("columns", self.scales.columns, (width,)),
            ("rows", self.scales.rows, (out,)),
        ):
            if array.dtype != np.int32 or array.shape != shape:
                raise ValueError(f"{name}: expected {shape} of int32, got {array.shape} of {array.dtype}.")

    @classmethod
    def of(cls, codes: Tensor, grid: Any) -> Self:
        """Return the contents of codes (out, in) on any device, and of a grid with the fields of `Scales` as tensors."""
        integers, columns, rows = (
            np.ascontiguousarray(part.cpu().numpy(), np.int32) for part in (codes, grid.columns, grid.rows)
        )
        scales = Scales(
            base=grid.base,
            columns=columns,
            column_resolution=grid.column_resolution,
            rows=rows,
            row_resolution=grid.row_resolution,
        )
        return cls(codes=integers, scales=scales)


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
    columns, rows = np.zeros(width, np.int32), np.zeros(out, np.int32)
    header = Header(shape=(out, width), scales=contents.scales, corrections=columns, row_levels=rows)
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


def decode(blob: NDArray[np.uint8], *, name: str = "matrix", threads: int | None = None) -> Contents:
    """Return exactly the contents that were encoded.

    Args:
        blob: Bytes of the coded matrix.
        name: Name of the matrix for messages.
        threads: Maximum number of threads; None: one per core.

    Raises:
        FormatError: The bytes are damaged, truncated, or of another version of the format.
    """
    header, arrangement, symbols, (rows, columns, delta) = _symbols(blob, name, threads)
    codes = np.empty(header.shape, np.int32)

    def scatter_rows(begin: int, end: int) -> None:
        scatter(symbols, arrangement.groups, arrangement.orders, begin, end, codes)

    run(_thread_count(threads, arrangement), scatter_rows, header.shape[0])
    codes[rows, columns] += delta
    return Contents(codes=codes, scales=header.scales)


def decode_packed(blob: NDArray[np.uint8], *, name: str = "matrix", threads: int | None = None) -> PackedMatrix:
    """Return the matrix in the form of a runtime: nibbles or int8 by groups of columns, and patches. See `decode`."""
    header, arrangement, symbols, patches = _symbols(blob, name, threads)
    return pack(arrangement, symbols, patches, header.scales)


def _symbols(
    blob: NDArray[np.uint8], name: str, threads: int | None
) -> tuple[Header, Layout, NDArray[np.uint8], Patches]:
    """Decode all symbols, and the patches that are added to escaped codes."""
    header, arrangement, bits = read_header(blob, name)
    return header, arrangement, *decode_chunks(bits, header, arrangement, _thread_count(threads, arrangement))


class Coded(NamedTuple):
    """A blob of which everything is read but the lanes."""

    header: Header
    layout: Layout
    streams: Streams


def streams_of(blob: NDArray[np.uint8], name: str) -> Coded:
    """Read everything but the lanes, and check all checksums. See `decode`."""
    header, arrangement, bits = read_header(blob, name)
    return Coded(header, arrangement, read_streams(bits, header, arrangement))

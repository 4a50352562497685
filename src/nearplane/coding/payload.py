"""Coding and decoding of the symbols of a matrix in chunks, which threads divide among them."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from nearplane.coding import chunk as kernels
from nearplane.coding import tans
from nearplane.coding.bit_stream import DAMAGED, BitReader, read_varint
from nearplane.coding.chunk import Heads, Patches
from nearplane.coding.layout import Header, Layout, chunk_edges, frequencies
from nearplane.coding.symbols import write_symbols
from nearplane.errors import FormatError

R = TypeVar("R")
# few, because starting a part blocks the other threads, but enough to balance the load
PARTS_PER_THREAD = 4


class Streams(NamedTuple):
    """The chunks of a matrix before their lanes are decoded."""

    edges: NDArray[np.int64]  # (chunks + 1,) first symbol of every chunk, and the end
    heads: Heads
    entries: NDArray[np.uint32]  # (tables, 4096) see `tans`


def run(threads: int, function: Callable[[int, int], R], count: int) -> list[R]:
    """Call a function with parts begin, end of range(count) in `threads` threads; return the results in order."""
    if threads == 1:
        return [function(0, count)]
    parts = min(count, PARTS_PER_THREAD * threads)
    edges = [i * count // parts for i in range(parts + 1)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, edges[:-1], edges[1:]))


def damage(fault: int, name: str, chunk: int, chunks: int) -> FormatError:
    """Return the error for a chunk of a matrix that a kernel refused."""
    what = {
        kernels.ESCAPES_CUT_SHORT: "its bytes end within the list of escapes",
        kernels.LANE_LENGTHS_CUT_SHORT: "its bytes end within the lengths of the lanes",
        kernels.LANES_TOO_LONG: "its lanes are longer than its bytes",
        kernels.STREAM_END_WRONG: "a stream does not end where its symbols do",
        kernels.ESCAPE_COUNT_WRONG: "its symbols do not have the escapes of its list",
    }[fault]
    return FormatError(f"{name}, chunk {chunk} of {chunks}: {what}. {DAMAGED}")


def encode_chunks(
    layout: Layout, tables: NDArray[np.uint16], codes: NDArray[np.int32], threads: int
) -> list[memoryview]:
    """Return the chunks of a matrix."""
    edges = chunk_edges(layout.total)
    encoder = tans.build(tables)[1]
    dense = np.empty(codes.shape, np.uint8)
    run(threads, lambda begin, end: write_symbols(codes, layout.orders, begin, end, dense), len(codes))
    # (tables, 256) each symbol that a table has, else 0 (one escape, or two in a pair)
    coded_symbols = np.where(tables > 0, np.arange(256, dtype=np.uint8), np.uint8(0))

    def process(first: int, last: int) -> list[memoryview]:
        bounds = np.array(edges[first : last + 1])
        coded, starts = kernels.write_chunks(codes, dense, bounds, layout, coded_symbols, encoder)
        return [coded.data[start:end] for start, end in itertools.pairwise(starts)]

    return [chunk for part in run(threads, process, len(edges) - 1) for chunk in part]


def decode_chunks(bits: BitReader, header: Header, layout: Layout, threads: int) -> tuple[NDArray[np.uint8], Patches]:
    """Read the directory and the chunks after a header; return the decoded symbols and the patches."""
    blob, name = bits.data, bits.name
    edges = chunk_edges(layout.total)
    chunks = len(edges) - 1
    starts, checksums = _directory(bits, chunks)
    entries = _decoding_tables(header, layout)
    symbols = np.empty(layout.total, np.uint8)

    def process(first: int, last: int) -> list[Patches]:
        _check(bits, starts, checksums, range(first, last))
        bounds = np.array(starts[first : last + 1]), np.array(edges[first : last + 1])
        fault, chunk, patches = kernels.read_chunks(blob, *bounds, layout, entries, symbols)
        if fault:
            raise damage(fault, name, first + chunk, chunks)
        return [patches]

    parts = [patches for part in run(threads, process, chunks) for patches in part]
    if len(parts) == 1:
        return symbols, parts[0]
    return symbols, Patches(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def read_streams(bits: BitReader, header: Header, layout: Layout) -> Streams:
    """Read everything after a header but the lanes, which a device decodes."""
    edges = chunk_edges(layout.total)
    starts, checksums = _directory(bits, len(edges) - 1)
    _check(bits, starts, checksums, range(len(checksums)))
    fault, chunk, heads = kernels.read_heads(bits.data, np.array(starts))
    if fault:
        raise damage(fault, bits.name, chunk, len(checksums))
    return Streams(np.array(edges), heads, _decoding_tables(header, layout))


def _decoding_tables(header: Header, layout: Layout) -> NDArray[np.uint32]:
    """Return (tables, 4096) entries of the decoder, see `tans`."""
    entries = tans.build(frequencies(header, layout))[0]
    entries[layout.tags & 1 == 0] ^= 128 << 8  # byte tables emit code as int8 in place of code + 128
    return entries


def _check(bits: BitReader, starts: list[int], checksums: list[int], chunks: range) -> None:
    """Compare chunks with their checksums.

    Raises:
        FormatError: One differs.
    """
    for chunk in chunks:
        coded = bits.data[starts[chunk] : starts[chunk + 1]]
        if zlib.crc32(coded.data) != checksums[chunk]:
            raise FormatError(
                f"{bits.name}, chunk {chunk} of {len(checksums)}: the checksum of {len(coded)} bytes is wrong. {DAMAGED}"
            )


def _directory(bits: BitReader, chunks: int) -> tuple[list[int], list[int]]:
    """Return the starts of the chunks and the end, and the checksums of the chunks."""
    blob, name = bits.data, bits.name
    lengths, checksums, header_end = [], [], (bits.at + 7) // 8
    for _ in range(chunks):
        length, bits.at = read_varint(blob, header_end)
        if bits.at < 0:
            raise bits.truncated("directory")
        bits.at *= 8
        lengths.append(length)
        checksums.append(bits.take(32, "directory"))
        header_end = bits.at // 8
    if zlib.crc32(blob[:header_end].data) != bits.take(32, "directory"):
        raise FormatError(f"{name}: the checksum of its header is wrong. {DAMAGED}")
    starts = [header_end + 4]
    for length in lengths:
        starts.append(starts[-1] + length)
    if starts[-1] != len(blob):
        raise FormatError(f"{name}: its chunks take {starts[-1]} bytes, but the matrix has {len(blob)}. {DAMAGED}")
    return starts, checksums

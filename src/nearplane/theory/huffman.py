"""Canonical Huffman codes of at most twelve bits, and what a matrix of integers takes behind one of them.

Nothing is written with them: a size follows from the lengths of the code words. All that is stored beside the words is counted:
the step, the table, what no table holds. A code of length l is also a frequency of 2^(12 - l), so that the sums of the tANS coder
serve both.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearplane.coding import frequency_tables
from nearplane.coding.bit_stream import varint
from nearplane.coding.blob import Size
from nearplane.coding.cost import Counts, list_bits, sample, stream_bits
from nearplane.coding.encoder_choices import Choices, member, sampled_columns, stored_tables, tally
from nearplane.coding.header_bits import write_header
from nearplane.coding.layout import Header, chunk_edges, lay_out

MAX_CODE_BITS = 12
LARGE = 1 << 17  # codes from which on a matrix stands in chunks
AROUND = 42  # bytes of a chunk beside its codes: directory, eight states, lengths and ends of lanes


def lengths(frequency: NDArray[np.uint16]) -> NDArray[np.int64]:
    """Return the code lengths (256,) that are shortest for the frequencies; 0 where a symbol has none, or is alone.

    Package-merge (Larmore and Hirschberg, 1990): each of twelve rounds pairs up the cheapest packages of the last one
    and merges them with the symbols; a symbol's length is the number of chosen packages that it is in. Equals keep
    their order, symbols before packages, so that every reader finds the same lengths.
    """
    found = np.zeros(256, np.int64)
    symbols = [int(s) for s in np.flatnonzero(frequency)]
    if len(symbols) < 2:
        return found
    alone: list[tuple[int, tuple[int, ...]]] = sorted((int(frequency[s]), (s,)) for s in symbols)
    packages: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(MAX_CODE_BITS):
        pairs = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(packages[::2], packages[1::2], strict=False)]
        packages = list(heapq.merge(alone, pairs, key=lambda package: package[0]))
    for _, members in packages[: 2 * len(symbols) - 2]:
        for symbol in members:
            found[symbol] += 1
    return found


def frequencies(frequency: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Return the powers of two (256,) that stand for the Huffman code of the frequencies; they sum to 4096."""
    found = lengths(frequency)
    if not found.any():
        return frequency
    return np.where(found > 0, 1 << (MAX_CODE_BITS - found), 0).astype(np.uint16)


class Parts(NamedTuple):
    """What a coded matrix consists of."""

    start: int  # bytes of version, shape and checksum
    header: int  # bits of the step and the table
    payload: float  # bits of code words, of numbers that no table holds and that are listed, of what is around chunks
    listed: int  # how many these are


def foretold_size(codes: NDArray[np.int32]) -> Size:
    """Return about what a matrix (out, in) with one step takes behind one Huffman code, whose table is stored where that pays.

    Header, table and lists are as in docs/format.md; small matrices are one stream, large ones chunks of eight.
    """
    parts = _parts(codes)
    return Size(side=parts.start + parts.header // 8, payload=parts.payload)


def coded_bytes(codes: NDArray[np.int32]) -> int:
    """Return what it takes to the byte; of large matrices to a byte or two a chunk."""
    parts = _parts(codes)
    length = 2 * ((parts.listed + 1).bit_length() - 1) + 4 if parts.listed else 0  # of a list: gamma code, parameter
    return parts.start + math.ceil((parts.header + parts.payload + length) / 8)


def _parts(codes: NDArray[np.int32]) -> Parts:
    codes = np.require(codes, requirements=["C", "W"])  # kernels are compiled once, for such
    choices = _one_table(codes)
    header = choices.header
    table = header.stored.get(header.spread)
    if table is None:
        table = frequency_tables.parametric(header.spread, header.mixture)
    found = tally(choices, codes)
    bits, listed = stream_bits(found.counts[header.spread], frequencies(table))
    count = int(listed.sum())
    around = 13.0 if codes.size < LARGE else 8.0 * AROUND * (len(chunk_edges(codes.size)) - 1)
    return Parts(
        start=1 + sum(len(varint(n)) for n in header.shape) + 4,
        header=write_header(header, choices.layout)[0].count,
        payload=bits + list_bits(listed, found.beyond) + around,
        listed=count,
    )


def _one_table(codes: NDArray[np.int32]) -> Choices:
    """Choose the one table of a matrix: a member of the family, or the counts themselves if the file is shorter with them."""
    out, columns = codes.shape
    rows, zeros = np.zeros(out, np.int32), np.zeros(columns, np.int32)
    header = Header(
        shape=(out, columns),
        base=0,
        columns=zeros,
        column_resolution=1,
        rows=rows,
        row_resolution=1,
        corrections=zeros,
        row_levels=rows,
    )
    counts = Counts(codes, rows, sample(out, columns))
    header, _ = member(header, counts, sampled_columns(columns), (0,), 16)
    spread = int(counts.costs(header.mixture, 16).sum(0, dtype=np.float64).argmin())
    header = replace(header, spread=spread)
    symbols = counts.by_spread(np.full((columns, 1), spread))
    stored = stored_tables(header, symbols, {spread: 0.0}, sampled=len(counts.rows) < out)
    return Choices(header=replace(header, stored=stored), layout=lay_out(header), sample=counts)

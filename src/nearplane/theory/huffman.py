"""Canonical Huffman codes of at most twelve bits, and the size of a matrix of integers coded with one of them.

No file is written: a size follows from the lengths of the code words, plus everything stored beside them, such as the
step, the table and codes outside the table. A code of length l corresponds to a frequency of 2^(12 - l), so the cost
functions of the tANS coder apply.
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
from nearplane.coding.scales import Scales

MAX_CODE_BITS = 12
MIN_CHUNKED_CODES = 1 << 17  # matrices with fewer codes are one stream
CHUNK_OVERHEAD = 42  # bytes of a chunk without codes: directory, eight states, lengths and ends of lanes


def lengths(frequency: NDArray[np.uint16]) -> NDArray[np.int64]:
    """Return the optimal code lengths (256,) for the frequencies; 0 for a symbol with frequency 0, or a single symbol.

    Package-merge (Larmore and Hirschberg, 1990): each of twelve rounds pairs the cheapest packages of the previous one
    and merges them with the symbols; a symbol's length is the number of chosen packages with this symbol. Ties keep
    their order, symbols before packages, so that every reader derives the same lengths.
    """
    code_lengths = np.zeros(256, np.int64)
    symbols = [int(s) for s in np.flatnonzero(frequency)]
    if len(symbols) < 2:
        return code_lengths
    leaves: list[tuple[int, tuple[int, ...]]] = sorted((int(frequency[s]), (s,)) for s in symbols)
    packages: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(MAX_CODE_BITS):
        pairs = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(packages[::2], packages[1::2], strict=False)]
        packages = list(heapq.merge(leaves, pairs, key=lambda package: package[0]))
    for _, members in packages[: 2 * len(symbols) - 2]:
        for symbol in members:
            code_lengths[symbol] += 1
    return code_lengths


def frequencies(frequency: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Return powers of two (256,) that represent the Huffman code of the frequencies; they sum to 4096."""
    code_lengths = lengths(frequency)
    if not code_lengths.any():
        return frequency
    return np.where(code_lengths > 0, 1 << (MAX_CODE_BITS - code_lengths), 0).astype(np.uint16)


class Parts(NamedTuple):
    """Sizes of the parts of a coded matrix."""

    start: int  # bytes of version, shape and checksum
    header: int  # bits of the step and the table
    payload: float  # bits of code words, of listed codes outside the table, and of chunk overhead
    listed: int  # number of listed codes


def estimated_size(codes: NDArray[np.int32]) -> Size:
    """Estimate the size of codes (out, in) with one step and one Huffman code; its table is stored if that pays.

    Header, table and lists are as in docs/format.md; small matrices are one stream, large ones chunks of eight.
    """
    parts = _parts(codes)
    return Size(side=parts.start + parts.header // 8, payload=parts.payload)


def coded_bytes(codes: NDArray[np.int32]) -> int:
    """Return the size of codes (out, in) in bytes: exact for small matrices, else within 1 or 2 per chunk."""
    parts = _parts(codes)
    length = 2 * ((parts.listed + 1).bit_length() - 1) + 4 if parts.listed else 0  # gamma code, parameter
    return parts.start + math.ceil((parts.header + parts.payload + length) / 8)


def _parts(codes: NDArray[np.int32]) -> Parts:
    codes = np.require(codes, requirements=["C", "W"])  # the only memory that kernels are compiled for
    choices = _one_table(codes)
    header = choices.header
    table = header.stored.get(header.spread)
    if table is None:
        table = frequency_tables.parametric(header.spread, header.mixture)
    counts = tally(choices, codes)
    bits, listed = stream_bits(counts.counts[header.spread], frequencies(table))
    count = int(listed.sum())
    overhead = 13.0 if codes.size < MIN_CHUNKED_CODES else 8.0 * CHUNK_OVERHEAD * (len(chunk_edges(codes.size)) - 1)
    return Parts(
        start=1 + sum(len(varint(n)) for n in header.shape) + 4,
        header=write_header(header, choices.layout)[0].count,
        payload=bits + list_bits(listed, counts.beyond) + overhead,
        listed=count,
    )


def _one_table(codes: NDArray[np.int32]) -> Choices:
    """Choose the table of a matrix: a member of the family, or the counts if they make the file shorter."""
    out, columns = codes.shape
    rows, zeros = np.zeros(out, np.int32), np.zeros(columns, np.int32)
    header = Header(
        shape=(out, columns),
        scales=Scales(base=1.0, columns=zeros, column_resolution=1, rows=rows, row_resolution=1),
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

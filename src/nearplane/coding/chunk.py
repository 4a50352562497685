"""Compiled coding and decoding of chunks: one call handles many chunks while other threads run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearplane.coding import tans
from nearplane.coding.bit_stream import best_rice, read_rice, write_rice, zigzag
from nearplane.coding.layout import Cells, Layout
from nearplane.coding.symbols import SIGN_BITS, gather, locate
from nearplane.coding.tans import LANES, PADDING_BYTES, EncoderTables, Lanes, Segments
from nearplane.compiled import compiled

_u64 = np.uint64

# faults of a chunk; 0 stands for none
ESCAPES_CUT_SHORT, LANE_LENGTHS_CUT_SHORT, LANES_TOO_LONG, STREAM_END_WRONG, ESCAPE_COUNT_WRONG = range(1, 6)


class Patches(NamedTuple):
    """Corrections that are added to escaped codes."""

    rows: NDArray[np.int32]  # (patches,) row of the matrix
    columns: NDArray[np.int32]  # (patches,) column of the matrix
    delta: NDArray[np.int64]  # (patches,) number to add to the code


class Heads(NamedTuple):
    """What stands in chunks before their lanes."""

    counts: NDArray[np.int64]  # (chunks,) number of escapes
    values: NDArray[np.int64]  # (escapes,) codes of the escapes of all chunks
    firsts: NDArray[np.int64]  # (chunks,) first byte of the first lane in the blob
    lengths: NDArray[np.int64]  # (chunks, 8) see `Lanes`
    words: NDArray[np.int64]  # (chunks, 8)


@compiled()
def _copy(source: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
    """Copy bytes to the beginning of `target`; an assignment to a slice would take three seconds to compile."""
    for i in range(len(source)):
        target[i] = source[i]


@compiled()
def segments(begin: int, end: int, cells: Cells) -> Segments:
    """Return the segments of the symbols begin ... end - 1: their count in each cell that has any, and its table."""
    edges = cells.edges
    counts, tables, n = np.empty(len(cells.tables), np.int64), np.empty(len(cells.tables), np.int64), 0
    for cell in range(len(cells.tables)):
        count = min(edges[cell + 1], end) - max(edges[cell], begin)
        if count > 0:
            counts[n], tables[n] = count, cells.tables[cell]
            n += 1
    return Segments(counts[:n], tables[:n])


@compiled()
def _read_count(chunk: NDArray[np.uint8]) -> tuple[int, int, int]:
    """Return the position after the head of a list of escapes (-1 if truncated), their number, and Rice parameter."""
    bits, width = 8 * len(chunk), 0
    while width < bits and (chunk[width >> 3] >> (width & 7)) & 1:
        width += 1
    at = width + 1
    if width > 31 or at + width > bits:
        return -1, 0, 0
    count = 1 << width
    for i in range(width):
        count += int(np.int64((chunk[at >> 3] >> (at & 7)) & 1)) << i
        at += 1
    count -= 1
    parameter = 0
    if count:
        if at + 4 > bits:
            return -1, 0, 0
        for i in range(4):
            parameter |= int(np.int64((chunk[at >> 3] >> (at & 7)) & 1)) << i
            at += 1
    return (at, count, parameter) if count * (parameter + 1) <= bits - at else (-1, 0, 0)


@compiled()
def _read_lanes(chunk: NDArray[np.uint8], at: int, lanes: Lanes) -> tuple[int, int]:
    """Fill `lanes` from their description at byte `at`; return the fault or 0, and the first byte of the first lane."""
    lengths, words = lanes
    if at + 2 * LANES > len(chunk):
        return LANE_LENGTHS_CUT_SHORT, 0
    for lane in range(LANES):
        words[lane] = np.int64(chunk[at]) | np.int64(chunk[at + 1]) << 8
        at += 2
        if words[lane] >> 15:
            return LANES_TOO_LONG, 0
    total = np.int64(0)
    for lane in range(LANES - 1):
        value, shift = np.int64(0), 0
        while True:
            if at >= len(chunk):
                return LANE_LENGTHS_CUT_SHORT, 0
            if shift > 28:
                return LANES_TOO_LONG, 0
            byte = np.int64(chunk[at])
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        lengths[lane] = value
        total += value
    lengths[LANES - 1] = len(chunk) - at - total
    return (LANES_TOO_LONG if lengths[LANES - 1] < 0 else 0), at


@compiled()
def _read_head(chunk: NDArray[np.uint8], lanes: Lanes) -> tuple[int, int, NDArray[np.int64]]:
    """Fill `lanes`; return the fault of the chunk's head or 0, the first byte of the first lane, and the escaped codes."""
    at, count, parameter = _read_count(chunk)
    values = np.empty(count, np.int64)
    if at < 0:
        return ESCAPES_CUT_SHORT, 0, values
    at = read_rice(chunk, at, parameter, values)
    if at < 0:
        return ESCAPES_CUT_SHORT, 0, values
    fault, at = _read_lanes(chunk, (at + 7) >> 3, lanes)
    return fault, at, values


@compiled()
def read_heads(blob: NDArray[np.uint8], starts: NDArray[np.int64]) -> tuple[int, int, Heads]:
    """Read what stands before the lanes of all chunks, which begin at `starts` of the blob; the last is the end.

    Returns:
        The fault of the first damaged chunk or 0, the index of this chunk, and the heads of all chunks.
    """
    chunks, total = len(starts) - 1, np.int64(0)
    for n in range(chunks):
        total += _read_count(blob[starts[n] : starts[n + 1]])[1]
    counts, firsts, all_values = np.empty(chunks, np.int64), np.empty(chunks, np.int64), np.empty(total, np.int64)
    lengths, words = np.empty((chunks, LANES), np.int64), np.empty((chunks, LANES), np.int64)
    heads, filled = Heads(counts, all_values, firsts, lengths, words), 0
    for n in range(chunks):
        fault, at, values = _read_head(blob[starts[n] : starts[n + 1]], Lanes(lengths[n], words[n]))
        if fault:
            return fault, n, heads
        counts[n], firsts[n] = len(values), starts[n] + at
        for value in values:
            all_values[filled] = value
            filled += 1
    return 0, 0, heads


@compiled()
def resolve(symbols: NDArray[np.uint8], begin: int, layout: Layout, values: NDArray[np.int64]) -> tuple[int, Patches]:
    """Assign the values of a list to the escapes among the decoded symbols from `begin` of the traversal.

    Returns:
        The fault or 0, and patches with the differences from the decoded codes.
    """
    row_order, column_order = layout.orders
    escapes, count = locate(symbols, begin, layout.groups, SIGN_BITS), len(values)
    rows, columns, delta, n = np.empty(count, np.int32), np.empty(count, np.int32), np.empty(count, np.int64), 0
    if len(escapes.rows) != count:
        return ESCAPE_COUNT_WRONG, Patches(rows[:0], columns[:0], delta[:0])
    for k in range(count):
        if escapes.columns[k] >= 0:
            rows[n], columns[n] = row_order[escapes.rows[k]], column_order[escapes.columns[k]]
            delta[n] = values[k] - escapes.lowest[k]
            n += 1
    return 0, Patches(rows[:n], columns[:n], delta[:n])


@compiled()
def _padded(blob: NDArray[np.uint8], first: int, last: int) -> NDArray[np.uint8]:
    """Return the bytes first ... last - 1 of the blob and `PADDING_BYTES` more; copied only if the blob ends before."""
    if last + PADDING_BYTES <= len(blob):
        return blob[first : last + PADDING_BYTES]
    padded = np.zeros(last - first + PADDING_BYTES, np.uint8)
    _copy(blob[first:last], padded)
    return padded


@compiled()
def _read_chunk(
    padded: NDArray[np.uint8], begin: int, layout: Layout, entries: NDArray[np.uint32], symbols: NDArray[np.uint8]
) -> tuple[int, Patches]:
    """Decode a padded chunk whose symbols begin at `begin` of the traversal; see `read_chunks`."""
    chunk = padded[: len(padded) - PADDING_BYTES]
    no_patches = Patches(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64))
    lanes = Lanes(np.empty(LANES, np.int64), np.empty(LANES, np.int64))
    fault, at, values = _read_head(chunk, lanes)
    if fault:
        return fault, no_patches
    cells = segments(begin, begin + len(symbols), layout.cells)
    if not tans.decode_lanes(padded, at, lanes, cells, entries, symbols):
        return STREAM_END_WRONG, no_patches
    return resolve(symbols, begin, layout, values)


@compiled()
def read_chunks(
    blob: NDArray[np.uint8],
    starts: NDArray[np.int64],
    bounds: NDArray[np.int64],
    layout: Layout,
    entries: NDArray[np.uint32],
    symbols: NDArray[np.uint8],
) -> tuple[int, int, Patches]:
    """Decode neighbouring chunks into the symbols of the matrix.

    Args:
        starts: (chunks + 1,) first byte of every chunk in the blob, and the end.
        bounds: (chunks + 1,) first symbol of every chunk, and the end.

    Returns:
        The fault of the first damaged chunk or 0, the index of this chunk, and the patches of all chunks; see
        `resolve`.
    """
    total = np.int64(0)
    for n in range(len(bounds) - 1):
        total += max(_read_count(blob[starts[n] : starts[n + 1]])[1], 0)
    rows, columns, delta = np.empty(total, np.int32), np.empty(total, np.int32), np.empty(total, np.int64)
    at = 0
    for n in range(len(bounds) - 1):
        padded, chunk_symbols = _padded(blob, starts[n], starts[n + 1]), symbols[bounds[n] : bounds[n + 1]]
        fault, patches = _read_chunk(padded, bounds[n], layout, entries, chunk_symbols)
        if fault:
            return fault, n, Patches(rows[:0], columns[:0], delta[:0])
        for k in range(len(patches.rows)):
            rows[at], columns[at], delta[at] = patches.rows[k], patches.columns[k], patches.delta[k]
            at += 1
    return 0, 0, Patches(rows[:at], columns[:at], delta[:at])


@compiled()
def escapes_of(symbols: NDArray[np.uint8], begin: int, layout: Layout, codes: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the codes of the escapes among the symbols of the stream from `begin` on; 0 for padding."""
    row_order, column_order = layout.orders
    escapes = locate(symbols, begin, layout.groups, _u64(0))
    values = np.zeros(len(escapes.rows), np.int64)
    for k in range(len(values)):
        if escapes.columns[k] >= 0:
            values[k] = codes[row_order[escapes.rows[k]], column_order[escapes.columns[k]]]
    return values


@compiled()
def write_list(values: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the bytes of a list of escapes."""
    count, folded = len(values), zigzag(values)
    parameter, size = best_rice(folded)
    width = 0
    while (count + 1) >> (width + 1):
        width += 1
    bits = np.zeros(2 * width + 1 + (4 + size if count else 0), np.uint8)  # one per byte
    bits[:width] = 1
    for i in range(width):
        bits[width + 1 + i] = ((count + 1) >> i) & 1
    if count:
        tail = bits[2 * width + 1 :]
        for i in range(4):
            tail[i] = (parameter >> i) & 1
        write_rice(folded, parameter, tail[4:])
    packed = np.zeros((len(bits) + 7) // 8, np.uint8)
    for i in range(len(bits)):
        packed[i >> 3] |= bits[i] << (i & 7)
    return packed


@compiled()
def write_chunks(
    codes: NDArray[np.int32],
    dense: NDArray[np.uint8],
    bounds: NDArray[np.int64],
    layout: Layout,
    kept: NDArray[np.uint8],
    encoder: EncoderTables,
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Code neighbouring chunks; see `read_chunks`, `gather` and `tans.encode`.

    Returns:
        The bytes of all chunks, and (chunks + 1,) the start of each and the end.
    """
    chunks = len(bounds) - 1
    longest = np.int64(0)
    for n in range(chunks):
        longest = max(longest, bounds[n + 1] - bounds[n])
    buffer, streams = np.empty(longest, np.uint8), np.empty(2 * longest + 16 * LANES, np.uint8)
    lanes = Lanes(np.empty(LANES, np.int64), np.empty(LANES, np.int64))
    out = np.empty(2 * (bounds[chunks] - bounds[0]) + 128 * chunks, np.uint8)  # grows if there are many escapes
    starts, at = np.zeros(chunks + 1, np.int64), 0
    for n in range(chunks):
        begin, end = bounds[n], bounds[n + 1]
        symbols = buffer[: end - begin]
        gather(dense, begin, layout.groups, layout.cells, kept, symbols)
        escapes = write_list(escapes_of(symbols, begin, layout, codes))
        size = tans.encode(symbols, segments(begin, end, layout.cells), encoder, streams, lanes)
        if at + len(escapes) + size + 64 > len(out):
            larger = np.empty(2 * len(out) + len(escapes) + size, np.uint8)
            _copy(out[:at], larger)
            out = larger
        _copy(escapes, out[at:])
        at += len(escapes)
        for word in lanes.words:
            out[at], out[at + 1] = word & 255, word >> 8
            at += 2
        for length in lanes.lengths[: LANES - 1]:
            while length > 127:
                out[at] = length & 127 | 128
                length >>= 7
                at += 1
            out[at] = length
            at += 1
        _copy(streams[:size], out[at:])
        at += size
        starts[n + 1] = at
    return out[:at], starts

"""Chunks of a large matrix to bytes and back: many in one compiled call, which lets other threads run."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nearplane.coding import tans
from nearplane.coding.bit_stream import MAX_RICE_ONES, read_rice
from nearplane.coding.symbols import gather, locate
from nearplane.coding.tans import LANES, PADDING_BYTES

_u8 = np.uint64

# what may be wrong with a chunk
ESCAPES_CUT_SHORT = 1
LANE_LENGTHS_CUT_SHORT = 2
LANES_TOO_LONG = 3
STREAM_END_WRONG = 4
ESCAPE_COUNT_WRONG = 5
Places = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]
Orders = tuple[NDArray[np.int32], NDArray[np.int32]]
Patches = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]  # rows, columns, what is added to the code


@njit(cache=True, nogil=True)
def segments(
    begin: int, end: int, edges: NDArray[np.int64], which: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the counts and tables of the symbols begin ... end - 1; `edges` are the first symbols of the cells, and the end."""
    counts, tables, n = np.empty(len(which), np.int64), np.empty(len(which), np.int64), 0
    for cell in range(len(which)):
        count = min(edges[cell + 1], end) - max(edges[cell], begin)
        if count > 0:
            counts[n], tables[n] = count, which[cell]
            n += 1
    return counts[:n], tables[:n]


@njit(cache=True, nogil=True)
def _read_count(data: NDArray[np.uint8]) -> tuple[int, int, int]:
    """Return the bit behind the head of a list of escapes, or -1 where it is cut short; their number; the Rice parameter."""
    bits, width = 8 * len(data), 0
    while width < bits and (data[width >> 3] >> (width & 7)) & 1:
        width += 1
    at = width + 1
    if width > 31 or at + width > bits:
        return -1, 0, 0
    count = np.int64(1) << width
    for i in range(width):
        count += np.int64((data[at >> 3] >> (at & 7)) & 1) << i
        at += 1
    count -= 1
    parameter = 0
    if count:
        if at + 4 > bits:
            return -1, 0, 0
        for i in range(4):
            parameter |= np.int64((data[at >> 3] >> (at & 7)) & 1) << i
            at += 1
    return (at, count, parameter) if count * (parameter + 1) <= bits - at else (-1, 0, 0)


@njit(cache=True, nogil=True)
def _read_lanes(
    data: NDArray[np.uint8], at: int, words: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[int, int]:
    """Fill the words and lengths of the lanes from byte `at`; return what is wrong, or 0, and the first lane's byte."""
    if at + 2 * LANES > len(data):
        return LANE_LENGTHS_CUT_SHORT, 0
    for lane in range(LANES):
        words[lane] = np.int64(data[at]) | np.int64(data[at + 1]) << 8
        at += 2
        if words[lane] >> 15:
            return LANES_TOO_LONG, 0
    total = np.int64(0)
    for lane in range(LANES - 1):
        value, shift = np.int64(0), 0
        while True:
            if at >= len(data):
                return LANE_LENGTHS_CUT_SHORT, 0
            if shift > 28:
                return LANES_TOO_LONG, 0
            byte = np.int64(data[at])
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        lengths[lane] = value
        total += value
    lengths[LANES - 1] = len(data) - at - total
    return (LANES_TOO_LONG if lengths[LANES - 1] < 0 else 0), at


@njit(cache=True, nogil=True)
def place(
    symbols: NDArray[np.uint8], begin: int, places: Places, orders: Orders, values: NDArray[np.int64]
) -> tuple[int, Patches]:
    """Give the values of a list to the escapes among decoded symbols.

    Returns:
        What is wrong, or 0; rows and columns of the matrix, and the differences from what the symbols decode to.
    """
    row_order, column_order = orders
    count = len(values)
    rows, columns, lowest = np.empty(count, np.int32), np.empty(count, np.int32), np.empty(count, np.int32)
    delta, n = np.empty(count, np.int64), 0
    if locate(symbols, begin, places, True, rows, columns, lowest) != count:
        return ESCAPE_COUNT_WRONG, (rows[:0], columns[:0], delta[:0])
    for k in range(count):
        if columns[k] >= 0:
            rows[n], columns[n] = row_order[rows[k]], column_order[columns[k]]
            delta[n] = values[k] - lowest[k]
            n += 1
    return 0, (rows[:n], columns[:n], delta[:n])


@njit(cache=True, nogil=True)
def _read_chunk(
    blob: NDArray[np.uint8],
    first: int,
    last: int,
    begin: int,
    end: int,
    cells: tuple[NDArray[np.int64], NDArray[np.int64]],
    entries: NDArray[np.uint32],
    places: Places,
    orders: Orders,
    symbols: NDArray[np.uint8],
) -> tuple[int, Patches]:
    data = blob[first:last]
    nothing = (np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64))
    at, count, parameter = _read_count(data)
    if at < 0:
        return ESCAPES_CUT_SHORT, nothing
    values = np.empty(count, np.int64)
    at = read_rice(data, at, parameter, values)
    if at < 0:
        return ESCAPES_CUT_SHORT, nothing
    words, lengths = np.empty(LANES, np.int64), np.empty(LANES, np.int64)
    wrong, at = _read_lanes(data, (at + 7) >> 3, words, lengths)
    if wrong:
        return wrong, nothing
    if last + PADDING_BYTES <= len(blob):
        padded = blob[first : last + PADDING_BYTES]
    else:
        padded = np.zeros(len(data) + PADDING_BYTES, np.uint8)
        padded[: len(data)] = data
    counts, tables = segments(begin, end, *cells)
    into = symbols[begin:end]
    if not tans.decode_lanes(padded, at, lengths, words, counts, tables, entries, into):
        return STREAM_END_WRONG, nothing
    return place(into, begin, places, orders, values)


@njit(cache=True, nogil=True)
def read_chunks(
    blob: NDArray[np.uint8],
    starts: NDArray[np.int64],
    bounds: NDArray[np.int64],
    cells: tuple[NDArray[np.int64], NDArray[np.int64]],
    entries: NDArray[np.uint32],
    places: Places,
    orders: Orders,
    symbols: NDArray[np.uint8],
) -> tuple[int, int, Patches]:
    """Decode neighbouring chunks.

    Args:
        starts: (chunks + 1,) first bytes in the blob, and the end.
        bounds: (chunks + 1,) first symbols, and the end.
        cells: edges and tables of the layout's cells.

    Returns:
        What is wrong with the first chunk that is damaged, or 0; which one it is; patches as those of `place`.
    """
    total = np.int64(0)
    for n in range(len(bounds) - 1):
        total += max(_read_count(blob[starts[n] : starts[n + 1]])[1], 0)
    rows, columns, delta = np.empty(total, np.int32), np.empty(total, np.int32), np.empty(total, np.int64)
    at = 0
    for n in range(len(bounds) - 1):
        wrong, (r, c, d) = _read_chunk(
            blob, starts[n], starts[n + 1], bounds[n], bounds[n + 1], cells, entries, places, orders, symbols
        )
        if wrong:
            return wrong, n, (rows[:0], columns[:0], delta[:0])
        for k in range(len(r)):
            rows[at], columns[at], delta[at] = r[k], c[k], d[k]
            at += 1
    return 0, 0, (rows[:at], columns[:at], delta[:at])


@njit(cache=True, nogil=True)
def listed(
    symbols: NDArray[np.uint8], begin: int, places: Places, orders: Orders, codes: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Return the codes of the escapes among the symbols of the stream from `begin` on; 0 for fillings."""
    row_order, column_order = orders
    none = np.empty(0, np.int32)
    count = locate(symbols, begin, places, False, none, none, none)
    rows, columns, lowest = np.empty(count, np.int32), np.empty(count, np.int32), np.empty(count, np.int32)
    locate(symbols, begin, places, False, rows, columns, lowest)
    values = np.zeros(count, np.int64)
    for k in range(count):
        if columns[k] >= 0:
            values[k] = codes[row_order[rows[k]], column_order[columns[k]]]
    return values


@njit(cache=True, nogil=True)
def _put(out: NDArray[np.uint8], at: int, held: int, count: int, value: int, width: int) -> tuple[int, int, int]:
    """Append `width` <= 56 bits to a stream that ends with `count` < 8 bits that are held back; return at, held, count."""
    held |= _u8(value) << _u8(count)
    count += width
    while count >= 8:
        out[at] = np.uint8(held)
        held >>= _u8(8)
        at += 1
        count -= 8
    return at, held, count


@njit(cache=True, nogil=True)
def _rice_bits(folded: NDArray[np.int64], parameter: int) -> int:
    total = np.int64(0)
    for value in folded:
        quotient = value >> parameter
        total += quotient + 1 + parameter if quotient < MAX_RICE_ONES else MAX_RICE_ONES + 32
    return total


@njit(cache=True, nogil=True)
def write_list(values: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return a list of escapes, filled up to a byte; its Rice parameter is that of `side.rice_parameter`."""
    count = len(values)
    folded = np.empty(count, np.int64)
    total = np.int64(0)
    for i in range(count):
        folded[i] = -2 * values[i] - 1 if values[i] < 0 else 2 * values[i]
        total += folded[i]
    best, parameter = np.int64(0), 0
    if count:
        mean, guess = total // count, 0
        while guess < 14 and mean >> guess:
            guess += 1
        low = max(0, guess - 2)
        best, parameter = _rice_bits(folded, low), low
        for k in range(low + 1, min(14, guess + 1) + 1):
            bits = _rice_bits(folded, k)
            if bits < best:
                best, parameter = bits, k
    width = 0
    while (count + 1) >> (width + 1):
        width += 1
    out = np.empty((best + 2 * width + 1 + 4 + 7) // 8, np.uint8)
    at, held, n = _put(out, 0, _u8(0), 0, (1 << width) - 1, width + 1)
    at, held, n = _put(out, at, held, n, count + 1 - (1 << width), width)
    if count:
        at, held, n = _put(out, at, held, n, parameter, 4)
    for value in folded:
        quotient = value >> parameter
        if quotient < MAX_RICE_ONES:
            rest = value & ((1 << parameter) - 1)
            at, held, n = _put(
                out, at, held, n, ((1 << quotient) - 1) | rest << (quotient + 1), quotient + 1 + parameter
            )
        else:
            at, held, n = _put(
                out, at, held, n, ((1 << MAX_RICE_ONES) - 1) | value << MAX_RICE_ONES, MAX_RICE_ONES + 32
            )
    if n:
        out[at] = np.uint8(held)
        at += 1
    return out[:at]


@njit(cache=True, nogil=True)
def write_chunks(
    staged: NDArray[np.uint8],
    bounds: NDArray[np.int64],
    cells: tuple[NDArray[np.int64], NDArray[np.int64]],
    kept: NDArray[np.uint8],
    built: tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint16]],
    places: Places,
    orders: Orders,
    codes: NDArray[np.int32],
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Code neighbouring chunks; see `read_chunks`, `gather` and `tans.encode`.

    Returns:
        Their bytes one after another, and where each starts, and the end.
    """
    chunks = len(bounds) - 1
    longest = np.int64(0)
    for n in range(chunks):
        longest = max(longest, bounds[n + 1] - bounds[n])
    buffer, streams = np.empty(longest, np.uint8), np.empty(2 * longest + 16 * LANES, np.uint8)
    lengths, words = np.empty(LANES, np.int64), np.empty(LANES, np.int64)
    out = np.empty(2 * (bounds[chunks] - bounds[0]) + 128 * chunks, np.uint8)  # grows where there are many escapes
    starts, at = np.zeros(chunks + 1, np.int64), 0
    for n in range(chunks):
        begin, end = bounds[n], bounds[n + 1]
        symbols = buffer[: end - begin]
        gather(staged, begin, end, places, *cells, kept, symbols)
        escapes = write_list(listed(symbols, begin, places, orders, codes))
        counts, tables = segments(begin, end, *cells)
        size = tans.encode(symbols, counts, tables, LANES, *built, streams, lengths, words)
        if at + len(escapes) + size + 64 > len(out):
            more = np.empty(2 * len(out) + len(escapes) + size, np.uint8)
            more[:at] = out[:at]
            out = more
        out[at : at + len(escapes)] = escapes
        at += len(escapes)
        for word in words:
            out[at], out[at + 1] = word & 255, word >> 8
            at += 2
        for length in lengths[: LANES - 1]:
            while length > 127:
                out[at] = length & 127 | 128
                length >>= 7
                at += 1
            out[at] = length
            at += 1
        out[at : at + size] = streams[:size]
        at += size
        starts[n + 1] = at
    return out[:at], starts

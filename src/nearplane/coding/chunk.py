"""One chunk of a large matrix to bytes and back, in one compiled call that lets other threads run."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nearplane.coding import tans
from nearplane.coding.side import LONGEST, read_rice
from nearplane.coding.symbols import gather, locate
from nearplane.coding.tans import LANES, PADDING

_u8 = np.uint64

CUT_ESCAPES, CUT_LANES, LONG_LANES, ASTRAY, MISCOUNTED = 1, 2, 3, 4, 5  # what may be wrong with a chunk
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
def _read_list(data: NDArray[np.uint8]) -> tuple[int, NDArray[np.int64]]:
    """Return the byte behind the list of escapes, or -1 where it is cut short, and the list."""
    none = np.empty(0, np.int64)
    bits, width = 8 * len(data), 0
    while width < bits and (data[width >> 3] >> (width & 7)) & 1:
        width += 1
    at = width + 1
    if width > 31 or at + width + 4 > bits:
        return -1, none
    count = np.int64(1) << width
    for i in range(width):
        count += np.int64((data[at >> 3] >> (at & 7)) & 1) << i
        at += 1
    count -= 1
    if count == 0:
        return (at + 7) >> 3, none
    parameter = 0
    for i in range(4):
        parameter |= np.int64((data[at >> 3] >> (at & 7)) & 1) << i
        at += 1
    if count * (parameter + 1) > bits - at:
        return -1, none
    values = np.empty(count, np.int64)
    at = read_rice(data, at, parameter, values)
    return (at + 7) >> 3 if at >= 0 else -1, values


@njit(cache=True, nogil=True)
def _read_lanes(
    data: NDArray[np.uint8], at: int, words: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[int, int]:
    """Fill the words and lengths of the lanes from byte `at`; return what is wrong, or 0, and the first lane's byte."""
    if at + 2 * LANES > len(data):
        return CUT_LANES, 0
    for lane in range(LANES):
        words[lane] = np.int64(data[at]) | np.int64(data[at + 1]) << 8
        at += 2
        if words[lane] >> 15:
            return LONG_LANES, 0
    total = np.int64(0)
    for lane in range(LANES - 1):
        value, shift = np.int64(0), 0
        while True:
            if at >= len(data):
                return CUT_LANES, 0
            if shift > 28:
                return LONG_LANES, 0
            byte = np.int64(data[at])
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        lengths[lane] = value
        total += value
    lengths[LANES - 1] = len(data) - at - total
    return (LONG_LANES if lengths[LANES - 1] < 0 else 0), at


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
        return MISCOUNTED, (rows[:0], columns[:0], delta[:0])
    for k in range(count):
        if columns[k] >= 0:
            rows[n], columns[n] = row_order[rows[k]], column_order[columns[k]]
            delta[n] = values[k] - lowest[k]
            n += 1
    return 0, (rows[:n], columns[:n], delta[:n])


@njit(cache=True, nogil=True)
def read_chunk(
    blob: NDArray[np.uint8],
    first: int,
    last: int,
    begin: int,
    end: int,
    edges: NDArray[np.int64],
    which: NDArray[np.int64],
    entries: NDArray[np.uint32],
    places: Places,
    orders: Orders,
    symbols: NDArray[np.uint8],
) -> tuple[int, Patches]:
    """Decode the chunk in bytes first ... last - 1 of a blob to symbols begin ... end - 1 of `symbols`; see `place`."""
    data = blob[first:last]
    at, values = _read_list(data)
    nothing = (np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64))
    if at < 0:
        return CUT_ESCAPES, nothing
    words, lengths = np.empty(LANES, np.int64), np.empty(LANES, np.int64)
    wrong, at = _read_lanes(data, at, words, lengths)
    if wrong:
        return wrong, nothing
    if last + PADDING <= len(blob):
        padded = blob[first : last + PADDING]
    else:
        padded = np.zeros(len(data) + PADDING, np.uint8)
        padded[: len(data)] = data
    counts, tables = segments(begin, end, edges, which)
    into = symbols[begin:end]
    if not tans.decode_lanes(padded, at, lengths, words, counts, tables, entries, into):
        return ASTRAY, nothing
    return place(into, begin, places, orders, values)


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
        total += quotient + 1 + parameter if quotient < LONGEST else LONGEST + 32
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
        if quotient < LONGEST:
            rest = value & ((1 << parameter) - 1)
            at, held, n = _put(
                out, at, held, n, ((1 << quotient) - 1) | rest << (quotient + 1), quotient + 1 + parameter
            )
        else:
            at, held, n = _put(out, at, held, n, ((1 << LONGEST) - 1) | value << LONGEST, LONGEST + 32)
    if n:
        out[at] = np.uint8(held)
        at += 1
    return out[:at]


@njit(cache=True, nogil=True)
def write_chunk(
    staged: NDArray[np.uint8],
    begin: int,
    end: int,
    edges: NDArray[np.int64],
    which: NDArray[np.int64],
    kept: NDArray[np.uint8],
    built: tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint16]],
    places: Places,
    orders: Orders,
    codes: NDArray[np.int32],
) -> NDArray[np.uint8]:
    """Return the chunk of the symbols begin ... end - 1 of the traversal; see `gather` and `tans.encode`."""
    symbols = np.empty(end - begin, np.uint8)
    gather(staged, begin, end, places, edges, which, kept, symbols)
    escapes = write_list(listed(symbols, begin, places, orders, codes))
    counts, tables = segments(begin, end, edges, which)
    streams = np.empty(2 * len(symbols) + 16 * LANES, np.uint8)
    lengths, words = np.empty(LANES, np.int64), np.empty(LANES, np.int64)
    size = tans.encode(symbols, counts, tables, LANES, *built, streams, lengths, words)
    out = np.empty(len(escapes) + 2 * LANES + 5 * LANES + size, np.uint8)
    at = len(escapes)
    out[:at] = escapes
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
    return out[: at + size]

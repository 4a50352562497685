"""Codes to symbols and back: the traversal of a matrix as bytes or nibble pairs, and where its escapes stand."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nearplane.coding.layout import Layout
from nearplane.coding.tans import load64


@njit(cache=True, nogil=True)
def stage(codes: NDArray[np.int32], row_order: NDArray[np.int32], column_order: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return code + 128 in the order of the traversal's rows and columns (out, in), 0 where |code| > 127."""
    out = np.empty(codes.shape, np.uint8)
    for i in range(len(row_order)):
        row, into = codes[row_order[i]], out[i]
        for j in range(len(column_order)):
            code = np.int64(row[column_order[j]])
            into[j] = np.uint8(code + 128) if -127 <= code <= 127 else np.uint8(0)
    return out


@njit(cache=True, nogil=True)
def gather(staged: NDArray[np.uint8], start: int, stop: int, pairs: bool, out: NDArray[np.uint8]) -> None:
    """Write the symbols of one group, the positions start ... stop - 1 of every row, to `out`."""
    width = stop - start
    at = 0
    for i in range(staged.shape[0]):
        row = staged[i]
        if not pairs:
            for j in range(width):
                out[at + j] = row[start + j]
            at += width
            continue
        half = width >> 1
        for j in range(half):
            low, high = row[start + 2 * j], row[start + 2 * j + 1]
            low = low - np.uint8(120) if 121 <= low <= 135 else np.uint8(0)
            high = high - np.uint8(120) if 121 <= high <= 135 else np.uint8(0)
            out[at + j] = low | high << 4
        if width & 1:
            low = row[stop - 1]
            out[at + half] = (low - np.uint8(120) if 121 <= low <= 135 else np.uint8(0)) | np.uint8(128)
        at += (width + 1) >> 1


@njit(cache=True, nogil=True)
def escape_rare(symbols: NDArray[np.uint8], frequency: NDArray[np.uint16]) -> None:
    """Turn symbols that a table lacks into 0, which is an escape, or two."""
    kept = np.empty(256, np.uint8)
    for s in range(256):
        kept[s] = s if frequency[s] > 0 else 0
    for i in range(len(symbols)):
        symbols[i] = kept[symbols[i]]


@njit(cache=True, nogil=True)
def _locate(
    symbols: NDArray[np.uint8],
    first: int,
    start: int,
    stop: int,
    pairs: bool,
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
) -> int:
    """Count the escapes of a part of a group, and fill in the rows and columns of as many as there is room for."""
    room = len(rows)
    width = (stop - start + 1) >> 1 if pairs else stop - start
    ones = np.uint64(0x1111111111111111 if pairs else 0x0101010101010101)
    highs = np.uint64(0x8888888888888888 if pairs else 0x8080808080808080)
    base = np.uint64(symbols.ctypes.data)
    n = 0
    for block in range(0, len(symbols), 32):
        end = min(block + 32, len(symbols))
        if end == block + 32:
            zeros = np.uint64(0)
            for at in range(block, end, 8):
                word = load64(base + np.uint64(at))
                zeros |= (word - ones) & ~word  # a high bit of a part: the part is zero, or follows one that is
            if zeros & highs == np.uint64(0):
                continue
        for i in range(block, end):
            symbol = symbols[i]
            if (symbol & 15 and symbol > 15) if pairs else symbol:
                continue
            row, column = (first + i) // width, (first + i) % width
            if not pairs or symbol & 15 == 0:
                if n < room:
                    rows[n], columns[n] = row, start + (2 * column if pairs else column)
                n += 1
            if pairs and symbol < 16:
                if n < room:
                    beyond = start + 2 * column + 1
                    rows[n], columns[n] = row, beyond if beyond < stop else -1
                n += 1
    return n


def locate(
    symbols: NDArray[np.uint8], begin: int, layout: Layout, expected: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Return the positions of the escapes, in order, among the symbols from `begin` of the traversal.

    Args:
        expected: how many there should be; None where that is not known, which takes twice the time.

    Returns:
        Rows and columns in the orders of the layout; column -1 where it is the filling of an odd group. None where they are
        not as many as expected.
    """
    if expected is None:
        expected = _walk(symbols, begin, layout, np.empty(0, np.int64), np.empty(0, np.int64))
    rows, columns = np.empty(expected, np.int64), np.empty(expected, np.int64)
    return (rows, columns) if _walk(symbols, begin, layout, rows, columns) == expected else None


def _walk(
    symbols: NDArray[np.uint8], begin: int, layout: Layout, rows: NDArray[np.int64], columns: NDArray[np.int64]
) -> int:
    """Count escapes group by group, and fill in their places as long as there is room."""
    end, count = begin + len(symbols), 0
    first_group = int(np.searchsorted(layout.offsets, begin, side="right")) - 1
    for g in range(first_group, len(layout.starts)):
        low, high = int(layout.offsets[g]), int(layout.offsets[g + 1])
        if low >= end:
            break
        part = symbols[max(low, begin) - begin : min(high, end) - begin]
        place = (max(low, begin) - low, int(layout.starts[g]), int(layout.stops[g]), bool(layout.pairs[g]))
        count += int(_locate(part, *place, rows[count:], columns[count:]))
    return count


@njit(cache=True, nogil=True)
def scatter(
    symbols: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    pairs: NDArray[np.bool_],
    row_order: NDArray[np.int32],
    column_order: NDArray[np.int32],
    codes: NDArray[np.int32],
) -> None:
    """Write the codes (out, in) of all symbols in their original places; escapes become whatever their symbol says."""
    for i in range(len(row_order)):
        into = codes[row_order[i]]
        for g in range(len(starts)):
            start, stop = starts[g], stops[g]
            if pairs[g]:
                at = offsets[g] + i * ((stop - start + 1) >> 1)
                for j in range(start, stop, 2):
                    symbol = symbols[at]
                    at += 1
                    into[column_order[j]] = np.int32(symbol & 15) - 8
                    if j + 1 < stop:
                        into[column_order[j + 1]] = np.int32(symbol >> 4) - 8
            else:
                at = offsets[g] + i * (stop - start)
                for j in range(start, stop):
                    into[column_order[j]] = np.int32(symbols[at]) - 128
                    at += 1


def symbols_of(codes: NDArray[np.int32], layout: Layout) -> NDArray[np.uint8]:
    """Return the whole traversal of a matrix, one byte per symbol, before rare symbols are escaped."""
    staged = stage(codes, layout.row_order, layout.column_order)
    out = np.empty(layout.total, np.uint8)
    for g in range(len(layout.starts)):
        into = out[layout.offsets[g] : layout.offsets[g + 1]]
        gather(staged, int(layout.starts[g]), int(layout.stops[g]), bool(layout.pairs[g]), into)
    return out

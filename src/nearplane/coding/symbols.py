"""Codes to symbols and back: the traversal of a matrix as bytes or pairs of nibbles, and where its escapes stand.

In the stream a symbol of a byte group is code + 128, its escape 0; a decoder's tables emit the code itself, as int8,
whose escape is -128. Pairs are two nibbles of code + 8 on both sides, their escape nibble 0. So an escape always
decodes to the least number that there is, and what is added to it makes the code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nearplane.coding.intrinsics import keep_apart, load64, trailing_zeros
from nearplane.coding.layout import Cells, Groups, Orders

_u64 = np.uint64


class Escapes(NamedTuple):
    """Codes that are not among the symbols but listed, in the order of the traversal."""

    rows: NDArray[np.int32]  # (escapes,) positions in the order of the rows
    columns: NDArray[np.int32]  # (escapes,) positions in the order of the columns, -1 in the filling of an odd group
    lowest: NDArray[np.int32]  # (escapes,) the code that the escape stands for where it is decoded


@njit(cache=True, nogil=True)
def stage(codes: NDArray[np.int32], orders: Orders, begin: int, end: int, out: NDArray[np.uint8]) -> None:
    """Write code + 128, 0 where |code| > 127, of rows begin ... end - 1 in the order of the traversal to out."""
    row_order, column_order = orders
    width = len(column_order)
    sorted_already = True
    for j in range(width):
        sorted_already &= column_order[j] == j
    buffer = np.empty(width, np.uint8)
    for i in range(begin, end):
        row, into = codes[row_order[i]], out[i]
        target = into if sorted_already else buffer
        for j in range(width):
            code = row[j]
            target[j] = np.uint8(code + 128) if (code >= -127) & (code <= 127) else np.uint8(0)
        if not sorted_already:
            for j in range(width):
                into[j] = buffer[_u64(column_order[j])]  # unsigned: no test for an index from the end


@njit(cache=True, nogil=True)
def _kept(symbols: NDArray[np.uint8], begin: int, end: int, kept: NDArray[np.uint8]) -> None:
    """Turn symbols that a table lacks into 0, which is an escape, or two; `kept` maps every symbol."""
    part = symbols[begin:end]
    low, high, used = 256, 0, 0
    for s in range(256):
        if kept[s]:
            low, high, used = min(low, s), max(high, s), used + 1
    if used and high - low + 1 == used:  # compares run faster than look-ups
        first, reach = np.uint8(low), np.uint8(high - low)
        for i in range(len(part)):
            symbol = part[i]
            part[i] = symbol if np.uint8(symbol - first) <= reach else np.uint8(0)
    else:
        for i in range(len(part)):
            part[i] = kept[part[i]]


@njit(cache=True, nogil=True)
def _nibble(symbol: np.uint8) -> np.uint8:
    """Return the nibble of a symbol code + 128: code + 8, or 0, which is an escape, where that is none."""
    shifted = np.uint8(symbol - 120)
    return shifted if shifted < np.uint8(16) else np.uint8(0)


@njit(cache=True, nogil=True)
def gather(
    staged: NDArray[np.uint8], begin: int, groups: Groups, cells: Cells, kept: NDArray[np.uint8], out: NDArray[np.uint8]
) -> None:
    """Fill `out` with the symbols of the traversal from `begin` on, those that their tables lack escaped.

    Args:
        staged: (out, in) what `stage` wrote.
        kept: (tables, 256) every symbol itself, or 0 where the table lacks it.
    """
    keep_apart()
    offsets, starts, stops, pairs = groups
    end = begin + len(out)
    for g in range(len(starts)):
        low, high = max(begin, offsets[g]), min(end, offsets[g + 1])
        if low >= high:
            continue
        start, width = starts[g], stops[g] - starts[g]
        per = (width + 1) >> 1 if pairs[g] else width
        i, j, at = (low - offsets[g]) // per, (low - offsets[g]) % per, low - begin
        while at < high - begin:
            row = staged[i]
            until = min(per, j + high - begin - at)
            count = until - j
            into = out[at : at + count]
            if not pairs[g]:
                of = row[start + j : start + until]
                for n in range(count):
                    into[n] = of[n]
            else:
                whole = min(until, width >> 1) - j
                of = row[start + 2 * j : start + 2 * j + 2 * max(whole, 0)]
                for n in range(whole):
                    into[n] = _nibble(of[2 * n]) | (_nibble(of[2 * n + 1]) << np.uint8(4))
                if count > whole:
                    into[count - 1] = _nibble(row[start + width - 1]) | np.uint8(128)
            at += count
            i, j = i + 1, 0
    for cell in range(len(cells.tables)):
        low, high = max(begin, cells.edges[cell]), min(end, cells.edges[cell + 1])
        if low < high:
            _kept(out, low - begin, high - begin, kept[cells.tables[cell]])


@njit(cache=True, nogil=True)
def locate(symbols: NDArray[np.uint8], begin: int, groups: Groups, decoded: bool) -> Escapes:
    """Return the escapes among the symbols from `begin` of the traversal.

    Args:
        decoded: whether the symbols of byte groups are codes as int8, not code + 128.
    """
    keep_apart()
    offsets, starts, stops, pairs = groups
    end, most, n = begin + len(symbols), 2 * len(symbols), 0
    rows, columns, lowest = np.empty(most, np.int32), np.empty(most, np.int32), np.empty(most, np.int32)
    base = _u64(symbols.ctypes.data)
    one, ones = _u64(1), _u64(0x1111111111111111)
    low7 = _u64(0x7F7F7F7F7F7F7F7F)
    for g in range(len(starts)):
        low, high = max(begin, offsets[g]), min(end, offsets[g + 1])
        if low >= high:
            continue
        pair, start, stop = pairs[g], starts[g], stops[g]
        per = (stop - start + 1) >> 1 if pair else stop - start
        flip = _u64(0x8080808080808080) if decoded and not pair else _u64(0)
        shift, least = (4, -8) if pair else (8, -128)
        row = (low - offsets[g]) // per
        before, after = offsets[g] + row * per, offsets[g] + (row + 1) * per  # of the row, in symbols
        at, last = low - begin, high - begin
        while at < last:
            if at + 32 <= last:
                found = _u64(0)
                if pair:
                    for word in range(at, at + 32, 8):  # nibbles that are 0, by their lowest bits
                        v = load64(base + _u64(word))
                        v |= v >> one
                        found |= ~(v | v >> _u64(2)) & ones
                else:
                    for word in range(at, at + 32, 8):  # bytes that are 0, by their highest bits
                        v = load64(base + _u64(word)) ^ flip
                        found |= ~(((v & low7) + low7) | v | low7)
                if found == _u64(0):
                    at += 32
                    continue
            block = min(at + 32, last)
            while at < block:
                if at + 8 <= block:
                    v = load64(base + _u64(at)) ^ flip
                    step = 8
                else:
                    v = _u64(symbols[at]) ^ (flip & _u64(255)) ^ _u64(0xFFFFFFFFFFFFFF00)
                    step = 1
                if pair:
                    v |= v >> one
                    found = ~(v | v >> _u64(2)) & ones
                    if step == 1:
                        v = _u64(symbols[at])
                        found = (one if v & _u64(15) == _u64(0) else _u64(0)) | (_u64(16) if v < _u64(16) else _u64(0))
                else:
                    found = ~(((v & low7) + low7) | v | low7)
                while found != _u64(0):
                    place = np.int64(trailing_zeros(found)) // shift
                    found &= found - one
                    symbol = begin + at + (place >> 1 if pair else place)
                    while symbol >= after:
                        row, before, after = row + 1, after, after + per
                    column = start + (2 * (symbol - before) + (place & 1) if pair else symbol - before)
                    rows[n], columns[n], lowest[n] = row, column if column < stop else -1, least
                    n += 1
                at += step
    return Escapes(rows[:n], columns[:n], lowest[:n])


@njit(cache=True, nogil=True)
def scatter(
    symbols: NDArray[np.uint8], groups: Groups, orders: Orders, begin: int, end: int, codes: NDArray[np.int32]
) -> None:
    """Write the codes of decoded symbols of rows begin ... end - 1 to their places; escapes become the least code."""
    offsets, starts, stops, pairs = groups
    row_order, column_order = orders
    for i in range(begin, end):
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
                    into[column_order[j]] = np.int8(symbols[at])
                    at += 1

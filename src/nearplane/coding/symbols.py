"""Conversion of codes to symbols and back: traversal of a matrix as bytes or pairs of nibbles, and places of escapes.

In the stream, a symbol of a byte group is code + 128 and its escape is 0; the decoder's tables give the code itself as
int8, and -128 for the escape. Pairs are two nibbles of code + 8 in the stream and in the decoder, with escape nibble 0.
So an escape always decodes to the least possible number; a patch added to it gives the code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearplane.coding.intrinsics import load64, prevent_inlining, trailing_zeros
from nearplane.coding.layout import Cells, Groups, Orders
from nearplane.compiled import compiled

_u64 = np.uint64
SIGN_BITS = _u64(0x8080808080808080)  # in which eight codes as int8 differ from code + 128


class Escapes(NamedTuple):
    """Codes that are in the list of escapes instead of the symbols, in the order of the traversal."""

    rows: NDArray[np.int32]  # (escapes,) positions in the order of the rows
    columns: NDArray[np.int32]  # (escapes,) positions in the order of the columns, -1 in the padding of an odd group
    lowest: NDArray[np.int32]  # (escapes,) code to which the escape decodes


@compiled()
def write_symbols(codes: NDArray[np.int32], orders: Orders, begin: int, end: int, out: NDArray[np.uint8]) -> None:
    """Write code + 128 (0 where |code| > 127) of rows begin ... end - 1 to `out`, in the order of the traversal."""
    row_order, column_order = orders
    width = len(column_order)
    sorted_already = True
    for j in range(width):
        sorted_already &= column_order[j] == j
    buffer = np.empty(width, np.uint8)
    for i in range(begin, end):
        row, symbol_row = codes[row_order[i]], out[i]
        target = symbol_row if sorted_already else buffer
        for j in range(width):
            code = row[j]
            target[j] = np.uint8(code + 128) if (code >= -127) & (code <= 127) else np.uint8(0)
        if not sorted_already:
            for j in range(width):
                symbol_row[j] = buffer[_u64(column_order[j])]  # unsigned: no test for negative indices


@compiled()
def _escape_missing(symbols: NDArray[np.uint8], begin: int, end: int, kept: NDArray[np.uint8]) -> None:
    """Replace symbols that a table lacks by 0 (one escape, or two in a pair); `kept` maps every symbol."""
    part = symbols[begin:end]
    low, high, used = 256, 0, 0
    for s in range(256):
        if kept[s]:
            low, high, used = min(low, s), max(high, s), used + 1
    if used and high - low + 1 == used:  # comparisons are faster than look-ups
        first, span = np.uint8(low), np.uint8(high - low)
        for i in range(len(part)):
            symbol = part[i]
            part[i] = symbol if np.uint8(symbol - first) <= span else np.uint8(0)
    else:
        for i in range(len(part)):
            part[i] = kept[part[i]]


@compiled()
def _nibble(symbol: np.uint8) -> np.uint8:
    """Return the nibble of a symbol code + 128: code + 8 if that fits, else the escape 0."""
    shifted = np.uint8(symbol - 120)
    return shifted if shifted < np.uint8(16) else np.uint8(0)


@compiled()
def gather(
    dense: NDArray[np.uint8], begin: int, groups: Groups, cells: Cells, kept: NDArray[np.uint8], out: NDArray[np.uint8]
) -> None:
    """Fill `out` with the symbols of the traversal from `begin` on; symbols that their tables lack are escaped.

    Args:
        dense: (out, in) symbols written by `write_symbols`.
        kept: (tables, 256) each symbol that the table has, else 0.
    """
    prevent_inlining()
    offsets, starts, stops, pairs = groups
    end = begin + len(out)
    for g in range(len(starts)):
        low, high = max(begin, offsets[g]), min(end, offsets[g + 1])
        if low >= high:
            continue
        start, width = starts[g], stops[g] - starts[g]
        row_symbols = (width + 1) >> 1 if pairs[g] else width
        i, j, at = (low - offsets[g]) // row_symbols, (low - offsets[g]) % row_symbols, low - begin
        while at < high - begin:
            row = dense[i]
            stop_symbol = min(row_symbols, j + high - begin - at)
            count = stop_symbol - j
            target = out[at : at + count]
            if not pairs[g]:
                source = row[start + j : start + stop_symbol]
                for n in range(count):
                    target[n] = source[n]
            else:
                whole = min(stop_symbol, width >> 1) - j
                source = row[start + 2 * j : start + 2 * j + 2 * max(whole, 0)]
                for n in range(whole):
                    target[n] = _nibble(source[2 * n]) | (_nibble(source[2 * n + 1]) << np.uint8(4))
                if count > whole:
                    target[count - 1] = _nibble(row[start + width - 1]) | np.uint8(128)
            at += count
            i, j = i + 1, 0
    for cell in range(len(cells.tables)):
        low, high = max(begin, cells.edges[cell]), min(end, cells.edges[cell + 1])
        if low < high:
            _escape_missing(out, low - begin, high - begin, kept[cells.tables[cell]])


@compiled()
def locate(symbols: NDArray[np.uint8], begin: int, groups: Groups, signs: np.uint64) -> Escapes:
    """Return the escapes among the symbols from `begin` of the traversal.

    Args:
        signs: `SIGN_BITS` if the symbols of byte groups are codes as int8, 0 if they are code + 128.
    """
    prevent_inlining()
    offsets, starts, stops, pairs = groups
    end, capacity, n = begin + len(symbols), 2 * len(symbols), 0
    rows, columns, lowest = np.empty(capacity, np.int32), np.empty(capacity, np.int32), np.empty(capacity, np.int32)
    base = _u64(symbols.ctypes.data)
    one, ones = _u64(1), _u64(0x1111111111111111)
    low7 = _u64(0x7F7F7F7F7F7F7F7F)
    for g in range(len(starts)):
        low, high = max(begin, offsets[g]), min(end, offsets[g + 1])
        if low >= high:
            continue
        pair, start, stop = pairs[g], starts[g], stops[g]
        row_symbols = (stop - start + 1) >> 1 if pair else stop - start
        flip = _u64(0) if pair else signs
        shift, least = (4, -8) if pair else (8, -128)
        row = (low - offsets[g]) // row_symbols
        row_start, row_end = offsets[g] + row * row_symbols, offsets[g] + (row + 1) * row_symbols  # in symbols
        at, last = low - begin, high - begin
        while at < last:
            if at + 32 <= last:
                zeros = _u64(0)
                if pair:
                    for word in range(at, at + 32, 8):  # mark nibbles that are 0 by their lowest bits
                        v = load64(base + _u64(word))
                        v |= v >> one
                        zeros |= ~(v | v >> _u64(2)) & ones
                else:
                    for word in range(at, at + 32, 8):  # mark bytes that are 0 by their highest bits
                        v = load64(base + _u64(word)) ^ flip
                        zeros |= ~(((v & low7) + low7) | v | low7)
                if zeros == _u64(0):
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
                    zeros = ~(v | v >> _u64(2)) & ones
                    if step == 1:
                        v = _u64(symbols[at])
                        zeros = (one if v & _u64(15) == _u64(0) else _u64(0)) | (_u64(16) if v < _u64(16) else _u64(0))
                else:
                    zeros = ~(((v & low7) + low7) | v | low7)
                while zeros != _u64(0):
                    position = np.int64(trailing_zeros(zeros)) // shift
                    zeros &= zeros - one
                    symbol = begin + at + (position >> 1 if pair else position)
                    while symbol >= row_end:
                        row, row_start, row_end = row + 1, row_end, row_end + row_symbols
                    column = start + (2 * (symbol - row_start) + (position & 1) if pair else symbol - row_start)
                    rows[n], columns[n], lowest[n] = row, column if column < stop else -1, least
                    n += 1
                at += step
    return Escapes(rows[:n], columns[:n], lowest[:n])


@compiled()
def scatter(
    symbols: NDArray[np.uint8], groups: Groups, orders: Orders, begin: int, end: int, codes: NDArray[np.int32]
) -> None:
    """Write the codes of decoded symbols of rows begin ... end - 1 to `codes`; escapes become the least code."""
    offsets, starts, stops, pairs = groups
    row_order, column_order = orders
    for i in range(begin, end):
        code_row = codes[row_order[i]]
        for g in range(len(starts)):
            start, stop = starts[g], stops[g]
            if pairs[g]:
                at = offsets[g] + i * ((stop - start + 1) >> 1)
                for j in range(start, stop, 2):
                    symbol = symbols[at]
                    at += 1
                    code_row[column_order[j]] = np.int32(symbol & 15) - 8
                    if j + 1 < stop:
                        code_row[column_order[j + 1]] = np.int32(symbol >> 4) - 8
            else:
                at = offsets[g] + i * (stop - start)
                for j in range(start, stop):
                    code_row[column_order[j]] = np.int8(symbols[at])
                    at += 1

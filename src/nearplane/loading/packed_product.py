"""Packed codes times a few vectors on the CPU, compiled by Numba: one pass over the packed bytes for each vector.

A byte of two nibbles is `byte - 136 = low + 16 high`, so that two columns cost two multiplications and one mask:

    low xe + high xo = low (xe - xo / 16) + (byte - 136) (xo / 16)
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int32]

MIN_THREADED_BYTES = 2**22  # bytes of codes under which one thread does all


class GroupBytes(NamedTuple):
    """Where the codes of neighbouring columns that are stored alike lie."""

    start: int  # position of the first column
    stop: int  # position after the last
    nibbles: bool  # whether a byte holds two codes
    first_byte: int  # of the group's first row
    row_bytes: int


_START, _STOP, _NIBBLES, _FIRST_BYTE, _ROW_BYTES = range(5)  # columns of `PackedCodes.groups`


class PackedCodes(NamedTuple):
    """The codes of a matrix, by position of row and column; see `PackedLinear`."""

    codes: Bytes  # (bytes,)
    groups: npt.NDArray[np.int64]  # (groups, 5) the fields of `GroupBytes`
    patch_start: Integers  # (out + 1,)
    patch_at: Integers  # (patches,)
    patch_delta: npt.NDArray[np.int64]  # (patches,)


class _Factors(NamedTuple):
    """A vector, and what the bytes of a row are multiplied by."""

    x: Floats  # (in,)
    low: Floats  # (bytes a row,) factors of low nibbles
    whole: Floats  # (bytes a row,) factors of whole bytes


def products(x: Floats, packed: PackedCodes, *, threads: int | None = None) -> Floats:
    """Return (tokens, out) float32 products of the codes with every row of x.

    Args:
        x: (tokens, in) times the scale of the column, by position.
        threads: None takes as many as torch does.
    """
    out = len(packed.patch_start) - 1
    y = np.empty((len(x), out), np.float32)
    threads = threads or torch.get_num_threads()
    share = out if packed.codes.size < MIN_THREADED_BYTES else -(-out // threads)
    with ThreadPoolExecutor(threads) as pool:  # starts no thread before work is submitted
        for row, total in zip(x, y, strict=True):
            factors = _factors(row, packed.groups)
            if share >= out:
                _rows(0, out, packed, factors, total)
                continue
            parts = [(a, min(a + share, out)) for a in range(0, out, share)]
            for part in [pool.submit(_rows, a, b, packed, factors, total) for a, b in parts]:
                part.result()
    return y


def _factors(x: Floats, groups: npt.NDArray[np.int64]) -> _Factors:
    """Return what low nibbles and whole bytes are multiplied by, byte by byte."""
    lows, wholes = [np.empty(0, np.float32)], [np.empty(0, np.float32)]
    for start, stop, nibbles, _, width in groups:
        part = np.zeros(2 * width, np.float32)
        if nibbles:
            part[: stop - start] = x[start:stop]
        whole = part[1::2] * np.float32(1 / 16)
        lows.append(part[::2] - whole)
        wholes.append(whole)
    return _Factors(x, np.concatenate(lows), np.concatenate(wholes))


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"})
def _rows(a: int, b: int, packed: PackedCodes, factors: _Factors, y: Floats) -> None:  # pragma: no cover
    """Write the products of rows a ... b - 1 to y (out,)."""
    x, low, whole = factors
    y[a:b] = 0
    place = 0
    for group in range(len(packed.groups)):
        start, width = packed.groups[group, _START], packed.groups[group, _ROW_BYTES]
        first = packed.groups[group, _FIRST_BYTE] + a * width
        lines = packed.codes[first : first + (b - a) * width].reshape(b - a, width)
        if packed.groups[group, _NIBBLES]:
            lows, wholes = low[place : place + width], whole[place : place + width]
            for row in range(b - a):
                total = np.float32(0)
                for j in range(width):
                    byte = np.int32(lines[row, j])  # 64-bit integers convert to floats at a quarter of the speed
                    low_code, both = (byte & np.int32(15)) - np.int32(8), byte - np.int32(136)
                    total += np.float32(low_code) * lows[j] + np.float32(both) * wholes[j]
                y[a + row] += total
        else:
            part = x[start : start + width]
            for row in range(b - a):
                total = np.float32(0)
                for j in range(width):
                    total += np.float32(np.int32(np.int8(lines[row, j]))) * part[j]
                y[a + row] += total
        place += width
    for row in range(a, b):
        for patch in range(packed.patch_start[row], packed.patch_start[row + 1]):
            y[row] += np.float32(packed.patch_delta[patch]) * x[packed.patch_at[patch]]

"""Packed codes times a few vectors on the CPU, compiled by Numba: one pass over the packed bytes a vector.

A byte of two nibbles is `byte - 136 = low + 16 high`, so that two columns cost two multiplications and one mask:

    low xe + high xo = low (xe - xo / 16) + (byte - 136) (xo / 16)
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int32]

MIN_THREADED_BYTES = 2**22  # bytes of codes under which one thread does all


def products(
    x: Floats,
    codes: Bytes,
    groups: Sequence[tuple[int, int, bool, int, int]],
    patch_start: Integers,
    patch_at: Integers,
    patch_delta: npt.NDArray[np.int64],
    *,
    threads: int | None = None,
) -> Floats:
    """Return (tokens, out) float32 products of the codes with every row of x.

    Args:
        x: (tokens, in) times the scale of the column, by position.
        codes, groups, patch_start, patch_at, patch_delta: see `PackedLinear`.
        threads: None takes as many as torch does.
    """
    out = len(patch_start) - 1
    y = np.empty((len(x), out), np.float32)
    geometry = np.array(groups, np.int64).reshape(-1, 5)
    threads = threads or torch.get_num_threads()
    share = out if codes.size < MIN_THREADED_BYTES else -(-out // threads)
    with ThreadPoolExecutor(threads) as pool:  # starts no thread before work is submitted
        for row, total in zip(x, y, strict=True):
            shared = (codes, geometry, row, *_halves(row, geometry), patch_start, patch_at, patch_delta, total)
            if share >= out:
                _rows(0, out, *shared)
                continue
            for part in [pool.submit(_rows, a, min(a + share, out), *shared) for a in range(0, out, share)]:
                part.result()
    return y


def _halves(x: Floats, geometry: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return what low nibbles and whole bytes are multiplied by, byte by byte."""
    lows, wholes = [np.empty(0, np.float32)], [np.empty(0, np.float32)]
    for start, stop, nibbles, _, width in geometry:
        part = np.zeros(2 * width, np.float32)
        if nibbles:
            part[: stop - start] = x[start:stop]
        even, odd = part[::2], part[1::2] / 16
        lows.append(even - odd)
        wholes.append(odd)
    return np.concatenate(lows), np.concatenate(wholes)


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"})
def _rows(a, b, codes, geometry, x, low, whole, patch_start, patch_at, patch_delta, y):  # type: ignore[no-untyped-def]  # pragma: no cover
    y[a:b] = 0
    place = 0
    for group in range(len(geometry)):
        start, width = geometry[group, 0], geometry[group, 4]
        first = geometry[group, 3] + a * width
        lines = codes[first : first + (b - a) * width].reshape(b - a, width)
        if geometry[group, 2]:
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
        for patch in range(patch_start[row], patch_start[row + 1]):
            y[row] += np.float32(patch_delta[patch]) * x[patch_at[patch]]

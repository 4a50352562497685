"""The search for steps on two levels on the CPU, compiled by Numba; `superblock_fit.py` says what is searched.

Every kernel measures a group by `sum_k h_k |e_k|^p` of what rounding its weights to nearest leaves, p = 2.5 as in `scale.py`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int32]


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
def error_of(w: Floats, h: Floats, s: Any, o: Any, low: Any, high: Any) -> Any:
    """Return the error of a group with step `s`, not 0, and offset `o`."""
    total, inverse = np.float32(0), np.float32(1) / s
    for k in range(w.shape[0]):
        q = np.rint((w[k] + o) * inverse)
        q = low if q < low else q
        q = high if q > high else q
        e = np.abs(w[k] - (s * q - o))
        total += h[k] * e * e * np.sqrt(e)
    return total


@numba.njit(nogil=True, cache=True, error_model="numpy")
def search_groups(
    W: Floats,
    h: Floats,
    low: float,
    high: float,
    ends: Floats,
    signed: bool,
    step: Floats,
    offset: Floats,
    start: int,
    stop: int,
) -> None:
    """Find step and offset, real numbers, of the groups from `start` to `stop`.

    Args:
        W: (n, g) weights.
        h: (groups of a row, g).
        low, high: limits of the codes; low < 0 for grids without offset.
        ends: (k,) fractions of the range that are tried, of both ends on their own where there is an offset.
        signed: whether offsets may be negative.
        step, offset: (n,) are filled.
    """
    for i in range(start, stop):
        w, weight = W[i], h[i % h.shape[0]]
        smallest, largest = np.float32(0), np.float32(0)
        if signed and low == 0:
            smallest, largest = w[0], w[0]
        for k in range(w.shape[0]):
            smallest, largest = min(smallest, w[k]), max(largest, w[k])
        step[i], offset[i] = np.float32(0), np.float32(0)
        least = np.float32(np.inf)
        if low < 0:
            reach = max(-smallest, largest)
            for end in ends:
                for sign in (-1, 1):
                    s = np.float32(sign * end * reach / -low)
                    if s == 0:
                        continue
                    error = error_of(w, weight, s, np.float32(0), low, high)
                    if error < least:
                        least, step[i] = error, s
            continue
        middle = np.float32(0.5) * (smallest + largest) if signed else np.float32(0)
        for first in ends:
            for last in ends:
                bottom, top = middle + first * (smallest - middle), middle + last * (largest - middle)
                s = np.float32((top - bottom) / high)
                if s <= 0:
                    continue
                error = error_of(w, weight, s, -bottom, low, high)
                if error < least:
                    least, step[i], offset[i] = error, s, -bottom
        if least == np.float32(np.inf):
            offset[i] = -smallest


@numba.njit(nogil=True, cache=True, error_model="numpy")
def search_blocks(
    W: Floats, h: Floats, low: float, high: float, sc_limits: Any, m_limit: int, reach: int,
    step: Floats, offset: Floats, ds: Floats, dmins: Floats, d: Floats, dmin: Floats, sc: Integers, m: Integers,
    start: int, stop: int,
) -> None:  # fmt: skip
    """Find the numbers that are stored, of the blocks from `start` to `stop`.

    First `d` and `dmin` of all pairs of candidates, with the integers that come nearest to the groups' own steps and offsets;
    then the integers of each group, those around.

    Args:
        W: (blocks, groups, g) weights.
        h: (blocks of a row, groups, g).
        low, high: limits of the codes.
        sc_limits, m_limit: of the integers; no step is 0.
        reach: how far around integers are tried.
        step, offset: (blocks, groups) of the groups on their own.
        ds, dmins: (blocks, candidates), not 0.
        d, dmin, sc, m: (blocks,) and (blocks, groups) are filled.
    """
    groups = W.shape[1]
    for b in range(start, stop):
        weight = h[b % h.shape[0]]
        least, kept_d, kept_dmin = np.float32(np.inf), ds[b, 0], dmins[b, 0]
        for one in ds[b]:
            for other in dmins[b]:
                total = np.float32(0)
                for g in range(groups):
                    s, o = one * _multiple(step[b, g], one, sc_limits), other * _offset(offset[b, g], other, m_limit)
                    total += error_of(W[b, g], weight[g], s, o, low, high)
                if total < least:
                    least, kept_d, kept_dmin = total, one, other
        d[b], dmin[b] = kept_d, kept_dmin
        for g in range(groups):
            middle = _multiple(step[b, g], kept_d, sc_limits)
            best = np.float32(np.inf)
            for i in range(max(sc_limits[0], middle - reach), min(sc_limits[1], middle + reach) + 1):
                if i == 0:
                    continue
                first = _offset(offset[b, g], kept_dmin, m_limit)
                for k in range(max(0, first - reach), min(m_limit, first + reach) + 1):
                    error = error_of(W[b, g], weight[g], np.float32(kept_d * i), np.float32(kept_dmin * k), low, high)
                    if error < best:
                        best, sc[b, g], m[b, g] = error, i, k


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _multiple(step: Any, d: Any, limits: Any) -> Any:
    """Return the multiple of `d` nearest to a step, never 0."""
    i = int(np.rint(step / d))
    i = min(max(i, limits[0]), limits[1])
    if i == 0:
        return -1 if limits[0] < 0 and step / d < 0 else 1
    return i


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _offset(offset: Any, dmin: Any, limit: int) -> Any:
    return 0 if limit == 0 else min(max(int(np.rint(offset / dmin)), 0), limit)

"""Histograms of codes by column and class of rows, of all rows or a fixed sample, and what tables would cost."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nearplane.coding import frequency_tables

SAMPLED_CODES = 3 << 20  # codes of the rows that a large matrix is planned on


@njit(cache=True, nogil=True)
def _largest(codes: NDArray[np.int32], rows: NDArray[np.int64]) -> int:
    """Return the largest |code| of some rows."""
    low, high = codes[rows[0], 0], codes[rows[0], 0]
    for i in rows:
        row = codes[i]
        for j in range(len(row)):
            low, high = min(low, row[j]), max(high, row[j])
    return max(-int(np.int64(low)), int(np.int64(high)))


@njit(cache=True, nogil=True)
def beyond(codes: NDArray[np.int32], count: int) -> NDArray[np.int64]:
    """Return the `count` codes beyond +-127."""
    found, n = np.empty(count, np.int64), 0
    for row in codes:
        for code in row:
            if code < -127 or code > 127:
                found[n] = code
                n += 1
    return found


@njit(cache=True, nogil=True)
def _histogram(
    codes: NDArray[np.int32], rows: NDArray[np.int64], classes: NDArray[np.int64], top: int, counts: NDArray[np.int32]
) -> None:
    """Count codes of some rows by class, column and symbol; counts (classes, in, 2 top + 2), the last beyond +-top."""
    for n in range(len(rows)):
        into, row = counts[classes[n]], codes[rows[n]]
        for j in range(len(row)):
            code = np.int64(row[j]) + top
            into[j, code if 0 <= code <= 2 * top else 2 * top + 1] += 1


@njit(cache=True, nogil=True)
def _costs(
    counts: NDArray[np.int32], tables: NDArray[np.float32], pick: NDArray[np.int64], out: NDArray[np.float32]
) -> None:
    """Add up counts (classes, in, 2 top + 2) times the bits of |code|, tables (classes, top + 2, spreads)."""
    top = tables.shape[1] - 2
    for c in range(counts.shape[0]):
        for n in range(len(pick)):
            of, into = counts[c, pick[n]], out[n]
            for k in range(top + 2):
                if k <= top:
                    much = of[top + k] + (of[top - k] if k else 0)
                else:
                    much = of[2 * top + 1]
                if much:
                    price = tables[c, k]
                    factor = np.float32(much)
                    for s in range(len(into)):
                        into[s] += factor * price[s]


@njit(cache=True, nogil=True)
def _sum_by_spread(counts: NDArray[np.int32], spreads: NDArray[np.int64], out: NDArray[np.int64]) -> None:
    """Add counts (classes, in, symbols) to out (spreads, symbols) by the spreads (in, classes)."""
    for c in range(counts.shape[0]):
        for j in range(counts.shape[1]):
            into, of = out[spreads[j, c]], counts[c, j]
            for symbol in range(len(of)):  # a sum of slices takes three seconds to compile
                into[symbol] += of[symbol]


def sample(out: int, width: int) -> NDArray[np.int64]:
    """Return the rows that a matrix is planned on, always the same: all of a small one, else one of every so many."""
    count = max(1, SAMPLED_CODES // width)
    if count >= out:
        return np.arange(out)
    edges = np.arange(count + 1) * out // count
    return edges[:-1] + (np.arange(count) * 2654435761 >> 8) % np.diff(edges)


@lru_cache(maxsize=128)
def _table(mixture: int, top: int, shift: int) -> NDArray[np.float32]:
    """Return the bits of |code| up to `top`, and beyond, at every spread plus `shift`: (top + 2, spreads)."""
    table = frequency_tables.family_costs(mixture)
    table = np.concatenate([table[:, : top + 1], table[:, -1:]], 1).T
    return table[:, np.clip(np.arange(frequency_tables.SPREADS) + shift, 0, frequency_tables.SPREADS - 1)]


class Counts:
    """Histograms of rows of a matrix by row class, and what tables would cost its columns."""

    def __init__(self, codes: NDArray[np.int32], row_levels: NDArray[np.int32], rows: NDArray[np.int64]) -> None:
        self.rows, self.out = rows, len(codes)
        self.doubt = 2.0 * (self.out / len(rows) - 1)
        self.top = min(frequency_tables.MAX_BYTE_CODE, int(_largest(codes, rows)))
        self.levels, classes = np.unique(row_levels[rows], return_inverse=True)
        self.signed = np.zeros((len(self.levels), codes.shape[1], 2 * self.top + 2), np.int32)
        _histogram(codes, rows, classes.reshape(-1), self.top, self.signed)

    def costs(self, mixture: int, row_step: int, pick: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """Return the bits of columns at every spread of row level 0: (columns, spreads)."""
        tables = np.stack([_table(mixture, self.top, row_step * int(level)) for level in self.levels])
        if pick is None:
            pick = np.arange(self.signed.shape[1])
        out = np.zeros((len(pick), frequency_tables.SPREADS), np.float32)
        _costs(self.signed, tables * np.float32(self.out / len(self.rows)), pick, out)
        return out

    def by_spread(self, spreads: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
        """Return the counts by symbol of every spread; spreads (in, classes)."""
        total = np.zeros((frequency_tables.SPREADS, self.signed.shape[2]), np.int64)
        _sum_by_spread(self.signed, spreads, total)
        symbols = np.zeros((frequency_tables.SPREADS, 256), np.int64)
        symbols[:, 128 - self.top : 129 + self.top] = total[:, :-1]
        symbols[:, 0] += total[:, -1]
        symbols = symbols * self.out // len(self.rows)
        return {int(spread): symbols[spread] for spread in np.unique(spreads)}

"""What codes take, in bits: under single tables, under tables of pairs, in the list of escapes.

From histograms of codes by column and class of rows, of all rows or a fixed sample.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nearplane.coding import frequency_tables
from nearplane.coding.bit_stream import rice_cost, zigzag

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


def geometric_bits(codes: NDArray[np.int32]) -> float:
    """Return about what codes (out, in) take, bits per code: as if those of a column were two-sided geometric.

    No headers, no tables: good for how sizes differ between neighbouring steps, at a small part of the time of `size`.
    """
    mean: NDArray[np.float64] = np.abs(codes).mean(0)  # (in,)
    mean = mean[mean > 0]
    share = (np.sqrt(1 + mean**2) - 1) / mean  # P(k) ~ share^|k|
    bits: NDArray[np.float64] = np.log2((1 + share) / (1 - share)) - mean * np.log2(share)
    return float(bits.sum() / codes.shape[1])


def table_bits(count: NDArray[np.int64], table: NDArray[np.uint16]) -> float:
    """Return the bits of symbols with the given counts (256,), with about what the list of escapes takes."""
    bits, listed = stream_bits(count, table)
    magnitude = np.maximum(np.abs(np.arange(256) - 128), 1)
    magnitude[0] = 256
    return bits + float(listed @ (4 + 2 * np.log2(magnitude)))


def stream_bits(count: NDArray[np.int64], table: NDArray[np.uint16]) -> tuple[float, NDArray[np.float64]]:
    """Return the bits of codes with the counts (256,) without the list of escapes, and the counts of that list."""
    listed = np.where(table == 0, count, 0).astype(np.float64)
    listed[0] = count[0]
    price = np.zeros(256)
    used = table > 0
    price[used] = 12 - np.log2(table[used].astype(np.float64))
    escape = price[0] if used[0] else 64.0
    price[~used] = escape
    return float(count @ price), listed


def paired_stream_bits(count: NDArray[np.int64], table: NDArray[np.uint16]) -> tuple[float, NDArray[np.float64]]:
    """Return the same as `stream_bits` when independent codes are coded two by two with a table of pairs."""
    total = float(count.sum())
    nibble = np.zeros(16)
    nibble[1:] = count[121:136]
    nibble[0] = total - nibble.sum()
    weight = nibble[:, None] * nibble[None, :] / total / 2  # pairs, [high, low]
    frequency = table.reshape(16, 16).astype(np.float64)
    lacks = frequency == 0
    price = 12 - np.log2(np.where(lacks, frequency[0, 0], frequency))
    missed = (weight * lacks).sum(0) + (weight * lacks).sum(1)  # codes per nibble that are escaped with their partner
    listed = count * (missed / np.maximum(nibble, 1e-9))[0]
    listed[121:136] = missed[1:]
    far = np.r_[0:121, 136:256]
    listed[far] = count[far]
    return float((weight * price).sum()), listed


def list_bits(listed: NDArray[np.float64], beyond: NDArray[np.int64]) -> float:
    """Return the bits of a list of escapes: counts (256,) of codes within a byte, and codes beyond."""
    folded = zigzag(np.arange(-128, 128))
    listed[0] = 0
    outer = zigzag(beyond)
    return min(float(listed @ (1 + k + (folded >> k))) + rice_cost(outer, k) for k in range(15))

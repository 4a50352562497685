"""Size of codes in bits under tables of single codes, under tables of pairs, and in the list of escapes.

Sizes are computed from histograms of codes by column and class of rows, of all rows or of a fixed sample.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nearplane.coding import frequency_tables
from nearplane.coding.bit_stream import rice_cost, zigzag
from nearplane.compiled import compiled

SAMPLED_CODES = 3 << 20  # codes of the sample of rows from which a large matrix is planned


@compiled()
def _largest_magnitude(codes: NDArray[np.int32], rows: NDArray[np.int64]) -> int:
    """Return the largest |code| of some rows."""
    low, high = codes[rows[0], 0], codes[rows[0], 0]
    for i in rows:
        row = codes[i]
        for j in range(len(row)):
            low, high = min(low, row[j]), max(high, row[j])
    return max(-int(np.int64(low)), int(np.int64(high)))


@compiled()
def _histogram(
    codes: NDArray[np.int32], rows: NDArray[np.int64], classes: NDArray[np.int64], top: int, counts: NDArray[np.int32]
) -> None:
    """Count codes of some rows by class, column and symbol; counts (classes, in, 2 top + 2), the last beyond +-top."""
    for n in range(len(rows)):
        class_counts, row = counts[classes[n]], codes[rows[n]]
        for j in range(len(row)):
            code = np.int64(row[j]) + top
            class_counts[j, code if 0 <= code <= 2 * top else 2 * top + 1] += 1


@compiled()
def _costs(
    counts: NDArray[np.int32], tables: NDArray[np.float32], columns: NDArray[np.int64], out: NDArray[np.float32]
) -> None:
    """Add counts (classes, in, 2 top + 2) times the bits of |code|, tables (classes, top + 2, spreads), to `out`."""
    top = tables.shape[1] - 2
    for c in range(counts.shape[0]):
        for n in range(len(columns)):
            histogram, bits = counts[c, columns[n]], out[n]
            for k in range(top + 2):
                if k <= top:
                    count = histogram[top + k] + (histogram[top - k] if k else 0)
                else:
                    count = histogram[2 * top + 1]
                if count:
                    code_bits = tables[c, k]
                    weight = np.float32(count)
                    for s in range(len(bits)):
                        bits[s] += weight * code_bits[s]


@compiled()
def _add_by_spread(counts: NDArray[np.int32], spreads: NDArray[np.int64], out: NDArray[np.int64]) -> None:
    """Add counts (classes, in, symbols) to out (spreads, symbols) by the spreads (in, classes)."""
    for c in range(counts.shape[0]):
        for j in range(counts.shape[1]):
            totals, histogram = out[spreads[j, c]], counts[c, j]
            for symbol in range(len(histogram)):  # a sum of slices would take three seconds to compile
                totals[symbol] += histogram[symbol]


def sample(out: int, width: int) -> NDArray[np.int64]:
    """Return the fixed sample of rows from which a matrix is planned: all, or evenly spread ones if it is large."""
    count = max(1, SAMPLED_CODES // width)
    if count >= out:
        return np.arange(out)
    edges = np.arange(count + 1) * out // count
    return edges[:-1] + (np.arange(count) * 2654435761 >> 8) % np.diff(edges)


@lru_cache(maxsize=128)
def _table(mixture: int, top: int, shift: int) -> NDArray[np.float32]:
    """Return (top + 2, spreads) bits of |code| up to `top`, and beyond, at every spread plus `shift`."""
    table = frequency_tables.family_costs(mixture)
    table = np.concatenate([table[:, : top + 1], table[:, -1:]], 1).T
    return table[:, np.clip(np.arange(frequency_tables.SPREADS) + shift, 0, frequency_tables.SPREADS - 1)]


class Counts:
    """Histograms of rows of a matrix by row class, and the cost of its columns under tables."""

    def __init__(self, codes: NDArray[np.int32], row_levels: NDArray[np.int32], rows: NDArray[np.int64]) -> None:
        self.rows, self.out = rows, len(codes)
        self.min_gain = 2.0 * (self.out / len(rows) - 1)
        self.top = min(frequency_tables.MAX_BYTE_CODE, int(_largest_magnitude(codes, rows)))
        self.levels, classes = np.unique(row_levels[rows], return_inverse=True)
        self.signed = np.zeros((len(self.levels), codes.shape[1], 2 * self.top + 2), np.int32)
        _histogram(codes, rows, classes.reshape(-1), self.top, self.signed)

    def costs(self, mixture: int, row_step: int, columns: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """Return (columns, spreads) bits of columns at every spread of row level 0."""
        tables = np.stack([_table(mixture, self.top, row_step * int(level)) for level in self.levels])
        if columns is None:
            columns = np.arange(self.signed.shape[1])
        out = np.zeros((len(columns), frequency_tables.SPREADS), np.float32)
        _costs(self.signed, tables * np.float32(self.out / len(self.rows)), columns, out)
        return out

    def by_spread(self, spreads: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
        """Return the counts by symbol for every spread, from spreads (in, classes)."""
        total = np.zeros((frequency_tables.SPREADS, self.signed.shape[2]), np.int64)
        _add_by_spread(self.signed, spreads, total)
        symbols = np.zeros((frequency_tables.SPREADS, 256), np.int64)
        symbols[:, 128 - self.top : 129 + self.top] = total[:, :-1]
        symbols[:, 0] += total[:, -1]
        symbols = symbols * self.out // len(self.rows)
        return {int(spread): symbols[spread] for spread in np.unique(spreads)}


def geometric_bits(means: NDArray[np.float64]) -> float:
    """Return an estimate of the bits per code of a matrix, if each column is two-sided geometric.

    Headers and tables are left out: it serves to compare neighbouring steps, in a small part of the time of `size`.

    Args:
        means: (in,) mean magnitude of the codes of every column.
    """
    mean = means[means > 0]
    share = (np.sqrt(1 + mean**2) - 1) / mean  # P(k) ~ share^|k|
    bits: NDArray[np.float64] = np.log2((1 + share) / (1 - share)) - mean * np.log2(share)
    return float(bits.sum() / len(means))


def table_bits(count: NDArray[np.int64], table: NDArray[np.uint16]) -> float:
    """Return the bits of symbols with counts (256,), including an estimate of the list of escapes."""
    bits, listed = stream_bits(count, table)
    magnitude = np.maximum(np.abs(np.arange(256) - 128), 1)
    magnitude[0] = 256
    return bits + float(listed @ (4 + 2 * np.log2(magnitude)))


def stream_bits(count: NDArray[np.int64], table: NDArray[np.uint16]) -> tuple[float, NDArray[np.float64]]:
    """Return the bits of codes with counts (256,) without the list of escapes, and the counts in that list."""
    listed = np.where(table == 0, count, 0).astype(np.float64)
    listed[0] = count[0]
    symbol_bits = np.zeros(256)
    used = table > 0
    symbol_bits[used] = 12 - np.log2(table[used].astype(np.float64))
    escape_bits = symbol_bits[0] if used[0] else 64.0
    symbol_bits[~used] = escape_bits
    return float(count @ symbol_bits), listed


def paired_stream_bits(count: NDArray[np.int64], table: NDArray[np.uint16]) -> tuple[float, NDArray[np.float64]]:
    """Return the same as `stream_bits` for independent codes that are coded in pairs with a table of pairs."""
    total = float(count.sum())
    nibble = np.zeros(16)
    nibble[1:] = count[121:136]
    nibble[0] = total - nibble.sum()
    weight = nibble[:, None] * nibble[None, :] / total / 2  # pairs, [high, low]
    frequency = table.reshape(16, 16).astype(np.float64)
    escaped = frequency == 0
    pair_bits = 12 - np.log2(np.where(escaped, frequency[0, 0], frequency))
    escaped_codes = (weight * escaped).sum(0) + (weight * escaped).sum(1)  # codes per nibble in escaped pairs
    listed = count * (escaped_codes / np.maximum(nibble, 1e-9))[0]
    listed[121:136] = escaped_codes[1:]
    outside = np.r_[0:121, 136:256]
    listed[outside] = count[outside]
    return float((weight * pair_bits).sum()), listed


def list_bits(listed: NDArray[np.float64], beyond: NDArray[np.int64]) -> float:
    """Return the bits of a list of escapes, from counts (256,) of codes within a byte and the codes beyond."""
    folded = zigzag(np.arange(-128, 128))
    listed[0] = 0
    outer_folded = zigzag(beyond)
    return min(float(listed @ (1 + k + (folded >> k))) + rice_cost(outer_folded, k) for k in range(15))

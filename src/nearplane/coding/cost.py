"""What codes take, in bits, from their counts: under single tables, under tables of pairs, in the list of escapes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nearplane.coding.bit_stream import rice_cost, zigzag


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

"""Canonical Huffman codes of at most twelve bits, as frequencies: a code of length l is a frequency of 2^(12 - l)."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

MAX_CODE_BITS = 12


def lengths(frequency: NDArray[np.uint16]) -> NDArray[np.int64]:
    """Return the code lengths (256,) that are shortest for the frequencies; 0 where a symbol has none, or is alone.

    Package-merge (Larmore and Hirschberg, 1990): each of twelve rounds pairs up the cheapest packages of the last one
    and merges them with the symbols; a symbol's length is the number of chosen packages that it is in. Equals keep
    their order, symbols before packages, so that every reader finds the same lengths.
    """
    found = np.zeros(256, np.int64)
    symbols = [int(s) for s in np.flatnonzero(frequency)]
    if len(symbols) < 2:
        return found
    alone: list[tuple[int, tuple[int, ...]]] = sorted((int(frequency[s]), (s,)) for s in symbols)
    packages: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(MAX_CODE_BITS):
        pairs = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(packages[::2], packages[1::2], strict=False)]
        packages = list(heapq.merge(alone, pairs, key=lambda package: package[0]))
    for _, members in packages[: 2 * len(symbols) - 2]:
        for symbol in members:
            found[symbol] += 1
    return found


def frequencies(frequency: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Return the powers of two (256,) that stand for the Huffman code of the frequencies; they sum to 4096."""
    found = lengths(frequency)
    if not found.any():
        return frequency
    return np.where(found > 0, 1 << (MAX_CODE_BITS - found), 0).astype(np.uint16)

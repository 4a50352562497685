"""Probability tables of the coder, as integer frequencies that every machine computes identically.

A table gives each symbol a frequency out of 4096. All tables belong to one family: scale mixtures of Gaussians,
integrated over the unit bins around the integers. The index of a table is its spread (sixteenths of an octave) and its
shape (0 is Gaussian, larger shapes have heavier tails). A stored table is a correction of a member of the family. No
float reaches the coder: the two constants below are rounded once, far from any tie, and all else is integer arithmetic.

Symbols of a byte table are `code + 128` for |code| <= 127, of a pair table two nibbles `code + 8` for |code| <= 7, the
first column low. Symbol 0 (in a pair: nibble 0) is the escape: its code is in a separate list.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from nearplane.compiled import compiled

FREQUENCY_SUM = 4096  # sum of the frequencies of a table
SPREADS = 161  # sigma = 2 ** ((spread - 48) / 16): 1/8 ... 128
SHAPES = 16  # a mixture over sigma * 2 ** (shape * m / 16), m = -4 ... 4
ESCAPE = 0
MAX_BYTE_CODE = 127  # largest |code| with a symbol in a byte table
MAX_NIBBLE_CODE = 7  # largest |code| with a nibble in a pair table

# 2^31 Q(i/64)
_GAUSSIAN_TAIL = np.array([round(2**31 * math.erfc(i / 64 / math.sqrt(2)) / 2) for i in range(424)], np.int64)
_OCTAVE_STEPS = np.array([round(2**20 * 2 ** (-j / 16)) for j in range(16)], np.int64)
_MIXTURE_WEIGHTS = np.array([1, 8, 28, 56, 70, 56, 28, 8, 1], np.int64)  # sums to 256
_LAST_TAIL = len(_GAUSSIAN_TAIL) - 1


@compiled()
def _tail(odd: int, spread: int) -> int:
    """Return 2^31 times the probability that a Gaussian of this spread exceeds odd/2."""
    octave, step = (spread - 48) >> 4, (spread - 48) & 15
    x = odd * _OCTAVE_STEPS[step]  # 2^21 (odd/2) / sigma, before the octaves
    shift = 5 + octave
    x = x >> shift if shift >= 0 else x << -shift  # now in 1/64, ten bits of fraction
    i, fraction = x >> 10, x & 1023
    if i >= _LAST_TAIL:
        return 0
    return int(_GAUSSIAN_TAIL[i] - (((_GAUSSIAN_TAIL[i] - _GAUSSIAN_TAIL[i + 1]) * fraction) >> 10))


@compiled()
def parametric(spread: int, shape: int) -> NDArray[np.uint16]:
    """Return the (256,) frequencies for a spread and a shape; symmetric, and positive for 0, +-1 and the escape."""
    weight = np.zeros(MAX_BYTE_CODE + 2, np.int64)  # of |code| on one side; last: beyond, on both sides
    parts = 9 if shape else 1
    for part in range(parts):
        part_spread = spread + (part - 4) * shape if shape else spread
        share = _MIXTURE_WEIGHTS[part] if shape else 1
        tail = np.int64(1) << 30
        for k in range(MAX_BYTE_CODE + 1):
            next_tail = np.int64(_tail(2 * k + 1, part_spread))
            weight[k] += share * ((tail - next_tail) * 2 if k == 0 else tail - next_tail)
            tail = next_tail
            if next_tail == 0:
                break
        weight[MAX_BYTE_CODE + 1] += share * 2 * tail
    unallocated = np.int64(1 << 31) * (256 if shape else 1)
    escaped = weight[MAX_BYTE_CODE + 1]
    top = MAX_BYTE_CODE
    while top > 1 and weight[top] << 14 < unallocated:  # rarer than 2^-14: cheaper as an escape
        escaped += 2 * weight[top]
        top -= 1
    frequency = np.zeros(256, np.uint16)
    left = np.int64(FREQUENCY_SUM)
    slots = min(max(1, (escaped * left + unallocated // 2) // unallocated), left - 2 * top - 1)
    frequency[ESCAPE] = slots
    left -= slots
    unallocated -= escaped
    for k in range(top, 0, -1):  # from the tails inwards: codes near 0 absorb the rounding
        slots = min(max(1, (weight[k] * left + unallocated // 2) // max(1, unallocated)), (left - 2 * k + 1) // 2)
        frequency[128 + k] = slots
        frequency[128 - k] = slots
        left -= 2 * slots
        unallocated -= 2 * weight[k]
    frequency[128] = left
    return frequency


def normalise(weight: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Scale weights (256,), at most 2^50 in all, to frequencies that sum to 4096; only zeros become 0."""
    return _allocate(weight, np.argsort(weight, kind="stable"))


@compiled()
def _allocate(weight: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Allocate 4,096 slots by weight, rarest symbol first; later symbols absorb the rounding."""
    frequency = np.zeros(256, np.uint16)
    count = 0
    unallocated = np.int64(0)
    for symbol in range(256):
        if weight[symbol] > 0:
            count += 1
            unallocated += weight[symbol]
    left = np.int64(FREQUENCY_SUM)
    for symbol in order:
        if weight[symbol] > 0:
            count -= 1
            slots = min(max(1, (weight[symbol] * left + unallocated // 2) // unallocated), left - count)
            if count == 0:
                slots = left
            frequency[symbol] = slots
            left -= slots
            unallocated -= weight[symbol]
    return frequency


def paired(single: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Return the (256,) frequencies of two independent codes as nibbles; pairs rarer than 2^-14 are escaped."""
    nibble = np.empty(16, np.int64)
    nibble[1:] = single[128 - MAX_NIBBLE_CODE : 129 + MAX_NIBBLE_CODE]
    nibble[0] = FREQUENCY_SUM - nibble[1:].sum()
    weight = np.outer(nibble, nibble).reshape(-1)  # symbol = high << 4 | low
    rare = weight < 1 << 10
    dropped = int(weight[rare].sum())
    weight[rare] = 0
    weight[ESCAPE] = max(int(weight[ESCAPE]), 1) + dropped
    return normalise(weight)


@functools.cache
def family_costs(mixture: int) -> NDArray[np.float32]:
    """Return (spreads, 129) bits of |code| = 0 ... 127 and, last, of larger ones; escapes include their list entry."""
    half = np.zeros((SPREADS, MAX_BYTE_CODE + 2))
    escape = np.empty(SPREADS)
    for spread in range(SPREADS):
        frequency = parametric(spread, mixture)
        half[spread, : MAX_BYTE_CODE + 1] = frequency[128:]
        escape[spread] = frequency[ESCAPE]
    listed = 4 + 2 * np.log2(np.maximum(np.arange(MAX_BYTE_CODE + 2), 1))
    with np.errstate(divide="ignore"):
        return np.where(half > 0, 12 - np.log2(half), 12 - np.log2(escape)[:, None] + listed).astype(np.float32)


@functools.cache
def family_moments() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (spreads,) mean and (spreads,) variance of |code| under the Gaussian tables."""
    magnitude = np.arange(MAX_BYTE_CODE + 1.0)
    mean, variance = np.empty(SPREADS), np.empty(SPREADS)
    for spread in range(SPREADS):
        frequency = parametric(spread, 0).astype(np.float64)
        mass = frequency[128:] * np.where(magnitude > 0, 2, 1)
        mass /= mass.sum()
        mean[spread] = mass @ magnitude
        variance[spread] = mass @ magnitude**2 - mean[spread] ** 2
    return mean, variance

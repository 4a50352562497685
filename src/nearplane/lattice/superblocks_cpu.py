"""Search for the steps of blocks on the CPU, compiled by Numba; its torch form is in `superblocks_torch.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nearplane.compiled import compiled
from nearplane.lattice.kernels_cpu import in_threads
from nearplane.lattice.superblocks_torch import RADIUS, RANGE_FRACTIONS
from nearplane.number_formats import BlockFormat

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int32]


def groups_of(kind: BlockFormat, W: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Return real-valued steps and offsets of the groups, as the torch form does."""
    step, offset = torch.zeros(2, len(W)).unbind()
    limits, ends = (float(kind.low), float(kind.high)), torch.tensor(RANGE_FRACTIONS).numpy()
    inputs = W.numpy(), h.numpy(), limits, ends, kind.single, step.numpy(), offset.numpy()
    in_threads(partial(search_groups, *inputs), len(step))
    return step, offset


def blocks_of(kind: BlockFormat, W: Tensor, h: Tensor, *numbers: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the stored numbers of blocks, as the torch form does."""
    count, groups = W.shape[:2]
    d, dmin = torch.zeros(2, count).unbind()
    sc, m = torch.zeros(2, count, groups, dtype=torch.int32).unbind()
    limits = float(kind.low), float(kind.high), kind.sc, kind.m
    arrays = (part.contiguous().numpy() for part in (*numbers, d, dmin, sc, m))
    kernel: Any = search_blocks
    in_threads(partial(kernel, W.numpy(), h.numpy(), *limits, *arrays), count)
    return d, dmin, sc, m


@compiled(error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
def error_of(w: Floats, h: Floats, s: Any, o: Any, low: Any, high: Any) -> Any:
    """Return the error of a group with step `s` (not 0) and offset `o`."""
    total, inverse = np.float32(0), np.float32(1) / s
    for k in range(w.shape[0]):
        q = np.rint((w[k] + o) * inverse)
        q = low if q < low else q
        q = high if q > high else q
        e = np.abs(w[k] - (s * q - o))
        total += h[k] * e * e * np.sqrt(e)
    return total


@compiled(error_model="numpy")
def search_groups(
    W: Floats, h: Floats, limits: Any, ends: Floats, signed: bool, step: Floats, offset: Floats, start: int, stop: int
) -> None:
    """Find real-valued step and offset of the groups from `start` to `stop`.

    Args:
        W: (n, g) weights.
        h: (groups of a row, g) weights of errors.
        limits: Limits of the codes; the lower one is negative for grids without offset.
        ends: (k,) fractions of the range to try, for each end separately if there is an offset.
        signed: Whether offsets may be negative.
        step, offset: (n,) outputs.
    """
    low, high = limits
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
            range_end = max(-smallest, largest)
            for end in ends:
                for sign in (-1, 1):
                    s = np.float32(sign * end * range_end / -low)
                    if s == 0:
                        continue
                    error = error_of(w, weight, s, np.float32(0), low, high)
                    if error < least:
                        least, step[i] = error, s
            continue
        middle = np.float32(0.5) * (smallest + largest) if signed else np.float32(0)
        for lower in ends:
            for upper in ends:
                bottom, top = middle + lower * (smallest - middle), middle + upper * (largest - middle)
                s = np.float32((top - bottom) / high)
                if s <= 0:
                    continue
                error = error_of(w, weight, s, -bottom, low, high)
                if error < least:
                    least, step[i], offset[i] = error, s, -bottom
        if least == np.float32(np.inf):
            offset[i] = -smallest


@compiled(error_model="numpy")
def search_blocks(
    W: Floats, h: Floats, low: float, high: float, sc_limits: Any, m_limit: int,
    step: Floats, offset: Floats, ds: Floats, dmins: Floats, d: Floats, dmin: Floats, sc: Integers, m: Integers,
    start: int, stop: int,
) -> None:  # fmt: skip
    """Find the stored numbers of the blocks from `start` to `stop`.

    First the best pair of candidates `d` and `dmin`, with the integers nearest to the steps and offsets of the groups;
    then the best integers of each group within `RADIUS`.

    Args:
        W: (blocks, groups, g) weights.
        h: (blocks of a row, groups, g) weights of errors.
        low, high: Limits of the codes.
        sc_limits, m_limit: Limits of the integers; `sc` is never 0.
        step, offset: (blocks, groups) real-valued steps and offsets.
        ds, dmins: (blocks, candidates) candidates for `d` and `dmin`, not 0.
        d, dmin, sc, m: (blocks,) and (blocks, groups) outputs.
    """
    groups = W.shape[1]
    for b in range(start, stop):
        weight = h[b % h.shape[0]]
        least, best_d, best_dmin = np.float32(np.inf), ds[b, 0], dmins[b, 0]
        for d0 in ds[b]:
            for dmin0 in dmins[b]:
                total = np.float32(0)
                for g in range(groups):
                    s, o = d0 * _multiple(step[b, g], d0, sc_limits), dmin0 * _offset(offset[b, g], dmin0, m_limit)
                    total += error_of(W[b, g], weight[g], s, o, low, high)
                if total < least:
                    least, best_d, best_dmin = total, d0, dmin0
        d[b], dmin[b] = best_d, best_dmin
        for g in range(groups):
            center = _multiple(step[b, g], best_d, sc_limits)
            best = np.float32(np.inf)
            for i in range(max(sc_limits[0], center - RADIUS), min(sc_limits[1], center + RADIUS) + 1):
                if i == 0:
                    continue
                nearest_m = _offset(offset[b, g], best_dmin, m_limit)
                for k in range(max(0, nearest_m - RADIUS), min(m_limit, nearest_m + RADIUS) + 1):
                    error = error_of(W[b, g], weight[g], np.float32(best_d * i), np.float32(best_dmin * k), low, high)
                    if error < best:
                        best, sc[b, g], m[b, g] = error, i, k


@compiled(error_model="numpy")
def _multiple(step: Any, d: Any, limits: Any) -> Any:
    """Return the integer whose multiple of `d` is nearest to a step, never 0."""
    i = int(np.rint(step / d))
    i = min(max(i, limits[0]), limits[1])
    if i == 0:
        return -1 if limits[0] < 0 and step / d < 0 else 1
    return i


@compiled(error_model="numpy")
def _offset(offset: Any, dmin: Any, limit: int) -> Any:
    return 0 if limit == 0 else min(max(int(np.rint(offset / dmin)), 0), limit)

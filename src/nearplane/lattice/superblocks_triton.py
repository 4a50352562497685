"""Search for the steps of blocks on a GPU, compiled by Triton; one launch a fit.

`superblocks_torch.py` has the same algorithm in torch. A program owns a block of several groups, or several blocks of
one group each, and tries all candidates in a loop. Errors are sums of float32 numbers in units of the largest weight,
so that tiny and huge weights have errors too; of two candidates whose errors are equal up to rounding either may win.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearplane.lattice import superblocks_torch
from nearplane.lattice.kernels_triton import device_of
from nearplane.lattice.superblock import MIN_HALF
from nearplane.lattice.superblocks_torch import RADIUS, SC_FRACTIONS
from nearplane.number_formats import BlockFormat

WEIGHTS = 256  # of a warp: those of a block of the k-quants
STORED = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
TINY = tl.constexpr(2.0**-120)  # weights below it count as much as this
SMALLEST = tl.constexpr(MIN_HALF)
SHIFT = tl.constexpr(1.5 * 2.0**23)  # float32 numbers of its size are whole: a sum with it is rounded, ties to even


def search(kind: BlockFormat, W: Tensor, h: Tensor, storage: torch.dtype) -> dict[str, Tensor]:
    """Return the stored numbers of all blocks by name. See `superblocks_torch.search`, which has the same arguments."""
    n, size = W.shape
    groups = kind.columns // kind.group
    fixed, warps = constants(kind, storage)
    lines = fixed["G"] if kind.single else groups  # groups of a program
    parts = {"d": W.new_empty(n // groups), "sc": torch.empty(n, dtype=torch.int32, device=W.device)}
    if kind.m:
        parts |= {"dmin": torch.empty_like(parts["d"]), "m": torch.empty_like(parts["sc"])}
    numbers = (parts.get(name, parts["sc"]) for name in ("d", "dmin", "sc", "m"))
    limits = map(float, (kind.low, kind.high, *kind.sc, kind.m))
    with device_of(W):
        _search[(triton.cdiv(n, lines),)](
            W, h, *numbers, n, size, len(h), lines, *limits, **fixed, num_warps=warps, enable_fp_fusion=False
        )
    return parts


def constants(kind: BlockFormat, storage: torch.dtype) -> tuple[dict[str, Any], int]:
    """Return the constants for which the kernel is compiled, and the warps of a program."""
    padded = triton.next_power_of_2(kind.group)
    rows = max(1, WEIGHTS // padded) if kind.single else triton.next_power_of_2(kind.columns // kind.group)
    fractions = torch.tensor(SC_FRACTIONS)
    counts, m_counts = (tuple((limit * fractions).round().tolist()) for limit in (max(kind.sc), kind.m))
    return {
        "ENDS": len(superblocks_torch.RANGE_FRACTIONS), "COUNTS": counts, "M_COUNTS": m_counts,
        "OFFSETS": len(m_counts) if kind.m else 1, "RADIUS": RADIUS, "SINGLE": kind.single, "MINIMA": kind.m > 0,
        "SYMMETRIC": kind.low < 0, "STORAGE": STORED[storage], "G": rows, "K": padded,
    }, min(8, max(1, rows * padded // WEIGHTS))  # fmt: skip


@triton.jit
def _error(w, h, s, o, unit, low, high):
    """Return the errors of (G, K) weights with (G, 1) steps and offsets, as (G,) sums; without meaning where a step is 0."""
    inverse = tl.broadcast_to(tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s), w.shape)
    s, o = tl.broadcast_to(s, w.shape), tl.broadcast_to(o, w.shape)
    code = _whole((w + o) * inverse, low, high)
    e = tl.abs(tl.fma(s, code, -(w + o))) * unit
    return tl.sum(h * e * e * tl.sqrt(e), 1)


@triton.jit
def _fraction(i, ENDS: tl.constexpr):
    """Return candidate i for the end of a grid, of `RANGE_FRACTIONS`."""
    return (1.0 - 0.65 * tl.cast(i, tl.float64) / (ENDS - 1)).to(tl.float32)


@triton.jit
def _candidate(largest, i, COUNTS: tl.constexpr, STORAGE: tl.constexpr):
    """Return candidate i for the step of a block: a stored number, not 0."""
    count = 1.0
    for k in tl.static_range(len(COUNTS)):
        count = tl.where(i == k, COUNTS[k], count)
    return stored_step(tl.div_rn(largest, count + tl.zeros_like(largest)), STORAGE)


@triton.jit
def short_float(x, STORAGE: tl.constexpr):
    """Return numbers rounded to nearest in the dtype in which they are stored."""
    if tl.float32 == STORAGE:
        return x
    if tl.bfloat16 == STORAGE:  # in integers, because Triton's interpreter cuts the last bits off instead
        bits = x.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(STORAGE).to(tl.float32)


@triton.jit
def stored_step(step, STORAGE: tl.constexpr):
    """Return a step as it is stored, never 0."""
    short = short_float(step, STORAGE)
    return tl.where(short == 0, tl.where(step < 0, -SMALLEST, SMALLEST), short)


@triton.jit
def _whole(x, low, high):
    """Return the nearest whole numbers within limits, in floating point."""
    return tl.minimum(tl.maximum(x, low), high) + SHIFT - SHIFT


@triton.jit
def _multiple(step, d, low, high):
    """Return the whole numbers whose multiples of d are nearest to the steps, never 0."""
    real = tl.div_rn(step, d + tl.zeros_like(step))
    i = _whole(real, low, high)
    return tl.where(i == 0, tl.where(real * low > 0, -1.0, 1.0), i)


@triton.jit
def _share(offset, dmin, limit):
    """Return the whole numbers from 0 to a limit whose multiples of dmin are nearest to the offsets."""
    return _whole(tl.div_rn(offset, dmin + tl.zeros_like(offset)), 0.0, limit)


@triton.jit
def _search(
    W, h, d, dmin, sc, m, n, size, groups, lines, low, high, sc_low, sc_high, m_limit,
    ENDS: tl.constexpr, COUNTS: tl.constexpr, M_COUNTS: tl.constexpr, OFFSETS: tl.constexpr,
    RADIUS: tl.constexpr, SINGLE: tl.constexpr, MINIMA: tl.constexpr, SYMMETRIC: tl.constexpr, STORAGE: tl.constexpr,
    G: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Search the steps of `lines` groups of `size` weights each, which are one block or `lines` blocks."""
    i, k = tl.program_id(0) * lines + tl.arange(0, G), tl.arange(0, K)
    here = (tl.arange(0, G) < lines) & (i < n)
    inside = here[:, None] & (k < size)[None, :]
    w = tl.load(W + i.to(tl.int64)[:, None] * size + k[None, :], mask=inside, other=0.0)
    weight = tl.load(h + (i % groups)[:, None] * size + k[None, :], mask=inside, other=0.0)
    largest, smallest = tl.max(w, 1), tl.min(w, 1)
    unit = 1.0 / tl.maximum(tl.maximum(largest, -smallest), TINY)
    step, offset, least = (
        tl.zeros((G,), tl.float32),
        tl.zeros((G,), tl.float32),
        tl.full((G,), float("inf"), tl.float32),
    )
    if SYMMETRIC:
        reach = tl.maximum(tl.maximum(-smallest, largest), 0.0)
        for c in range(2 * ENDS):  # both signs of every step
            s = tl.div_rn(_fraction(c // 2, ENDS) * reach, tl.where(c % 2 == 0, low, -low) + tl.zeros_like(reach))
            error = _error(w, weight, s[:, None], tl.zeros((G, 1), tl.float32), unit[:, None], low, high)
            better = (s != 0) & (error < least)
            step, least = tl.where(better, s, step), tl.where(better, error, least)
    else:
        middle = tl.zeros((G,), tl.float32)
        if SINGLE:  # offsets may be negative
            smallest = tl.min(tl.where(inside, w, float("inf")), 1)
            largest = tl.max(tl.where(inside, w, -float("inf")), 1)
            smallest, largest = tl.where(here, smallest, 0.0), tl.where(here, largest, 0.0)
            middle = 0.5 * (smallest + largest)
        else:
            smallest, largest = tl.minimum(smallest, 0.0), tl.maximum(largest, 0.0)
        for c in range(ENDS * ENDS):
            bottom = middle + _fraction(c // ENDS, ENDS) * (smallest - middle)
            top = middle + _fraction(c % ENDS, ENDS) * (largest - middle)
            s = tl.div_rn(top - bottom, high + tl.zeros_like(top))
            error = _error(w, weight, s[:, None], -bottom[:, None], unit[:, None], low, high)
            better = (s > 0) & (error < least)
            step, least, offset = (
                tl.where(better, s, step),
                tl.where(better, error, least),
                tl.where(better, -bottom, offset),
            )
        offset = tl.where(least == float("inf"), -smallest, offset)
    if SINGLE:
        tl.store(d + i, stored_step(step, STORAGE), mask=here)
        tl.store(sc + i, tl.full((G,), 1, tl.int32), mask=here)
        if MINIMA:
            tl.store(dmin + i, short_float(offset, STORAGE), mask=here)
            tl.store(m + i, tl.full((G,), 1, tl.int32), mask=here)
        return
    unit = tl.min(unit, 0)
    largest_step, largest_offset = tl.max(tl.abs(step), 0), tl.max(tl.where(here, offset, 0.0), 0)
    best_d, best_dmin = _candidate(largest_step, 0, COUNTS, STORAGE), 1.0
    if MINIMA:
        best_dmin = _candidate(largest_offset, 0, M_COUNTS, STORAGE)
    fewest = tl.full((), float("inf"), tl.float32)
    for a in range(len(COUNTS)):
        d0 = _candidate(largest_step, a, COUNTS, STORAGE)
        s = (d0 * _multiple(step, d0, sc_low, sc_high))[:, None]
        for b in range(OFFSETS):
            dmin0, o = 1.0, tl.zeros((G,), tl.float32)
            if MINIMA:
                dmin0 = _candidate(largest_offset, b, M_COUNTS, STORAGE)
                o = dmin0 * _share(offset, dmin0, m_limit)
            total = tl.sum(_error(w, weight, s, o[:, None], unit, low, high), 0)
            better = total < fewest
            best_d, best_dmin = tl.where(better, d0, best_d), tl.where(better, dmin0, best_dmin)
            fewest = tl.where(better, total, fewest)
    center, near = _multiple(step, best_d, sc_low, sc_high) - RADIUS, tl.zeros((G,), tl.float32)
    if MINIMA:
        near = _share(offset, best_dmin, m_limit) - RADIUS
    best_sc, best_m = tl.zeros((G,), tl.float32), tl.zeros((G,), tl.float32)
    least = tl.full((G,), float("inf"), tl.float32)
    for a in range(2 * RADIUS + 1):
        one = center + a
        for b in range(2 * RADIUS + 1 if MINIMA else 1):
            other = near + b
            possible = (one != 0) & (one >= sc_low) & (one <= sc_high) & (other >= 0) & (other <= m_limit)
            error = _error(w, weight, (best_d * one)[:, None], (best_dmin * other)[:, None], unit, low, high)
            better = possible & (error < least)
            best_sc, best_m = tl.where(better, one, best_sc), tl.where(better, other, best_m)
            least = tl.where(better, error, least)
    tl.store(d + tl.program_id(0), best_d)
    tl.store(sc + i, best_sc.to(tl.int32), mask=here)
    if MINIMA:
        tl.store(dmin + tl.program_id(0), best_dmin)
        tl.store(m + i, best_m.to(tl.int32), mask=here)

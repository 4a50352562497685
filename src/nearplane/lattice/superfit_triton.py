"""Least-squares fit of the steps and minima of blocks to codes on a GPU, compiled by Triton; two launches for 256 columns.

`SuperFit` in `superblock_fit.py` has the same algorithm in torch. A program owns a strip of rows and fits block
after block, or group after group; E and `E H` of its rows are registers until it ends.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearplane.lattice.kernels_torch import State
from nearplane.lattice.kernels_triton import device_of, nearest_whole, quotient
from nearplane.lattice.superblocks_triton import STORED, short_float, stored_step
from nearplane.number_formats import BlockFormat

ROWS = 8  # of a program
# columns of the Hessian in registers at a time; Triton before 3.8 multiplies no fewer, which spills some on sm_100
PIECE = 8 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8) else 16
WARPS = 8


def fit_columns(
    kind: BlockFormat, storage: torch.dtype, parts: dict[str, Tensor], state: State, EH: Tensor, a: int
) -> None:
    """Fit the blocks of some columns, one after another; see `SuperFit.fit`.

    Args:
        kind: Type of the blocks.
        storage: Dtype in which steps and offsets of blocks are stored.
        parts: (blocks | groups, out) numbers of the grid by name, updated.
        state: State of the descent; scale, zero, E, fitted and moved are updated.
        EH: (columns, out) `(E H)^T` of the columns, updated; more than 256 do not fit registers.
        a: First of the columns.
    """
    width, out = EH.shape
    E, H = state.E, state.H if state.H.stride(1) == 1 else state.H.contiguous()
    fixed = constants(kind, width)
    dmin, m = (parts.get(name, parts["d"]) for name in ("dmin", "m"))
    # of the columns of every group in H, (groups, columns)
    sums = H[a : a + width, a : a + width].view(width, -1, kind.group).sum(-1).T.contiguous() if kind.m else E
    numbers = parts["d"], parts["sc"], dmin, m
    changing = state.codes, E, state.scale, state.zero, *numbers, state.fitted, state.moved.view(torch.uint8)
    arguments = EH, H, sums, *changing, out, H.stride(0), a, width
    strips, steps = (triton.cdiv(out, ROWS),), fixed | stepwise(kind, storage)
    limits = tuple(map(float, (*kind.sc, kind.m)))
    options = {"num_warps": WARPS, "num_stages": 1, "enable_fp_fusion": False}
    with device_of(E):
        if kind.single:
            _fit_steps[strips](*arguments, 0, width, kind.columns, kind.group, **steps, **options)
            return
        for start in range(0, width, kind.columns):
            _fit_steps[strips](*arguments, start, start + kind.columns, kind.columns, kind.group, **steps, **options)
            _fit_integers[strips](*arguments, start, kind.columns, kind.group, *limits, **fixed, **options)


def constants(kind: BlockFormat, width: int) -> dict[str, Any]:
    """Return the constants for which both kernels are compiled."""
    return {"MINIMA": kind.m > 0, "R": ROWS, "S": max(16, triton.next_power_of_2(width)), "C": PIECE}


def stepwise(kind: BlockFormat, storage: torch.dtype) -> dict[str, Any]:
    """Return the further constants for which the fit of steps is compiled."""
    return {"SINGLE": kind.single, "STORAGE": STORED[storage], "B": triton.next_power_of_2(kind.columns // kind.group)}


@triton.jit
def _clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _product(
    H, codes, s, first, size, width, r, here, out, H_stride,
    S: tl.constexpr, R: tl.constexpr, C: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Return (S, R) the product of the columns of H of a group with its codes."""
    c = tl.arange(0, C)
    product = tl.zeros((S, R), kind)
    for k in tl.range(0, size, C, disable_licm=True):  # else addresses fill registers
        known, column = k + c < size, first + k + c
        h = tl.load(H + s[:, None] * H_stride + column[None, :], mask=(s < width)[:, None] & known[None, :], other=0.0)
        few = tl.load(codes + column[:, None] * out + r[None, :], mask=known[:, None] & here[None, :], other=0).to(kind)
        product = tl.dot(h, few, product, input_precision="tf32x3", out_dtype=kind)
    return product


@triton.jit
def _fit_steps(
    EH, H, sums, codes, E, scale, zero, d, sc, dmin, m, fitted, moved, out, H_stride, a, width, start, stop,
    columns, size, SINGLE: tl.constexpr, MINIMA: tl.constexpr, STORAGE: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    C: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Fit the steps and offsets of the blocks from column `a + start` to `a + stop` for a strip of R rows."""
    kind: tl.constexpr = E.dtype.element_ty
    r, s, i = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, S), tl.arange(0, B)
    here = r < out
    inside = (s < width)[:, None] & here[None, :]
    E += tl.cast(a, tl.int64) * out
    codes += tl.cast(a, tl.int64) * out
    H += tl.cast(a, tl.int64) * (H_stride + 1)
    at = s[:, None] * out + r[None, :]
    eh, e = tl.load(EH + at, mask=inside, other=0.0), tl.load(E + at, mask=inside, other=0.0)
    q = tl.load(codes + at, mask=inside, other=0).to(kind)
    total_change = tl.load(fitted + r, mask=here, other=0.0)
    changed = tl.zeros((R,), tl.int32)
    for begin in tl.range(start, stop, columns, disable_licm=True):
        block, first_group = (a + begin) // columns, (a + begin) // size
        v, u, v_h, u_h = tl.zeros((S, R), kind), tl.zeros((S, R), kind), tl.zeros((S, R), kind), tl.zeros((S, R), kind)
        for g in tl.range(0, columns // size, disable_licm=True):
            first, group = begin + g * size, first_group + g
            in_group = ((s >= first) & (s < first + size))[:, None]
            multiple, share = tl.load(sc + group * out + r, mask=here, other=0.0).to(kind), tl.zeros((R,), kind)
            if MINIMA:
                share = tl.load(m + group * out + r, mask=here, other=0.0).to(kind)
            v, u = tl.where(in_group, q * multiple[None, :], v), tl.where(in_group, share[None, :], u)
            q_h = _product(H, codes, s, first, size, width, r, here, out, H_stride, S, R, C, kind)
            v_h += q_h * multiple[None, :]
            if MINIMA:
                u_h += (
                    tl.load(sums + (group - a // size) * width + s, mask=s < width, other=0.0)[:, None] * share[None, :]
                )
        vv, vr = tl.sum(v * v_h, 0), tl.sum(v * eh, 0)
        step = tl.load(d + block * out + r, mask=here, other=1.0).to(kind)
        offset = tl.zeros((R,), kind)
        x, y = quotient(vr, vv), tl.zeros((R,), kind)
        uu, uv, ur = tl.zeros((R,), kind), tl.zeros((R,), kind), tl.zeros((R,), kind)
        if MINIMA:
            offset = tl.load(dmin + block * out + r, mask=here, other=0.0).to(kind)
            uu, uv, ur = tl.sum(u * u_h, 0), tl.sum(u * v_h, 0), tl.sum(u * eh, 0)
            determinant = vv * uu - uv * uv
            # else v and u are nearly parallel, and one of them suffices
            x = tl.where(determinant > 1e-5 * vv * uu, quotient(vr * uu - uv * ur, determinant), x)
        new = stored_step(tl.where(vv > 0, step + x, step).to(tl.float32), STORAGE).to(kind)
        ratio = quotient(new, step)
        x = tl.where((tl.abs(new) < float("inf")) & (ratio > 1 / 3) & (ratio < 3), new - step, 0.0)
        if MINIMA:
            new = offset + tl.where(uu > 0, quotient(uv * x - ur, uu), 0.0)
            if not SINGLE:  # integers that are not negative multiply it
                new = tl.maximum(new, 0.0)
            new = short_float(new.to(tl.float32), STORAGE).to(kind)
            y = tl.where(tl.abs(new) < float("inf"), new - offset, 0.0)
        change = x * x * vv - 2 * x * y * uv + y * y * uu - 2 * x * vr + 2 * y * ur
        better = change < 0
        x, y = tl.where(better, x, 0.0), tl.where(better, y, 0.0)
        change = tl.where(better & ((x != 0) | (y != 0)), change, 0.0)
        total_change += change
        changed = changed | (change != 0).to(tl.int32)
        step, offset = step + x, offset + y
        tl.debug_barrier()  # all have read the old numbers
        tl.store(d + block * out + r, step, mask=here)
        if MINIMA:
            tl.store(dmin + block * out + r, offset, mask=here)
        e -= v * x[None, :] - u * y[None, :]
        eh -= v_h * x[None, :] - u_h * y[None, :]
        to_groups = (first_group + i)[:, None] * out + r[None, :]
        has_group = (i < columns // size)[:, None] & here[None, :]
        product = step[None, :] * tl.load(sc + to_groups, mask=has_group, other=1.0)
        tl.store(scale + to_groups, product, mask=has_group)
        if MINIMA:
            minimum = offset[None, :] * tl.load(m + to_groups, mask=has_group, other=0.0)
            tl.store(zero + to_groups, quotient(minimum.to(kind), product.to(kind)), mask=has_group)
    tl.store(E + at, e, mask=inside)
    tl.store(EH + at, eh, mask=inside)
    tl.store(fitted + r, total_change, mask=here)
    if tl.max(changed, 0) != 0:
        tl.store(moved, 1)


@triton.jit
def _fit_integers(
    EH, H, sums, codes, E, scale, zero, d, sc, dmin, m, fitted, moved, out, H_stride, a, width, start, columns, size,
    sc_low, sc_high, m_limit, MINIMA: tl.constexpr, R: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Fit the integers of the groups of the block at column `a + start` for a strip of R rows."""
    kind: tl.constexpr = E.dtype.element_ty
    r, s = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, S)
    here = r < out
    inside = (s < width)[:, None] & here[None, :]
    E += tl.cast(a, tl.int64) * out
    codes += tl.cast(a, tl.int64) * out
    H += tl.cast(a, tl.int64) * (H_stride + 1)
    at = s[:, None] * out + r[None, :]
    eh, e = tl.load(EH + at, mask=inside, other=0.0), tl.load(E + at, mask=inside, other=0.0)
    q = tl.load(codes + at, mask=inside, other=0).to(kind)
    total_change = tl.load(fitted + r, mask=here, other=0.0)
    changed = tl.zeros((R,), tl.int32)
    block, first_group = (a + start) // columns, (a + start) // size
    step, offset = tl.load(d + block * out + r, mask=here, other=1.0).to(kind), tl.zeros((R,), kind)
    if MINIMA:
        offset = tl.load(dmin + block * out + r, mask=here, other=0.0).to(kind)
    for g in tl.range(0, columns // size, disable_licm=True):
        first, group = start + g * size, first_group + g
        q_h = _product(H, codes, s, first, size, width, r, here, out, H_stride, S, R, C, kind)
        in_group = ((s >= first) & (s < first + size))[:, None]
        codes_of = tl.where(in_group, q, 0.0)
        qq, qr = tl.sum(codes_of * q_h, 0), tl.sum(codes_of * eh, 0)
        ones = tl.zeros((S,), kind)
        if MINIMA:
            ones = tl.load(sums + (group - a // size) * width + s, mask=s < width, other=0.0)
        total, q1, r1 = 1.0, tl.zeros((R,), kind), tl.zeros((R,), kind)
        x = quotient(qr, qq)
        multiple = tl.load(sc + group * out + r, mask=here, other=1.0).to(kind)
        share = tl.zeros((R,), kind)
        if MINIMA:
            share = tl.load(m + group * out + r, mask=here, other=0.0).to(kind)
            total = tl.maximum(tl.sum(tl.where((s >= first) & (s < first + size), ones, 0.0), 0), 1e-30) + tl.zeros(
                (R,), kind
            )
            q1 = tl.sum(tl.where(in_group, q_h, 0.0), 0)
            r1 = tl.sum(tl.where(in_group, eh, 0.0), 0)
            determinant = qq * total - q1 * q1
            x = tl.where(determinant > 1e-5 * qq * total, quotient(qr * total - q1 * r1, determinant), x)
        middle = nearest_whole(multiple + quotient(tl.where(qq > 0, x, 0.0), step))
        least, best, best_share = tl.zeros((R,), kind), multiple, share
        for j in tl.range(0, 4, disable_licm=True):  # the present integer, and three around the best real number
            one = _clamp(middle + (j - 2), sc_low, sc_high)
            one = tl.where((j == 0) | (one == 0) | (one * multiple < 0), multiple, one)
            x = step * (one - multiple)
            change = x * (x * qq - 2 * qr)
            other = share
            if MINIMA:
                shift = quotient(quotient(q1 * x - r1, total), offset)
                other = _clamp(nearest_whole(share + tl.where(offset > 0, shift, 0.0)), 0.0, m_limit)
                y = offset * (other - share)
                change += y * (y * total - 2 * x * q1 + 2 * r1)
            better = change < least
            least = tl.where(better, change, least)
            best, best_share = tl.where(better, one, best), tl.where(better, other, best_share)
        x, y = step * (best - multiple), offset * (best_share - share)
        e -= codes_of * x[None, :] - tl.where(in_group, y[None, :], 0.0)
        eh -= q_h * x[None, :] - ones[:, None] * y[None, :]
        total_change += least
        changed = changed | (least != 0).to(tl.int32)
        tl.debug_barrier()  # all have read the old numbers
        tl.store(sc + group * out + r, best, mask=here)
        tl.store(scale + group * out + r, step * best, mask=here)
        if MINIMA:
            tl.store(m + group * out + r, best_share, mask=here)
            tl.store(zero + group * out + r, quotient(offset * best_share, step * best), mask=here)
    tl.store(E + at, e, mask=inside)
    tl.store(EH + at, eh, mask=inside)
    tl.store(fitted + r, total_change, mask=here)
    if tl.max(changed, 0) != 0:
        tl.store(moved, 1)

"""Sweep of a block of columns, search for steps and addition to exact sums on a GPU, compiled by Triton; one launch a call.

`kernels_torch.py` has the same algorithms in torch. A program owns a strip of rows (or of groups) and passes through
all columns of the block, so programs never wait for each other, and what a row gets does not depend on the other rows.
Sums may be in another order than in torch. Nothing else may differ: a value is computed as it is decoded, without fused
multiply-add, and divisions and roundings are those of IEEE 754.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearplane.lattice.grid import Codebook
from nearplane.lattice.kernels_torch import LOW, Columns, Tally

ROWS = 32  # of a program: as many as the threads of a warp, so that loads of a column are contiguous
GROUPS = 16  # of a program of the search
CHUNK = 128  # weights of a group that are in registers at a time
ADDED_ROWS, ADDED_COLUMNS = 4, 512  # of a program that adds to an exact sum
WARPS = 8  # of a program: with 4, blocks of 128 columns need more registers than some cards have


def sweep_block(target: Tensor, columns: Columns, U: Tensor, codes: Tensor, E: Tensor, tally: Tally) -> None:
    """Sweep one block of columns; fill `codes` and `E`. See `kernels_torch.sweep_block`, which has the same arguments."""
    W, scale, zero, group, codebook = columns
    b, out = W.shape
    if W.dtype != torch.float32:  # the codes of one strip may lie where the targets of another are still to be read
        target = target.clone()
    levels, middles = levels_on(codebook, W)
    low, high = code_limits(codebook)
    strides = target.stride(0), W.stride(0), codes.stride(0), E.stride(0), scale.stride(0), zero.stride(0)
    with device_of(W):
        _sweep[(triton.cdiv(out, ROWS),)](
            target, W, scale, zero, group, U.contiguous(), codes, E, tally.d.to(W.dtype), tally.loss, tally.outside,
            levels, middles, len(middles), out, b, *strides, low, high, *codebook.limits,
            BITS=len(middles).bit_length(), moves=tally.moves, counts=len(tally.outside) > 0,
            B=triton.next_power_of_2(b), R=ROWS, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def best_candidate(weights: Tensor, scale: Tensor, zero: Tensor, codebook: Codebook) -> Tensor:
    """Return (n,) the first candidate with the least error in every group. See `kernels_torch.best_candidate`."""
    n, size = weights.shape
    levels, middles = levels_on(codebook, weights)
    low, high = code_limits(codebook)
    best = torch.empty(n, dtype=torch.int64, device=weights.device)
    with device_of(weights):
        _search[(triton.cdiv(n, GROUPS),)](
            weights.contiguous(), scale.contiguous(), zero.contiguous(), best, levels, middles, len(middles), n, size, len(scale),
            low, high, BITS=len(middles).bit_length(), G=GROUPS, K=min(CHUNK, triton.next_power_of_2(size)),
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return best


def add_exactly(product: Tensor, high: Tensor, low: Tensor, unit: Tensor) -> Tensor:
    """Add a product to integers in place; the same bits as the torch form."""
    rows, columns = product.shape
    product = product if product.stride(1) == 1 else product.contiguous()
    programs = triton.cdiv(rows, ADDED_ROWS), triton.cdiv(columns, ADDED_COLUMNS)
    bits = torch.int32 if product.dtype == torch.float32 else torch.int64
    peak = torch.zeros(1, dtype=bits, device=product.device)
    with device_of(product):
        _add[programs](
            product, high, low, unit, peak, rows, columns, product.stride(0), high.stride(0), low.stride(0),
            LOW=LOW, R=ADDED_ROWS, C=ADDED_COLUMNS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return peak.view(product.dtype).double()


def levels_on(codebook: Codebook, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return levels and their midpoints in the dtype and on the device of `like`; both empty where codes are integers."""
    if codebook.levels is None:
        return like.new_empty(0), like.new_empty(0)
    return codebook.on(like.device, like.dtype)


def code_limits(codebook: Codebook) -> tuple[float, float]:
    """Return the least and the largest code, infinite where there is none."""
    low, high = codebook.low, codebook.high
    return -float("inf") if low is None else low, float("inf") if high is None else high


def device_of(tensor: Tensor) -> Any:
    """Return a context in which kernels start on the device of a tensor."""
    return torch.accelerator.device_index(tensor.device.index)


@triton.jit
def nearest_whole(x):
    """Return the nearest whole numbers in floating point, ties to even."""
    below = tl.floor(x)
    rest = x - below  # exact
    odd = below - 2.0 * tl.floor(below * 0.5) != 0.0
    return tl.where((rest > 0.5) | ((rest == 0.5) & odd), below + 1.0, below)


@triton.jit
def nearest_code(position, levels, middles, last, low, high, BITS: tl.constexpr):
    """Return the nearest codes and their positions, in the dtype of `position`."""
    if BITS == 0:  # codes are integers
        code = tl.minimum(tl.maximum(nearest_whole(position), low), high).to(position.dtype)
        return code.to(tl.int32), code
    count = tl.zeros(position.shape, tl.int32)  # of midpoints below the position, by bisection
    for bit in tl.static_range(BITS):
        further = count + (1 << (BITS - 1 - bit))
        inside = further <= last
        middle = tl.load(middles + further - 1, mask=inside, other=0.0)
        count = tl.where(inside & (middle < position), further, count)
    return count, tl.load(levels + count)


@triton.jit
def quotient(a, b):
    """Return a / b, rounded to nearest: Triton's own division of float32 is not."""
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    return a / b


@triton.jit
def _sweep(
    target, W, scale, zero, group, U, codes, E, d, loss, outside, levels, middles,
    last, out, b, target_stride, W_stride, codes_stride, E_stride, scale_stride, zero_stride, low, high, least, largest,
    BITS: tl.constexpr, moves: tl.constexpr, counts: tl.constexpr, B: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Sweep a strip of R rows through the b <= B columns of a block."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    k = tl.arange(0, B)
    here = r < out
    t = tl.load(target + k[:, None] * target_stride + r[None, :], mask=(k < b)[:, None] & here[None, :], other=0.0)
    lost = tl.load(loss + r, mask=here, other=0.0)
    clipped = tl.zeros((R,), tl.int32)
    tl.debug_barrier()  # codes may share the memory of targets, all of which are read now
    for j in range(b):
        g = tl.load(group + j)
        s = tl.load(scale + g * scale_stride + r, mask=here, other=1.0)
        z = tl.load(zero + g * zero_stride + r, mask=here, other=0.0)
        w = tl.load(W + j * W_stride + r, mask=here, other=0.0)
        tj = tl.sum(tl.where((k == j)[:, None], t, 0.0), 0)
        position = quotient(tj, s) + z
        code, nearest = nearest_code(position, levels, middles, last, low, high, BITS)
        e = w - s * (nearest - z)
        tl.store(codes + j * codes_stride + r, code, mask=here)
        tl.store(E + j * E_stride + r, e, mask=here)
        u = tl.load(U + j * b + k, mask=(k > j) & (k < b), other=0.0)  # row j of the triangle
        t = tl.fma(tl.broadcast_to(u[:, None], (B, R)), tl.broadcast_to(e[None, :], (B, R)), t)
        before = tj - w
        if moves:
            lost += tl.load(d + j) * e * (before + before + e)
        else:
            lost += tl.load(d + j) * (before + e) * (before + e)
        if counts:
            clipped += ((position < least) | (position > largest)).to(tl.int32)
    tl.store(loss + r, lost, mask=here)
    if counts:
        tl.store(outside + r, tl.load(outside + r, mask=here, other=0) + clipped, mask=here)


@triton.jit
def _search(
    weights, scale, zero, best, levels, middles, last, n, size, candidates, low, high,
    BITS: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Try all candidates on a strip of G groups."""
    i = tl.program_id(0) * G + tl.arange(0, G)
    k = tl.arange(0, K)
    here = i < n
    least = tl.full((G,), float("inf"), weights.dtype.element_ty)
    chosen = tl.zeros((G,), tl.int64)
    for c in range(candidates):
        s = tl.load(scale + i, mask=here, other=1.0)
        z = tl.load(zero + i, mask=here, other=0.0)
        error = tl.zeros((G,), weights.dtype.element_ty)
        for first in range(0, size, K):
            inside = here[:, None] & (first + k < size)[None, :]
            w = tl.load(weights + i.to(tl.int64)[:, None] * size + first + k[None, :], mask=inside, other=0.0)
            divisor = s[:, None] + tl.zeros((G, K), s.dtype)
            _, nearest = nearest_code(quotient(w, divisor) + z[:, None], levels, middles, last, low, high, BITS)
            e = tl.abs(w - divisor * (nearest - z[:, None]))
            error += tl.sum(tl.where(inside, e * e * tl.sqrt(e), 0.0), 1)
        better = error < least
        chosen = tl.where(better, c, chosen)
        least = tl.where(better, error, least)
        scale, zero = scale + n, zero + n  # c * n may exceed 2^31 in embeddings
    tl.store(best + i, chosen, mask=here)


@triton.jit
def _add(
    product, high, low, unit, peak, rows, columns, product_stride, high_stride, low_stride,
    LOW: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add R rows and C columns of a product."""
    r = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)[:, None]
    c = (tl.program_id(1) * C + tl.arange(0, C))[None, :]
    inside = (r < rows) & (c < columns)
    x = tl.load(product + r * product_stride + c, mask=inside, other=0.0)
    # without their sign, bits of floats are in the order of their magnitudes, and NaN is the largest
    tl.atomic_max(peak, tl.max(tl.abs(x).to(peak.dtype.element_ty, bitcast=True)))
    x = x.to(tl.float64) * tl.load(unit)
    whole = x.to(tl.int64)  # towards 0
    rest = ((x - whole.to(tl.float64)) * (1 << LOW)).to(tl.int64)
    high += r * high_stride + c
    low += r * low_stride + c
    tl.store(high, tl.load(high, mask=inside, other=0) + whole, mask=inside)
    tl.store(low, tl.load(low, mask=inside, other=0) + rest, mask=inside)

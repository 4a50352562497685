"""Beam search through a block of columns on a GPU, compiled by Triton; one launch a block.

`kernels_torch.py` has the same algorithm in torch. A program owns a strip of rows with all their candidates and passes
through the block in tiles of columns, so programs never wait for each other, and what a row gets does not depend on the
other rows. Targets of a tile are registers, which move when candidates are reordered. Errors of earlier tiles stay where
they are: a candidate finds its own by following its ancestors, and a product adds them to the targets of the next tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearplane.lattice.grid import Weights
from nearplane.lattice.kernels_triton import code_limits, device_of, levels_on, nearest_code, quotient

BLOCK = 256  # columns of a launch, whose errors reach later columns as one product
TILE = 16  # columns whose targets are in registers at a time; with 32 some cards have too few registers
CANDIDATES = 128  # of a program at most, where a row has no more: four warps
ROWS = 16  # of a program at most; 32 rows of 2 or 4 candidates need more registers than there are


def beam_paths(target: Tensor, weights: Weights, U: Tensor, d: Tensor, cost: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sweep one block of columns with several candidates per row. See `kernels_torch.beam_paths`; `cost` is contiguous."""
    out, beam, b = target.shape
    W, scale, zero, codebook = weights
    levels, middles = levels_on(codebook, W)
    codes, E = torch.empty(out, beam, b, dtype=torch.int32, device=W.device), W.new_empty(out, beam, b)
    before = torch.empty(triton.cdiv(b, TILE), out, beam, dtype=torch.int32, device=W.device)  # places before each tile
    ancestor = torch.empty(out, beam, dtype=torch.int64, device=W.device)
    columns = [part.contiguous() if part.stride(1) != 1 else part for part in (W, scale, zero, U)]
    strides = target.stride(0), target.stride(1), *(part.stride(0) for part in columns)
    places = triton.next_power_of_2(beam)
    rows = min(ROWS, max(1, CANDIDATES // places))
    with device_of(W):
        _beam[(triton.cdiv(out, rows),)](
            target, *columns, d, cost, codes, E, before, ancestor, levels, middles, len(middles), out, beam, b,
            *strides, *map(float, code_limits(codebook)), BITS=len(middles).bit_length(), R=rows, K=places, T=TILE,
            num_warps=min(32, max(CANDIDATES, rows * places) // 32), enable_fp_fusion=False,
        )  # fmt: skip
    return codes, E, ancestor


@triton.jit
def _position(code, levels, last, BITS: tl.constexpr):
    """Return the positions of codes, which are whole numbers in floating point."""
    if BITS == 0:
        return code
    return tl.load(levels + tl.minimum(tl.maximum(code.to(tl.int32), 0), last))


@triton.jit
def _total(code, t, s, z, length, before, levels, last, low, high, BITS: tl.constexpr):
    """Return the costs of candidates with the given codes; infinite beyond the grid."""
    residual = t - s * (_position(code, levels, last, BITS) - z)
    return tl.where((code < low) | (code > high), float("inf"), before + length * (residual * residual))


@triton.jit
def _beam(
    target, W, scale, zero, U, d, cost, codes, E, before, ancestor, levels, middles, last, out, beam, b,
    target_stride, candidate_stride, W_stride, scale_stride, zero_stride, U_stride, low, high,
    BITS: tl.constexpr, R: tl.constexpr, K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Sweep a strip of R rows, each with beam <= K candidates, through the b columns of a block."""
    kind: tl.constexpr = W.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * R
    target += row * target_stride
    W += row * W_stride
    scale += row * scale_stride
    zero += row * zero_stride
    cost += row * beam
    codes += row * beam * b
    E += row * beam * b
    before += row * beam
    ancestor += row * beam
    r, c, i = tl.arange(0, R), tl.arange(0, T), tl.arange(0, K)[None, :]
    here = row + r < out
    pair = tl.arange(0, R * K)  # rows and candidates as one axis
    pair_row, pair_here = pair // K, (row + pair // K < out) & (pair % K < beam)
    at_cost, has_cost = r[:, None] * beam + i, here[:, None] & (i < beam)
    costs = tl.load(cost + at_cost, mask=has_cost, other=float("inf"))
    for first in range(0, b, T):
        column = first + c
        inside = column < b
        # targets: of the ancestor at the start of the block, and the errors on the way from there
        place = pair % K
        fed = tl.zeros((T, R * K), kind)
        for back in range(first // T):
            start = first - T - back * T
            e = tl.load(
                E + ((pair_row * beam + place) * b + start)[None, :] + c[:, None], mask=pair_here[None, :], other=0.0
            )
            u = tl.load(U + (start + c)[None, :] * U_stride + column[:, None], mask=inside[:, None], other=0.0)
            fed = tl.dot(u, e, fed, input_precision="tf32x3", out_dtype=kind)
            place = tl.load(before + (start // T * out + pair_row) * beam + place, mask=pair_here, other=0)
        at = target + (pair_row * target_stride + place * candidate_stride)[None, :] + column[:, None]
        fed += tl.load(at, mask=pair_here[None, :] & inside[:, None], other=0.0)
        t = tl.permute(tl.reshape(fed, (T, R, K)), (1, 0, 2))
        path = tl.broadcast_to(i, (R, K))  # where each candidate was before this tile
        for j in range(min(T, b - first)):
            s = tl.load(scale + r * scale_stride + first + j, mask=here, other=1.0)[:, None]
            z = tl.load(zero + r * zero_stride + first + j, mask=here, other=0.0)[:, None]
            w = tl.load(W + r * W_stride + first + j, mask=here, other=0.0)[:, None]
            length = tl.load(d + first + j)
            tj = tl.sum(tl.where((c == j)[None, :, None], t, 0.0), 1)  # (R, K)
            whole, position = nearest_code(
                quotient(tj, tl.broadcast_to(s, (R, K))) + z, levels, middles, last, low, high, BITS
            )
            down = whole.to(kind) if BITS > 0 else position  # the next proposal below the target, and the one above
            up = down + 1.0
            chosen, parent, next_costs = down, tl.broadcast_to(i, (R, K)), costs
            for k in range(tl.where(length > 0, beam, 0)):  # a dead input keeps all candidates
                lower = _total(down, tj, s, z, length, costs, levels, last, low, high, BITS)
                upper = _total(up, tj, s, z, length, costs, levels, last, low, high, BITS)
                upward = (upper < lower) & (k > 0)
                cheaper = tl.where(i <= k, tl.where(upward, upper, lower), float("inf"))
                least, proposer = tl.min(cheaper, 1, return_indices=True)
                taken = i == proposer[:, None]
                code = tl.sum(tl.where(taken, tl.where(upward, up, down), 0.0), 1)
                chosen = tl.where(i == k, code[:, None], chosen)
                parent = tl.where(i == k, proposer[:, None], parent)
                next_costs = tl.where(i == k, least[:, None], next_costs)
                up = tl.where(taken & upward, up + 1.0, up)
                down = tl.where(taken & (upward == 0), down - 1.0, down)
            costs = next_costs
            e = w - s * (_position(chosen, levels, last, BITS) - z)
            u = tl.load(U + (first + j) * U_stride + column, mask=(c > j) & inside, other=0.0)
            t = tl.gather(t, tl.broadcast_to(parent[:, None, :], (R, T, K)), 2)
            path = tl.gather(path, parent, 1)
            t = tl.fma(tl.broadcast_to(u[None, :, None], (R, T, K)), tl.broadcast_to(e[:, None, :], (R, T, K)), t)
            t = tl.where((c == j)[None, :, None], chosen[:, None, :], t)  # targets that are used make room for codes
        at, used = r[:, None, None], here[:, None, None] & inside[None, :, None]
        s = tl.load(scale + at * scale_stride + column[None, :, None], mask=used, other=1.0)
        z = tl.load(zero + at * zero_stride + column[None, :, None], mask=used, other=0.0)
        w = tl.load(W + at * W_stride + column[None, :, None], mask=used, other=0.0)
        at, used = (at * beam + i[None, :, :]) * b + column[None, :, None], used & (i < beam)[None, :, :]
        tl.store(codes + at, t.to(tl.int32), mask=used)
        tl.store(E + at, w - s * (_position(t, levels, last, BITS) - z), mask=used)
        tl.store(before + first // T * out * beam + at_cost, path, mask=has_cost)
        tl.debug_barrier()  # other threads read this
    tl.store(cost + at_cost, costs, mask=has_cost)
    # codes and errors of every tile move to the place where their candidate ends
    place = pair % K
    for back in range((b + T - 1) // T):
        start = ((b - 1) // T - back) * T
        used = pair_here[None, :] & (start + c < b)[:, None]
        at = ((pair_row * beam + place) * b + start)[None, :] + c[:, None]
        code, e = tl.load(codes + at, mask=used), tl.load(E + at, mask=used)
        place = tl.load(before + (start // T * out + pair_row) * beam + place, mask=pair_here, other=0)
        tl.debug_barrier()
        at = ((pair_row * beam + pair % K) * b + start)[None, :] + c[:, None]
        tl.store(codes + at, code, mask=used)
        tl.store(E + at, e, mask=used)
    tl.store(ancestor + pair_row * beam + pair % K, place.to(tl.int64), mask=pair_here)

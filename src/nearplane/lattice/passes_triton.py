"""Whole passes over a matrix on a GPU, compiled by Triton: nearest plane, and coordinate descent with the fit of steps.

A pass is one launch. A program owns a strip of rows and goes through all columns in tiles, so programs never wait for
each other, and what a row gets does not depend on the other rows. The error of earlier columns enters a tile by matrix
products of the program's own strip. What a program reads again after writing it is behind a barrier.

The loops over blocks of columns in `solvers.py` and `polish.py` do the same with one launch a block, on every device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearplane.lattice.kernels_torch import Columns, Rounding, Spans, State, Tally
from nearplane.lattice.kernels_triton import code_limits, device_of, levels_on, nearest_code, quotient

ROWS, MOST_ROWS = 16, 64  # of a program
PROGRAMS = 264  # as many run at a time on a card with 132 multiprocessors
BLOCK = 128  # columns of a product with the errors of all earlier columns, or of all columns
TILE = 32  # columns whose targets are in registers at a time
INNER = 32  # columns whose errors one product takes
STAGES = 3  # products whose operands are loaded at the same time
WARPS = 4  # of a program


def solve_pass(columns: Columns, U: Tensor, tally: Tally) -> tuple[Tensor, Tensor]:
    """Round all columns by nearest plane, errors fed forward.

    Args:
        columns: Weights (in, out) in rounding order, overwritten by the codes, and their grid.
        U: (in, in) unit upper triangle of the factor, in the dtype of the weights.
        tally: Sums over the columns, updated; `moves` is False.

    Returns:
        (in, out) codes int32, and (in, out) errors.
    """
    W, scale, zero, group, codebook = columns
    n, out = W.shape
    codes, E = W.view(torch.int32)[:, :out], torch.empty_like(W)
    if W.dtype != torch.float32:  # the codes of one strip may lie where the weights of another are still to be read
        W = W.clone()
    levels, middles = levels_on(codebook, W)
    sums = torch.empty(BLOCK, out, dtype=W.dtype, device=W.device)
    strides = W.stride(0), codes.stride(0), E.stride(0), scale.stride(0), zero.stride(0), U.stride(0), U.stride(1)
    sizes = _sizes(out)
    with device_of(W):
        _solve[(triton.cdiv(out, sizes["R"]),)](
            W, scale, zero, group, U, codes, E, sums, tally.d.to(W.dtype), tally.loss, tally.outside,
            levels, middles, len(middles), out, n, *strides, *code_limits(codebook), *codebook.limits,
            BITS=len(middles).bit_length(), T=TILE, **sizes,
            OFFSET=_offset_type(W, U), num_warps=WARPS, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, E


def descend_pass(state: State, W: Tensor, spans: Spans, rounding: Rounding | None, *, begins: bool) -> None:
    """Descend once over all columns: fit the steps of a span if a rounding is given, then move its codes.

    Args:
        state: State of the descent, updated.
        W: (out, in) weights, of any strides.
        spans: Column ranges.
        rounding: Rounding of fitted steps; None: steps stay.
        begins: Whether E is yet to be written.
    """
    scale, zero, codes, E, H = state.scale, state.zero, state.codes, state.E, state.H.contiguous()
    out, n = W.shape
    levels, middles = levels_on(state.codebook, W)
    sums, before = torch.empty(2, spans.longest, out, dtype=W.dtype, device=W.device)
    strides = *W.stride(), H.stride(0), codes.stride(0), E.stride(0), scale.stride(0), zero.stride(0)
    mantissa, *numbers = rounding or (-1, 1.0, 1.0, 1.0)
    sizes = _sizes(out, tries=mantissa == 0)
    with device_of(W):
        _descend[(triton.cdiv(out, sizes["R"]),)](
            W, scale, zero, state.group, H, state.diagonal, spans.starts, spans.firsts, codes, E, sums, before,
            state.gained, state.fitted, state.moved.view(torch.int8), levels, middles, len(middles), out, n,
            len(spans.firsts) - 1, *strides, *code_limits(state.codebook), *numbers,
            BITS=len(middles).bit_length(), MANTISSA=mantissa, fits=rounding is not None, begins=begins,
            T=TILE, **sizes, OFFSET=_offset_type(W, H),
            num_warps=WARPS, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip


def _sizes(out: int, tries: bool = False) -> dict[str, int]:
    """Return the sizes of a program and its products, for a number of rows.

    More rows a program take longer a column, but fewer programs follow each other. Products are smaller where registers
    are scarce: for more rows, and where rows are not aligned. If it tries steps, registers suffice for the fewest rows.
    """
    rows = ROWS if tries else min(MOST_ROWS, max(ROWS, triton.next_power_of_2(triton.cdiv(out, PROGRAMS))))
    aligned = out % 16 == 0
    block = BLOCK if aligned and rows == ROWS else BLOCK // 2
    return {"R": rows, "B": block, "K": INNER if aligned else 16, "STAGES": STAGES if aligned else 2}


def _offset_type(*tensors: Tensor) -> tl.dtype:
    """Return the type of offsets in tensors, and in others of at most their sizes: 32 bits take fewer registers."""
    return tl.int32 if all(tensor.numel() < 1 << 30 for tensor in tensors) else tl.int64


@triton.jit
def _product(a, b, sums):
    """Return sums + a b, with as many digits as float32 (or float64) products have."""
    if a.dtype == tl.float32:
        return tl.dot(a, b, sums, input_precision="tf32x3")
    return tl.dot(a, b, sums, input_precision="ieee", out_dtype=a.dtype)


@triton.jit
def _position(code, levels, like, BITS: tl.constexpr):
    """Return the positions of codes, in steps, in the dtype of `like`."""
    if BITS == 0:
        return code.to(like.dtype)
    return tl.load(levels + code)


@triton.jit
def _steps(
    codes, scale, zero, group, levels, j, inside, r, here, codes_stride, scale_stride, zero_stride,
    BITS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Return scales, and positions minus zeros, of the codes of columns `j` in the rows `r`."""
    g = tl.load(group + j, mask=inside, other=0).to(OFFSET)
    tile = inside[:, None] & here[None, :]
    s = tl.load(scale + g[:, None] * scale_stride + r[None, :], mask=tile, other=1.0)
    z = tl.load(zero + g[:, None] * zero_stride + r[None, :], mask=tile, other=0.0)
    code = tl.load(codes + j[:, None] * codes_stride + r[None, :], mask=tile, other=0)
    return s, _position(code, levels, s, BITS) - z


@triton.jit
def _passed_on(
    sums, M, E, columns, limit, start, end, r, here, M_stride, M_column_stride, E_stride,
    K: tl.constexpr, STAGES: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Add to sums of some columns (below `limit`) the products of M with E of the columns from `start` to `end`."""
    for other in tl.range(start, end, K, num_stages=STAGES):
        k = (other + tl.arange(0, K)).to(OFFSET)
        m = tl.load(
            M + columns.to(OFFSET)[:, None] * M_stride + k[None, :] * M_column_stride,
            mask=(columns < limit)[:, None] & (k < end)[None, :],
            other=0.0,
        )
        e = tl.load(E + k[:, None] * E_stride + r[None, :], mask=(k < end)[:, None] & here[None, :], other=0.0)
        sums = _product(m, e, sums)
    return sums


@triton.jit
def _row(
    W, scale, zero, group, U, j, n, columns, r, here, W_stride, scale_stride, zero_stride, U_stride, U_column_stride,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """Return scales, zeros and weights of column j, and its row of U; they are read while another column is rounded."""
    j = tl.minimum(j, n - 1).to(OFFSET)
    g = tl.load(group + j)
    s = tl.load(scale + g * scale_stride + r, mask=here, other=1.0)
    z = tl.load(zero + g * zero_stride + r, mask=here, other=0.0)
    w = tl.load(W + j * W_stride + r, mask=here, other=0.0)
    return s, z, w, tl.load(U + j * U_stride + columns * U_column_stride, mask=columns < n, other=0.0)


@triton.jit
def _solve(
    W, scale, zero, group, U, codes, E, sums, d, loss, outside, levels, middles,
    last, out, n, W_stride, codes_stride, E_stride, scale_stride, zero_stride, U_stride, U_column_stride,
    low, high, least, largest,
    BITS: tl.constexpr, B: tl.constexpr, T: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    STAGES: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Sweep a strip of R rows through all n columns."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.arange(0, T)
    origin = tl.full((), 0, OFFSET)
    here = r < out
    lost = tl.zeros((R,), W.dtype.element_ty)
    clipped = tl.zeros((R,), tl.int32)
    for start in range(0, n, B):
        end = tl.minimum(start + B, n)
        block = start + tl.arange(0, B)
        those = (block < n)[:, None] & here[None, :]
        places = tl.arange(0, B)[:, None] * out + r[None, :]
        targets = tl.load(W + block.to(OFFSET)[:, None] * W_stride + r[None, :], mask=those, other=0.0)
        targets = _passed_on(
            targets, U, E, block, n, 0, start, r, here, U_column_stride, U_stride, E_stride, K, STAGES, OFFSET
        )
        tl.store(sums + places, targets, mask=those)
        tl.debug_barrier()
        for first in range(start, end, T):
            inside = first + c < n
            columns = (first + c).to(OFFSET)
            place = (first - start + c)[:, None] * out + r[None, :]
            t = tl.load(sums + place, mask=inside[:, None] & here[None, :], other=0.0)
            t = _passed_on(
                t, U, E, columns, n, start, first, r, here, U_column_stride, U_stride, E_stride, K, 1, OFFSET
            )
            lost_here = tl.zeros((R,), W.dtype.element_ty)
            s, z, w, u = _row(W, scale, zero, group, U, first, n, columns, r, here, W_stride, scale_stride, zero_stride,
                              U_stride, U_column_stride, OFFSET)  # fmt: skip
            for i in range(tl.minimum(T, n - first)):
                j = origin + first + i
                next_s, next_z, next_w, next_u = _row(
                    W, scale, zero, group, U, first + i + 1, n, columns, r, here, W_stride, scale_stride, zero_stride,
                    U_stride, U_column_stride, OFFSET,
                )  # fmt: skip
                length = tl.load(d + j)
                tj = tl.sum(tl.where((c == i)[:, None], t, 0.0), 0)
                position = quotient(tj, s) + z
                code, nearest = nearest_code(position, levels, middles, last, low, high, BITS)
                e = w - s * (nearest - z)
                tl.debug_barrier()  # codes may share the memory of weights, which all have read
                tl.store(codes + j * codes_stride + r, code, mask=here)
                tl.store(E + j * E_stride + r, e, mask=here)
                later = tl.where(c > i, u, 0.0)
                t = tl.fma(tl.broadcast_to(later[:, None], (T, R)), tl.broadcast_to(e[None, :], (T, R)), t)
                miss = tj - w + e
                lost_here += length * miss * miss
                clipped += ((position < least) | (position > largest)).to(tl.int32)
                s, z, w, u = next_s, next_z, next_w, next_u
            lost += lost_here
            tl.debug_barrier()  # later tiles read E
    tl.store(loss + r, tl.load(loss + r, mask=here, other=0.0) + lost, mask=here)
    tl.store(outside + r, tl.load(outside + r, mask=here, other=0) + clipped, mask=here)


@triton.jit
def _rounded(x, least, MANTISSA: tl.constexpr):
    """Round positive numbers to floats with this many bits behind the point, multiples of `least`; ties to even."""
    if MANTISSA == 52:
        return x
    y = x.to(tl.float32)
    if MANTISSA < 23:
        dropped: tl.constexpr = 23 - MANTISSA
        bits = y.to(tl.int32, bitcast=True)
        bits += (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)
        normal = ((bits >> dropped) << dropped).to(tl.float32, bitcast=True)
        magic = least * 12582912.0  # 1.5 2^23: the sum has a last digit of `least`
        y = tl.where(y < least * (1 << MANTISSA), (y + magic) - magic, normal)
    return tl.maximum(y, least).to(x.dtype)


@triton.jit
def _fitted(old, energy, product, least, divisor, largest, MANTISSA: tl.constexpr):
    """Return the moves of steps to the stored ones of least loss, 0 where that is not known or no gain, and the gains.

    The loss changes by `move (move energy - 2 product)`.
    """
    known = energy > 0
    new = tl.where(known, old + quotient(product, tl.where(known, energy, 1.0)), old)
    valid = (new > quotient(old, tl.zeros_like(old) + 3.0)) & (new < tl.minimum(old * 3.0, largest))
    stored = _rounded(tl.where(valid, new, old) * divisor, least, MANTISSA)
    if MANTISSA < 23:  # float32, too, holds such numbers
        stored = tl.div_rn(stored.to(tl.float32), divisor).to(old.dtype)
    move = stored - old
    change = move * (move * energy - 2.0 * product)
    moves = valid & (change < 0) & (move != 0)
    return tl.where(moves, move, 0.0), tl.where(moves, change, 0.0)


@triton.jit
def _updated(
    sums, H, E, before, columns, inside, start, end, r, here, out, H_stride, E_stride, K: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    """Return (E H)^T of some columns: the sums of when the span began, and what changed in E from `start` to `end` since."""
    EH = tl.load(sums + (columns - start)[:, None] * out + r[None, :], mask=inside[:, None] & here[None, :], other=0.0)
    for other in range(start, end, K):
        k = (other + tl.arange(0, K)).to(OFFSET)
        mask = (k < end)[:, None] & here[None, :]
        h = tl.load(H + columns[:, None] * H_stride + k[None, :], mask=inside[:, None] & (k < end)[None, :], other=0.0)
        now = tl.load(E + k[:, None] * E_stride + r[None, :], mask=mask, other=0.0)
        then = tl.load(before + (k - start)[:, None] * out + r[None, :], mask=mask, other=0.0)
        EH = _product(h, now - then, EH)
    return EH


@triton.jit
def _code(
    H, diagonal, scale, zero, group, codes, levels, j, columns, end, r, here,
    H_stride, codes_stride, scale_stride, zero_stride, BITS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Return scales, zeros and values of column j, and its row and diagonal of H; see `_row`."""
    j = tl.minimum(j, end - 1).to(OFFSET)
    g = tl.load(group + j)
    s = tl.load(scale + g * scale_stride + r, mask=here, other=1.0)
    z = tl.load(zero + g * zero_stride + r, mask=here, other=0.0)
    code = tl.load(codes + j * codes_stride + r, mask=here, other=0)
    h = tl.load(H + j * H_stride + columns, mask=columns < end, other=0.0)
    return s, z, s * (_position(code, levels, s, BITS) - z), h, tl.load(diagonal + j)


@triton.jit
def _moved(
    misses, squares, H, diagonal, scale, zero, group, codes, levels, middles, last, first, end, r, here, kept, step,
    H_stride, codes_stride, scale_stride, zero_stride, low, high,
    BITS: tl.constexpr, tries: tl.constexpr, T: tl.constexpr, R: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Move the codes of a tile of columns; return changes of the loss, and which rows moved.

    Codes of the rows in `kept` are written. If it `tries`, all columns get another step, and the zero is 0.
    """
    c = tl.arange(0, T)
    origin = tl.full((), 0, OFFSET)
    columns = (first + c).to(OFFSET)
    won = tl.zeros((R,), misses.dtype)
    moves = tl.zeros((R,), tl.int32)
    s, z, value, h, d = _code(H, diagonal, scale, zero, group, codes, levels, first, columns, end, r, here,
                              H_stride, codes_stride, scale_stride, zero_stride, BITS, OFFSET)  # fmt: skip
    for i in range(tl.minimum(T, end - first)):
        j = origin + first + i
        next_s, next_z, next_value, next_h, next_d = _code(
            H, diagonal, scale, zero, group, codes, levels, first + i + 1, columns, end, r, here,
            H_stride, codes_stride, scale_stride, zero_stride, BITS, OFFSET,
        )  # fmt: skip
        if tries:
            s = step
        miss = tl.sum(tl.where((c == i)[:, None], misses, 0.0), 0)
        code, nearest = nearest_code(quotient(value + miss, s) + z, levels, middles, last, low, high, BITS)
        e = value - s * (nearest - z)
        tl.debug_barrier()  # all have read the old code
        tl.store(codes + j * codes_stride + r, code, mask=kept)
        u = quotient(tl.where(c > i, h, 0.0), squares)
        misses = tl.fma(tl.broadcast_to(u[:, None], (T, R)), tl.broadcast_to(e[None, :], (T, R)), misses)
        won += tl.where(d == float("inf"), 0.0, d) * e * (miss + miss + e)
        moves = moves | (e != 0).to(tl.int32)
        s, z, value, h, d = next_s, next_z, next_value, next_h, next_d
    return won, moves


@triton.jit
def _descend(
    W, scale, zero, group, H, diagonal, starts, spans, codes, E, sums, before, gained, fitted, moved, levels, middles,
    last, out, n, count, W_stride, W_column_stride, H_stride, codes_stride, E_stride, scale_stride, zero_stride,
    low, high, least, divisor, largest,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, fits: tl.constexpr, begins: tl.constexpr,
    B: tl.constexpr, T: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    STAGES: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Take a strip of R rows through all spans of columns.

    `sums` holds (E H)^T of a span's columns as they were when it began, `before` their E.
    """
    r = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.arange(0, T)
    here = r < out
    if begins:
        _errors(W, scale, zero, group, codes, E, levels, 0, n, out, W_stride, W_column_stride, codes_stride, E_stride,
                scale_stride, zero_stride, BITS, T, R, OFFSET)  # fmt: skip
        tl.debug_barrier()
    for span in range(count):
        won = tl.zeros((R,), W.dtype.element_ty)
        won_by_steps = tl.zeros((R,), W.dtype.element_ty)
        changed = tl.zeros((R,), tl.int32)
        first_group = tl.load(spans + span)
        end_group = tl.load(spans + span + 1)
        start = tl.load(starts + first_group)
        end = tl.load(starts + end_group)
        for first in range(start, end, B):
            block = (first + tl.arange(0, B)).to(OFFSET)
            those = (block < end)[:, None] & here[None, :]
            sum = tl.zeros((B, R), W.dtype.element_ty)
            sum = _passed_on(sum, H, E, block, end, 0, n, r, here, H_stride, 1, E_stride, K, STAGES, OFFSET)
            place = (block - start)[:, None] * out + r[None, :]
            tl.store(sums + place, sum, mask=those)
            tl.store(before + place, tl.load(E + block[:, None] * E_stride + r[None, :], mask=those), mask=those)
        tl.debug_barrier()
        if fits:
            for each in range(first_group, end_group):
                a = tl.load(starts + each)
                b = tl.load(starts + each + 1)
                step = scale + tl.load(group + a) * scale_stride + r
                old = tl.load(step, mask=here, other=1.0)
                if MANTISSA == 0:
                    columns = (a + c).to(OFFSET)
                    inside = columns < b
                    EH = _updated(
                        sums, H, E, before, columns, inside, start, a, r, here, out, H_stride, E_stride, K, OFFSET
                    )
                    squares = tl.load(diagonal + columns, mask=inside, other=1.0)
                    misses = quotient(EH, tl.broadcast_to(squares[:, None], (T, R)))
                    chosen = old
                    change = tl.zeros((R,), W.dtype.element_ty)
                    for trial in range(4):  # once, half and twice the step; then the best one again, to keep its codes
                        final = tl.full((R,), 0, tl.int32) + trial == 3
                        tried = tl.minimum(tl.maximum(old * (1.0 - 1.5 * trial + trial * trial), least), largest)
                        tried = tl.where(final, chosen, tried)
                        found, _ = _moved(
                            misses, squares, H, diagonal, scale, zero, group, codes, levels, middles, last, a, b, r, here,
                            here & final & (change < 0), tried, H_stride, codes_stride, scale_stride, zero_stride,
                            low, high, BITS, True, T, R, OFFSET,
                        )  # fmt: skip
                        better = (found < change) & (final == 0)
                        chosen = tl.where(better, tried, chosen)
                        change = tl.where(better, found, change)
                    new = chosen
                    changed = changed | (change < 0).to(tl.int32)
                else:
                    energy = tl.zeros((R,), W.dtype.element_ty)
                    product = tl.zeros((R,), W.dtype.element_ty)
                    for first in range(a, b, T):
                        inside = first + c < b
                        columns = (first + c).to(OFFSET)
                        EH = _updated(
                            sums, H, E, before, columns, inside, start, a, r, here, out, H_stride, E_stride, K, OFFSET
                        )
                        vH = tl.zeros((T, R), W.dtype.element_ty)
                        for other in range(a, b, K):
                            k = (other + tl.arange(0, K)).to(OFFSET)
                            h = tl.load(
                                H + columns[:, None] * H_stride + k[None, :],
                                mask=inside[:, None] & (k < b)[None, :],
                                other=0.0,
                            )
                            _, others = _steps(codes, scale, zero, group, levels, k, k < b, r, here,
                                               codes_stride, scale_stride, zero_stride, BITS, OFFSET)  # fmt: skip
                            vH = _product(h, tl.where((k < b)[:, None], others, 0.0), vH)
                        _, v = _steps(codes, scale, zero, group, levels, columns, inside, r, here,
                                      codes_stride, scale_stride, zero_stride, BITS, OFFSET)  # fmt: skip
                        v = tl.where(inside[:, None], v, 0.0)
                        energy += tl.sum(v * vH, 0)
                        product += tl.sum(v * EH, 0)
                    move, change = _fitted(old, energy, product, least, divisor, largest, MANTISSA)
                    new = old + move
                    changed = changed | (move != 0).to(tl.int32)
                tl.debug_barrier()  # all have read the old step
                tl.store(step, new, mask=here)
                won_by_steps += change
                tl.debug_barrier()
                _errors(W, scale, zero, group, codes, E, levels, a, b, out, W_stride, W_column_stride, codes_stride,
                        E_stride, scale_stride, zero_stride, BITS, T, R, OFFSET)  # fmt: skip
                tl.debug_barrier()
        for first in range(start, end, T):
            inside = first + c < end
            columns = (first + c).to(OFFSET)
            known = end if fits else first
            EH = _updated(
                sums, H, E, before, columns, inside, start, known, r, here, out, H_stride, E_stride, K, OFFSET
            )
            squares = tl.load(diagonal + columns, mask=inside, other=1.0)
            misses = quotient(EH, tl.broadcast_to(squares[:, None], (T, R)))  # targets minus values
            won_here, moves = _moved(
                misses, squares, H, diagonal, scale, zero, group, codes, levels, middles, last, first, end, r, here, here,
                won, H_stride, codes_stride, scale_stride, zero_stride, low, high, BITS, False, T, R, OFFSET,
            )  # fmt: skip
            changed = changed | moves
            won += won_here
            tl.debug_barrier()
            _errors(W, scale, zero, group, codes, E, levels, first, tl.minimum(first + T, end), out, W_stride,
                    W_column_stride, codes_stride, E_stride, scale_stride, zero_stride, BITS, T, R, OFFSET)  # fmt: skip
            tl.debug_barrier()
        tl.store(gained + r, tl.load(gained + r, mask=here, other=0.0) + won, mask=here)
        tl.store(fitted + r, tl.load(fitted + r, mask=here, other=0.0) + won_by_steps, mask=here)
        tl.store(moved, 1, mask=tl.max(tl.where(here, changed, 0), 0) > 0)


@triton.jit
def _errors(
    W, scale, zero, group, codes, E, levels, start, end, out, W_stride, W_column_stride, codes_stride, E_stride,
    scale_stride, zero_stride, BITS: tl.constexpr, T: tl.constexpr, R: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Set E of some columns to the weights minus the values of the codes."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    here = r < out
    for first in range(start, end, T):
        columns = (first + tl.arange(0, T)).to(OFFSET)
        inside = columns < end
        tile = inside[:, None] & here[None, :]
        w = tl.load(W + r.to(OFFSET)[None, :] * W_stride + columns[:, None] * W_column_stride, mask=tile, other=0.0)
        s, v = _steps(codes, scale, zero, group, levels, columns, inside, r, here,
                      codes_stride, scale_stride, zero_stride, BITS, OFFSET)  # fmt: skip
        tl.store(E + columns[:, None] * E_stride + r[None, :], w - s * v, mask=tile)

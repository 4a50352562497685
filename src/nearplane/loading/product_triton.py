"""Products with packed codes on a GPU, and their values, compiled by Triton; `packed_linear.py` has the same for the CPU.

A program of the product owns some rows of the matrix and one row of x. It unpacks codes in registers, so that memory is
read at half a byte or a byte for each weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearplane.coding.decode_triton import code_of
from nearplane.coding.packed_matrix import PackedCodes

# With more rows of x, codes are decoded before a product of cuBLAS. A product of the packed codes takes about five
# instructions for each weight and row of x. Decoding writes and reads two bytes more for each weight: on cards with 10 to
# 20 instructions for each byte of their memory traffic (H100: 33e12 a second and 3.4e12), that is 40 to 80 instructions.
MAX_PRODUCT_ROWS = 8
MAX_STRIP_WEIGHTS = 2**24  # that are decoded at a time before such a product
# of a tile of the product: with twice the rows, too few programs share a processor
PRODUCT_ROWS, PRODUCT_BYTES = 8, 128
VALUE_ROWS, VALUE_COLUMNS = 8, 128  # of a tile of values
SCALED = 1024  # numbers of x that a program scales


def product(x: Tensor, packed: PackedCodes, bias: Tensor | None) -> Tensor:
    """Return x @ values.T + bias, (tokens, out) in the dtype of x, with sums in float32.

    Args:
        x: (tokens, in), at least one and at most `MAX_PRODUCT_ROWS`.
        bias: (out,) of any dtype, or None.
    """
    (tokens, width), out = x.shape, len(packed.row_place)
    x, y = x.contiguous(), x.new_empty(tokens, out)
    scaled = torch.empty(tokens, width, dtype=torch.float32, device=x.device)
    with torch.accelerator.device_index(x.device.index):
        _scale[(triton.cdiv(width, SCALED), tokens)](
            x, packed.column_order, packed.column_scale, scaled, width, B=SCALED, num_warps=4, enable_fp_fusion=False
        )
        _product[(tokens, triton.cdiv(out, PRODUCT_ROWS))](
            scaled, packed.codes, packed.groups, len(packed.groups), packed.row_place, packed.row_scale,
            packed.patch_start, packed.patch_at, packed.patch_delta, packed.row_scale if bias is None else bias, y, out, width,
            biased=bias is not None, R=PRODUCT_ROWS, K=PRODUCT_BYTES, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return y


def values(packed: PackedCodes, a: int, b: int, dtype: torch.dtype) -> Tensor:
    """Return rows a ... b - 1 of the matrix, (b - a, in): computed in float32, then rounded to a dtype."""
    made = torch.empty(b - a, len(packed.column_order), dtype=dtype, device=packed.codes.device)
    with torch.accelerator.device_index(made.device.index):
        _values[(triton.cdiv(b - a, VALUE_ROWS),)](
            packed.codes, packed.row_place[a:b], packed.row_scale, packed.columns, packed.column_scale,
            packed.patch_start, packed.patch_at, packed.patch_delta, packed.column_order, made, b - a, made.shape[1],
            R=VALUE_ROWS, C=VALUE_COLUMNS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return made


@triton.jit
def _scale(x, order, scale, scaled, width, B: tl.constexpr):
    """Bring some inputs of a row of x to their positions, times the scale of the column."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    row = tl.program_id(1).to(tl.int64) * width
    here = at < width
    column = tl.load(order + at, mask=here, other=0)
    value = tl.load(x + row + column, mask=here, other=0.0).to(tl.float32)
    tl.store(scaled + row + at, value * tl.load(scale + at, mask=here, other=0.0), mask=here)


@triton.jit
def _product(
    x, codes, groups, count, places, row_scale, patch_start, patch_at, patch_delta, bias, y, out, width,
    biased: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Multiply R rows of the matrix by one scaled row of x."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * R + tl.arange(0, R)
    here = row < out
    place = tl.load(places + row, mask=here, other=0).to(tl.int64)
    x += token * width
    products = tl.zeros((R, K), tl.float32)
    for g in range(count):
        start, stop = tl.load(groups + 5 * g), tl.load(groups + 5 * g + 1)
        nibbles, first, row_bytes = (
            tl.load(groups + 5 * g + 2),
            tl.load(groups + 5 * g + 3),
            tl.load(groups + 5 * g + 4),
        )
        line = codes + first + place[:, None] * row_bytes
        for begin in range(0, row_bytes, K):
            k = begin + tl.arange(0, K)
            stored = tl.load(line + k[None, :], mask=here[:, None] & (k < row_bytes)[None, :], other=0)
            if nibbles != 0:
                even = start + 2 * k
                x_even = tl.load(x + even, mask=even < stop, other=0.0)
                x_odd = tl.load(x + even + 1, mask=even + 1 < stop, other=0.0)
                products += code_of(stored, 1).to(tl.float32) * x_even[None, :]
                products += code_of(stored, 2).to(tl.float32) * x_odd[None, :]
            else:
                products += (
                    code_of(stored, 0).to(tl.float32) * tl.load(x + start + k, mask=k < row_bytes, other=0.0)[None, :]
                )
    total = tl.sum(products, 1)
    patch = tl.load(patch_start + place, mask=here, other=0)
    patches = tl.load(patch_start + place + 1, mask=here, other=0) - patch
    for n in range(tl.max(patches, 0)):
        more = n < patches
        delta = tl.load(patch_delta + patch + n, mask=more, other=0).to(tl.float32)
        total += delta * tl.load(x + tl.load(patch_at + patch + n, mask=more, other=0), mask=more, other=0.0)
    total *= tl.load(row_scale + place, mask=here, other=0.0)
    if biased:
        total += tl.load(bias + row, mask=here, other=0.0).to(tl.float32)
    tl.store(y + token * out + row, total.to(y.dtype.element_ty), mask=here)


@triton.jit
def _values(
    codes, places, row_scale, columns, column_scale, patch_start, patch_at, patch_delta, column_order, made, out, width,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write R rows of values."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    here = row < out
    place = tl.load(places + row, mask=here, other=0).to(tl.int64)
    steps = tl.load(row_scale + place, mask=here, other=0.0)
    line = made + row.to(tl.int64) * width
    for begin in range(0, width, C):
        column = begin + tl.arange(0, C)
        inside = column < width
        first = tl.load(columns + column, mask=inside, other=0)
        stride = tl.load(columns + width + column, mask=inside, other=0)
        half = tl.load(columns + 2 * width + column, mask=inside, other=0)
        step = tl.load(
            column_scale + tl.load(columns + 3 * width + column, mask=inside, other=0), mask=inside, other=0.0
        )
        tile = here[:, None] & inside[None, :]
        stored = tl.load(codes + first[None, :] + place[:, None] * stride[None, :], mask=tile, other=0)
        value = code_of(stored, half[None, :]).to(tl.float32) * steps[:, None] * step[None, :]
        tl.store(line[:, None] + column[None, :], value.to(made.dtype.element_ty), mask=tile)
    tl.debug_barrier()  # patches replace values that other threads have written
    patch = tl.load(patch_start + place, mask=here, other=0)
    patches = tl.load(patch_start + place + 1, mask=here, other=0) - patch
    for n in range(tl.max(patches, 0)):
        more = n < patches
        at = tl.load(patch_at + patch + n, mask=more, other=0)
        column = tl.load(column_order + at, mask=more, other=0)
        least = tl.where(
            tl.load(columns + 2 * width + column, mask=more, other=0) == 0, -128, -8
        )  # what escapes decode to
        code = (tl.load(patch_delta + patch + n, mask=more, other=0) + least).to(tl.float32)
        value = code * steps * tl.load(column_scale + at, mask=more, other=0.0)
        tl.store(line + column, value.to(made.dtype.element_ty), mask=more)

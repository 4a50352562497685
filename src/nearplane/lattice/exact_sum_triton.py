"""Addition of a product to the integers of an exact sum on a GPU, compiled by Triton: one pass over its numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearplane.lattice.exact_sum_torch import LOW
from nearplane.lattice.kernels_triton import _device_of

ROWS, COLUMNS = 4, 512  # of a program


def add_exactly(product: Tensor, high: Tensor, low: Tensor, unit: Tensor) -> Tensor:
    """Add a product to integers in place; the same bits as `exact_sum_torch.add_exactly`."""
    rows, columns = product.shape
    product = product if product.stride(1) == 1 else product.contiguous()
    programs = triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS)
    bits = torch.int32 if product.dtype == torch.float32 else torch.int64
    peak = torch.zeros(1, dtype=bits, device=product.device)
    with _device_of(product):
        _add[programs](
            product, high, low, unit, peak, rows, columns, product.stride(0), high.stride(0), low.stride(0),
            LOW=LOW, R=ROWS, C=COLUMNS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return peak.view(product.dtype).double()


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

"""Addition of a product to the integers of an exact sum on the CPU, compiled by Numba: one pass over its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nearplane.compiled import compiled
from nearplane.lattice.exact_sum_torch import LOW
from nearplane.lattice.kernels_cpu import Indices, in_threads

MIN_ADDED = 1 << 16  # numbers per thread: fewer are not worth a thread
LOW_UNITS = 2.0**LOW
# The last bits of float64(n + SHIFT) are those of the integer n, if |n| < 2^51. Processors convert no vectors otherwise.
SHIFT, SHIFT_BITS, SHIFTED = 1.5 * 2.0**52, 0x4338 << 48, 2.0**51


def add_exactly(product: Tensor, high: Tensor, low: Tensor, unit: Tensor) -> Tensor:
    """Add a product to integers in place; the same bits as `exact_sum_torch.add_exactly`."""
    rows, columns = product.shape
    values, scale = product.contiguous().numpy(), float(unit)
    integer = np.int32 if values.dtype == np.float32 else np.int64
    bits, peaks = values.view(integer), np.empty(rows, integer)
    with np.errstate(over="ignore"):  # then all that is finite can be shifted
        limit = np.array([SHIFTED / scale]).astype(values.dtype).view(integer)[0]
    flat, strides = (_flat(high), _flat(low)), (high.stride(0), low.stride(0))

    def run(start: int, stop: int) -> None:
        _add_rows(start, stop, values, bits, *flat, *strides, scale, limit, peaks)

    in_threads(run, rows, run=-(-MIN_ADDED // columns))
    return torch.from_numpy(peaks.max(keepdims=True).view(values.dtype)).double()


def _flat(x: Tensor) -> Indices:
    """Return the memory between the first and the last number of a matrix, whose rows lie in order."""
    rows, columns = x.shape
    flat: Indices = x.as_strided(((rows - 1) * x.stride(0) + columns,), (1,)).numpy()
    return flat


@compiled(error_model="numpy")
def _add_rows(
    start: int,
    stop: int,
    product: npt.NDArray[Any],
    bits: npt.NDArray[Any],
    high: Indices,
    low: Indices,
    high_stride: int,
    low_stride: int,
    unit: float,
    limit: Any,
    peaks: npt.NDArray[Any],
) -> None:
    """Add the rows from `start` to `stop`.

    Args:
        start, stop: First row, and the one after the last.
        product, bits: (rows, columns) numbers, and their bits as integers.
        high, low: Integers; rows begin `high_stride` and `low_stride` numbers apart.
        unit: Unit of the sum.
        limit: Bits of the first magnitude that cannot be shifted.
        peaks: (rows,) largest bits without the sign of each row, written; they are ordered as magnitudes, NaN last.
    """
    columns = product.shape[1]
    unsigned = np.iinfo(bits.dtype).max
    shifted_high, shifted_low = np.empty(columns, np.float64), np.empty(columns, np.float64)
    integers_high, integers_low = shifted_high.view(np.int64), shifted_low.view(np.int64)
    for i in range(start, stop):
        row, row_bits = product[i], bits[i]
        wholes = high[i * high_stride : i * high_stride + columns]
        rests = low[i * low_stride : i * low_stride + columns]
        peak = row_bits[0] & unsigned
        for j in range(columns):
            peak = max(peak, row_bits[j] & unsigned)
        peaks[i] = peak
        if peak < limit:
            for j in range(columns):
                x = row[j] * unit
                whole = np.trunc(x)
                shifted_high[j] = whole + SHIFT
                shifted_low[j] = np.trunc((x - whole) * LOW_UNITS) + SHIFT
            for j in range(columns):
                wholes[j] += integers_high[j] - SHIFT_BITS
                rests[j] += integers_low[j] - SHIFT_BITS
        else:
            for j in range(columns):
                x = row[j] * unit
                whole = np.trunc(x)
                wholes[j] += np.int64(whole)
                rests[j] += np.int64((x - whole) * LOW_UNITS)

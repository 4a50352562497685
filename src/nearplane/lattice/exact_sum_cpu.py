"""Addition of a product to the integers of an exact sum on the CPU, compiled by Numba: one pass over its numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nearplane.compiled import compiled
from nearplane.lattice.exact_sum_torch import LOW
from nearplane.lattice.kernels_cpu import Indices, in_threads

MIN_ADDED = 1 << 16  # numbers per thread: fewer are not worth a thread
LOW_UNITS = 2.0**LOW


class Sums(NamedTuple):
    """Inputs and outputs of the compiled addition; rows of the integers begin `strides` numbers apart.

    `bits` are those of the product's numbers, as integers, and `peaks` takes the largest of every row without its sign:
    they are ordered as magnitudes are, NaN last.
    """

    product: npt.NDArray[Any]
    bits: npt.NDArray[Any]
    high: Indices
    low: Indices
    strides: tuple[int, int]
    unit: float
    peaks: npt.NDArray[Any]


def add_exactly(product: Tensor, high: Tensor, low: Tensor, unit: Tensor) -> Tensor:
    """Add a product to integers in place; the same bits as `exact_sum_torch.add_exactly`."""
    rows, columns = product.shape
    values = product.contiguous().numpy()
    bits = values.view(np.int32 if values.dtype == np.float32 else np.int64)
    peaks = np.empty(rows, bits.dtype)
    strides = high.stride(0), low.stride(0)
    sums = Sums(values, bits, _flat(high), _flat(low), strides, float(unit), peaks)
    in_threads(lambda start, stop: _add_rows(start, stop, sums), rows, run=-(-MIN_ADDED // columns))
    return torch.from_numpy(peaks.max(keepdims=True).view(values.dtype)).double()


def _flat(x: Tensor) -> Indices:
    """Return the memory between the first and the last number of a matrix, whose rows lie in order."""
    rows, columns = x.shape
    flat: Indices = x.as_strided(((rows - 1) * x.stride(0) + columns,), (1,)).numpy()
    return flat


@compiled(error_model="numpy")
def _add_rows(start: int, stop: int, sums: Sums) -> None:
    """Add the rows from `start` to `stop`."""
    product, bits, high, low, strides, unit, peaks = sums
    columns = product.shape[1]
    unsigned = np.iinfo(bits.dtype).max
    for i in range(start, stop):
        row, row_bits = product[i], bits[i]
        wholes = high[i * strides[0] : i * strides[0] + columns]
        rests = low[i * strides[1] : i * strides[1] + columns]
        peak = row_bits[0] & unsigned
        for j in range(columns):
            x = row[j] * unit
            whole = np.trunc(x)
            wholes[j] += np.int64(whole)
            rests[j] += np.int64((x - whole) * LOW_UNITS)
            peak = max(peak, row_bits[j] & unsigned)
        peaks[i] = peak

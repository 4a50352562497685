"""Addition of a product to the integers of an exact sum in torch, on every device; see `exact_sum.py`."""

from __future__ import annotations

import torch
from torch import Tensor

LOW = 42  # bits from the unit of high integers to that of low ones
AT_ONCE, GPU_AT_ONCE = 1 << 16, 1 << 22  # numbers that are handled at once: on a CPU they stay in its cache


def add_exactly(product: Tensor, high: Tensor, low: Tensor, unit: Tensor) -> Tensor:
    """Add a product to integers in place.

        high += trunc(x)    low += trunc((x - trunc(x)) 2^42)    x = product unit

    Args:
        product: (rows, columns) float32 or float64.
        high, low: (rows, columns) int64.
        unit: (1,) float64, a power of two.

    Returns:
        (1,) float64, the largest magnitude of the product; NaN if it has one. If it is above 2^62 / unit, the integers
        are without meaning.
    """
    parts = rows_at_once(product)
    # fresh memory for each part would take longer than the sums
    scaled = torch.empty_like(product[parts[0]], dtype=torch.float64)
    integers = torch.empty_like(scaled, dtype=torch.int64)
    for rows in parts:
        part = product[rows]
        x, whole = scaled[: len(part)], integers[: len(part)]
        high[rows].add_(whole.copy_(x.copy_(part).mul_(unit)))
        low[rows].add_(whole.copy_(x.frac_().mul_(1 << LOW)))
    smallest, largest = product.aminmax()
    return torch.maximum(-smallest, largest).double()[None]


def rows_at_once(x: Tensor) -> list[slice]:
    """Return the rows of a matrix in parts that are handled at once."""
    rows = max(1, (AT_ONCE if x.device.type == "cpu" else GPU_AT_ONCE) // max(1, x.shape[1]))
    return [slice(a, a + rows) for a in range(0, len(x), rows)]

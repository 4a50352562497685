"""Sums of float32 matrices that have the same bits in any order and in any grouping, as sums of integers have.

Each number is cut at two fixed powers of two into two integers, which are summed as int64: the high one counts
multiples of h / 2^24, the low one multiples of h / 2^66. Here h is a power of two near the largest squared length of an
input in the first batch, see `unit_of`; it is one number for the whole matrix. What lies below h / 2^66 is cut off.
Integer sums are associative, so that partial sums of several processes may be added by any reduction.

A batch adds an error below h / 2^66. That is less than the error of its float32 product, if both inputs have at least
2^-20 of the largest length of the first batch. Up to 2^21 batches fit, if the largest number of a batch times the
number of batches is at most 2^38 h: each of 256 batches may be 2^30 times as large as the first. Sums that might lie
beyond are found by these two (`within`), which do not depend on the order either, so that none is wrong.

Why two integers: one int64 has 63 bits, too few for that range and 2^21 batches. With a power of two per row and column
they would do, unless an input is nearly dead in the first batch and large later.

Sums in float64 are exact too unless two batches differ by more than 2^29 in an entry, but nothing would tell. A tree of
float64 sums over batches keeps a matrix per level of the tree, and its processes must be dealt subtrees.

Of a symmetric matrix the upper triangle is summed; the low integers lie in the lower one, so that it takes 8 bytes an
entry and one block more, as a sum in float64 does. Other matrices take 16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice.kernels import kernels_of, tiling_of
from nearplane.lattice.kernels_torch import LOW

HIGH = 24  # bits between h and the unit of high integers
UNKNOWN = 12  # h is 2^12 where the first batch is zero
MAX_EXPONENT = 400  # of h: float64 holds its products with the numbers above
MAX_UNITS, MAX_BATCHES = 2.0**62, 1 << 21  # of a high integer; low ones are below 2^42, so that as many fit
EXPONENT_BITS = 52  # of the mantissa of float64: the exponent follows
BIAS = 1023  # of the exponent of float64


def unit_of(rows: Tensor) -> Tensor:
    """Return (1,) float64 `2^24 / h` of rows (tokens, in) of the first batch, a power of two.

    h lies between once and four times the largest squared length of an input. All sums of a layer share it, in all
    processes of a run. No value of a device is waited for.
    """
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    largest = torch.linalg.vector_norm(rows, dim=0, dtype=dtype).amax(0, keepdim=True).double()
    exponent = (largest.view(torch.int64) >> EXPONENT_BITS) - (BIAS - 1)  # largest < 2^exponent
    known = (largest > 0) & largest.isfinite()
    exponent = torch.where(known, 2 * exponent, UNKNOWN).clamp_(-MAX_EXPONENT, MAX_EXPONENT)
    return ((HIGH - exponent + BIAS) << EXPONENT_BITS).view(torch.float64)


class ExactSum:
    """Sum of matrices over batches.

    Args:
        unit: (1,) from `unit_of`.
        shape: (rows, columns) of the matrices.
        span: Rows of a block of a symmetric matrix, of which only blocks on and above the diagonal are added; None: the
            matrix is not symmetric, and added as a whole.

    Attributes:
        batches: Number of batches.
        peak: (1,) float64, largest magnitude of a number of a batch.
    """

    def __init__(self, unit: Tensor, shape: tuple[int, int], span: int | None = None) -> None:
        rows, columns = shape
        self.unit, self.shape = unit, shape
        self.span = None if span is None else min(span, rows)
        self._padded = rows if self.span is None else -(-rows // self.span) * self.span
        self._high = unit.new_zeros(self._padded, columns, dtype=torch.int64)
        # of a symmetric matrix: the low integers of its first block, which find no place below the diagonal
        self._low = unit.new_zeros(self.span or rows, columns, dtype=torch.int64)
        self.batches, self.peak = 0, unit.new_zeros(1)

    @torch.no_grad()
    def add(self, product: Tensor, at: int = 0) -> None:
        """Add the product of a batch; of a symmetric matrix the block of rows `at` and following, from column `at` on.

        Blocks of a batch begin with that of row 0. Each number must be finite, see `within`.
        """
        peak = kernels_of(product).add_exactly(product, *self._limbs(at), self.unit)
        self.peak, self.batches = torch.maximum(self.peak, peak), self.batches + (at == 0)

    def zero(self) -> ExactSum:
        """Return an empty sum of such matrices."""
        return ExactSum(self.unit, self.shape, self.span)

    def merge(self, other: ExactSum) -> None:
        """Add the sum of other batches, in place.

        Raises:
            NumericalError: The sums differ in their unit.
        """
        if self.unit is not other.unit and not torch.equal(self.unit, other.unit):
            raise NumericalError(
                f"Exact sums with units {float(self.unit):g} and {float(other.unit):g} cannot be added. All sums of a "
                f"layer need the unit of the first batch."
            )
        for mine, others in zip(self.parts(), other.parts(), strict=True):
            mine.add_(others)
        self.peak, self.batches = torch.maximum(self.peak, other.peak), self.batches + other.batches

    def parts(self) -> list[Tensor]:
        """Return the int64 tensors that hold the sum; processes add up each, in any order."""
        return [self._high, self._low]

    def merge_all(self, total: Callable[[Tensor], object], batches: int, peak: float) -> None:
        """Add the sums of other processes in place.

        Args:
            total: Function that adds up integers of all processes in place.
            batches, peak: Number of batches of all processes, and the largest `peak`.
        """
        for part in self.parts():
            total(part)
        self.batches, self.peak = batches, torch.full_like(self.peak, peak)

    def within(self) -> tuple[Tensor, Tensor]:
        """Return (1,) whether all numbers were finite, and whether the integers are certain not to have overflowed."""
        fits = self.peak * self.unit * self.batches <= (MAX_UNITS if self.batches <= MAX_BATCHES else -1.0)
        return self.peak.isfinite(), fits

    @torch.no_grad()
    def value(self) -> Tensor:
        """Return (rows, columns) the sum in float64, in the memory of this object, which is used up.

        Of a symmetric matrix the blocks below the diagonal are zero.
        """
        values, at_once = self._high.view(torch.float64), tiling_of(self.unit.device).summed
        for at in range(0, self.shape[0], self.span or self.shape[0]):
            high, low = self._limbs(at)
            block = self._limbs(at, values)[0]
            step = max(1, at_once // max(1, high.shape[1]))
            for a in range(0, len(high), step):
                rows = slice(a, a + step)
                block[rows] = high[rows].double().add_(low[rows], alpha=2.0**-LOW).div_(self.unit)
            low.zero_()
        return values[: self.shape[0]]

    def _limbs(self, at: int, high: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return views of the high and low integers of a block."""
        high = self._high if high is None else high
        if self.span is None:
            return high, self._low
        rows, columns = min(self.span, self.shape[0] - at), self.shape[1] - at
        mirrored = self._padded - at  # as many columns are free in these rows
        low = self._low if at == 0 else self._high[mirrored:]
        return high[at : at + rows, at:], low[:rows, :columns]

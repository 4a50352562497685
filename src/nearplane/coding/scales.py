"""Scales of the rows and columns of a coded matrix: exponents of fractional powers of two, and a base."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearplane.errors import NumericalError

MAX_EXPONENT = 1 << 15  # bound on the exponents


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Logarithmic scales; `lattice.product_grid.ProductGrid` has the same as tensors, but is not imported here.

    Args:
        base: Base of the column scales, positive, a fixed point of `stored_base`.
        columns: (in,) int32 exponents in units of 1/column_resolution octave, at most 32768 in magnitude.
        column_resolution: Number of exponents per octave, a power of two, 1 ... 64.
        rows: (out,) int32 exponents; if all are zero they take no bits.
        row_resolution: Number of exponents per octave, a power of two, 1 ... 64.

    Raises:
        ValueError: A value is invalid.
    """

    base: float
    columns: NDArray[np.int32]
    column_resolution: int
    rows: NDArray[np.int32]
    row_resolution: int

    def __post_init__(self) -> None:
        for name, array in (("columns", self.columns), ("rows", self.rows)):
            if max(int(array.max()), -int(array.min())) > MAX_EXPONENT:
                raise ValueError(f"{name}: exponents reach {np.abs(array).max()}; the limit is {MAX_EXPONENT}.")
        for resolution in (self.column_resolution, self.row_resolution):
            if resolution not in (1, 2, 4, 8, 16, 32, 64):
                raise ValueError(f"The scales have {resolution} steps per octave; expected 1, 2, 4 ... 64.")
        if not (self.base > 0 and math.isfinite(self.base) and stored_base(self.base) == self.base):
            raise ValueError(f"The base {self.base} cannot be stored; use stored_base(base).")

    @property
    def column_scale(self) -> NDArray[np.float32]:
        """float32(base * 2 ** (columns / column_resolution)), rounded once: (in,)."""
        with np.errstate(over="ignore"):
            return (self.base * np.exp2(self.columns / self.column_resolution)).astype(np.float32)

    @property
    def row_scale(self) -> NDArray[np.float32]:
        """float32(2 ** (rows / row_resolution)): (out,)."""
        with np.errstate(over="ignore"):
            return np.exp2(self.rows / self.row_resolution).astype(np.float32)


def stored_base(x: float) -> float:
    """Return the base nearest to x > 0 that can be stored: float32 of 2 ** (k / 256), k = -32768 ... 32767.

    Raises:
        NumericalError: x is not a positive finite number.
    """
    if not 0 < x < math.inf:
        raise NumericalError(
            f"The step is {x}: a weight or sensitivity is NaN, Inf or negative, or the weights leave the range of their dtype."
        )
    return base_of(base_exponent(x))


def base_exponent(x: float) -> int:
    """Return the number 0 ... 65535 that is stored for the base nearest to x."""
    return min(max(round(256 * math.log2(x)) + 32768, 0), 65535)


def base_of(exponent: int) -> float:
    """Return the base for a stored number."""
    return float(np.float32(2.0 ** ((exponent - 32768) / 256)))

"""Grids of entropy-coded matrices: one step for all weights, times powers of two of rows and columns; and their exponents.

Codes are unbounded. Exponents are integers: they follow from the lengths of the planes and from the sensitivity of rows,
the one step from the rate, which `matrix/to_rate.py` searches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearplane.lattice.grid import AnyGrid, Grid
from nearplane.number_formats import NumberFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductGrid:
    """Unbounded codes times a row scale and a column scale, both fractional powers of two, stored as short integers.

        value = 2^(rows / row_resolution) * code * base * 2^(columns / column_resolution)

    Args:
        base: Step at exponent 0.
        columns: (in,) int32 column exponents, in units of `1 / column_resolution` octaves.
        column_resolution: Number of column exponents per octave, a power of two.
        rows: (out,) int32 row exponents, in units of `1 / row_resolution` octaves; 0 where rows have no scale.
        row_resolution: Number of row exponents per octave, a power of two.
    """

    base: float
    columns: Tensor
    column_resolution: int
    rows: Tensor
    row_resolution: int

    @classmethod
    def of_one_step(cls, shape: Sequence[int], device: torch.device) -> ProductGrid:
        """Return the grid of (out, in) codes with step 1 for all."""
        rows, columns = (torch.zeros(size, dtype=torch.int32, device=device) for size in shape)
        return cls(base=1.0, columns=columns, column_resolution=1, rows=rows, row_resolution=1)

    def column_scale(self) -> Tensor:
        """Return (in,) float32 `base * 2^(columns / column_resolution)`, rounded once."""
        return (self.base * torch.exp2(self.columns.double() / self.column_resolution)).float()

    def row_scale(self) -> Tensor:
        """Return (out,) float32 `2^(rows / row_resolution)`, rounded once."""
        return torch.exp2(self.rows.double() / self.row_resolution).float()

    def row_weight(self) -> Tensor:
        """Return (out,) float64 `1 / row_scale^2`: the weight of each row's errors for which its step is optimal."""
        return torch.exp2(-2 * self.rows.double() / self.row_resolution)

    def differences_from(self, format: NumberFormat, codes: Tensor) -> Iterator[str]:
        """Yield the differences of the grid from a number format; any codes are valid."""
        del codes
        if format.bits:
            yield f"it is entropy-coded; {format.name} is not"
        if not (math.isfinite(self.base) and self.base > 0):
            yield f"its step is {self.base}, not a positive number"

    def same_as(self, other: AnyGrid) -> bool:
        """Return whether another grid has the same scales of rows and columns."""
        return (
            isinstance(other, ProductGrid)
            and torch.equal(self.column_scale(), other.column_scale())
            and torch.equal(self.row_scale(), other.row_scale())
        )

    def of_rows(self, rows: Tensor | slice) -> Grid:
        """Return some rows as a float64 `Grid` with a step for every weight; steps are not rounded as in `decode`."""
        columns = self.columns.double() / self.column_resolution
        scale = torch.exp2(self.rows[rows].double() / self.row_resolution)[:, None] * (self.base * torch.exp2(columns))
        return Grid(scale=scale, zero=torch.zeros_like(scale), group=torch.arange(len(columns), device=scale.device))

    def decode(self, codes: Tensor) -> Tensor:
        """Turn (out, in) codes on any device into (out, in) float32 values."""
        rows, columns = self.row_scale().to(codes.device), self.column_scale().to(codes.device)
        return codes.to(torch.float32, copy=True).mul_(rows[:, None]).mul_(columns)

    def to(self, target: torch.device | str) -> ProductGrid:
        """Return the grid on another device."""
        return replace(self, columns=self.columns.to(target), rows=self.rows.to(target))


def high_rate_step(rms: Tensor, lengths: Tensor, rate: float) -> float:
    """Return log2 of the `c` for which steps `c / lengths_j` give about `rate` bits per weight on Gaussian weights.

        log2 c = mean_j log2(sqrt(2 pi e) sigma_j sqrt(d_j)) - rate

    Args:
        rms: (in,) root mean square `sigma_j` of every column.
        lengths: (in,) `sqrt(d_j)` in the order of the columns; ones for a single step.
        rate: Bits per weight.
    """
    spread = (rms * lengths).double().cpu()  # all at once
    alive = spread > 0
    if not bool(alive.any()):
        return 0.0
    return float(spread[alive].log2().mean()) + 0.5 * math.log2(2 * math.pi * math.e) - rate


def waterfill_exponents(lengths: Tensor, resolution: int) -> Tensor:
    """Return (in,) int32 `k_j` with `2^(k_j / resolution)` nearest to `1 / lengths_j`.

    Steps inversely proportional to the Gram-Schmidt lengths `sqrt(d_j)` give every plane the same error: reverse
    water-filling at high rate (WaterSIC, 2603.04956). See `ladder` for the cost of the resolution.
    """
    log_lengths = lengths.clamp(min=torch.finfo(lengths.dtype).tiny).log2()
    return (-log_lengths * resolution).round_().to(torch.int32)


def row_exponents(sensitivity: Tensor, columns: int, resolution: int) -> Tensor:
    """Return (out,) int32 exponents of row steps, smaller for sensitive rows; all 0 if they cost more than they gain.

    An error of row i has weight `h_i`, so steps `1 / sqrt(h_i)` would be best if errors were small and independent.
    They are neither: steps `h_i^(-1/4)` were better or as good on all models and rates measured. Compared with equal
    steps, they gain `1/2 log2(AM / GM)` of `sqrt(h)` in bits per weight and cost about `2 + log2(resolution)` bits per
    row.

    Args:
        sensitivity: (out,) `h_i`, not negative.
        columns: Number of weights of a row.
        resolution: Number of exponents per octave.
    """
    device, sensitivity = sensitivity.device, sensitivity.cpu()
    h = sensitivity.double().clamp(min=1e-12 * float(sensitivity.max()) + 1e-300).sqrt()
    gain = 0.5 * float(h.mean().log2() - h.log2().mean())
    if gain * columns < 2 + math.log2(resolution):
        return torch.zeros(len(h), dtype=torch.int32, device=device)
    logs = -h.log2() / 2
    return ((logs - logs.median()).clamp(-4, 4) * resolution).round_().to(device, torch.int32)


def ladder(count: int) -> int:
    """Return the exponents per octave, a power of two up to 32, of least total cost with `count` weights per exponent.

    Rounding the exponents costs `ln(2) / (12 resolution^2)` bits per weight; twice the resolution costs one bit per
    exponent.
    """
    return min(
        (1, 2, 4, 8, 16, 32), key=lambda resolution: math.log(2) / 12 / resolution**2 * count + math.log2(resolution)
    )

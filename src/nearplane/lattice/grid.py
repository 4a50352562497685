"""The grid that weights are rounded to, and a matrix that has been rounded to one.

A grid is data: per tensor, per row, grouped, in activation order, per column or unclipped are all the same class, and the
solver never asks which. It does not know how its steps were chosen (`scale.py`) nor how codes are stored (`formats/`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Values a weight may take: `value = scale[:, group] * (code - zero[:, group])` with `low <= code <= high`.

    Args:
        scale: (out or 1, groups) steps, positive.
        zero: (out or 1, groups) offsets in steps; 0 on symmetric grids.
        group: (in,) group of every column.
        low, high: limits of the codes, inclusive; None where codes are unbounded.
    """

    scale: Tensor
    zero: Tensor
    group: Tensor
    low: int | None = None
    high: int | None = None

    def columns(self, index: Tensor | slice | int) -> tuple[Tensor, Tensor]:
        """Return scale and zero of the columns at `index`, each (out or 1, columns)."""
        group = self.group[index]
        return self.scale[:, group], self.zero[:, group]

    def round(self, x: Tensor, index: Tensor | slice | int) -> tuple[Tensor, Tensor]:
        """Round `x`, the columns at `index`, to the grid: (codes, values), both in the dtype of `x`."""
        scale, zero = self.columns(index)
        codes = (x / scale + zero).round_()
        if self.low is not None or self.high is not None:
            codes = codes.clamp_(self.low, self.high)
        return codes, scale * (codes - zero)

    def decode(self, codes: Tensor) -> Tensor:
        """Turn (out, in) codes into (out, in) values, in the dtype of the scale."""
        scale, zero = self.columns(slice(None))
        return scale * (codes.to(scale.dtype) - zero)

    def steps(self) -> Tensor:
        """Return the step of every column, (out or 1, in)."""
        return self.scale[:, self.group]

    def clipped(self, codes: Tensor, targets: Tensor) -> Tensor:
        """Return (out, in) bool: where `targets` lie more than half a step beyond the limits of the grid."""
        scale, zero = self.columns(slice(None))
        position = targets / scale + zero
        outside = torch.zeros_like(codes, dtype=torch.bool)
        if self.low is not None:
            outside |= position < self.low - 0.5
        if self.high is not None:
            outside |= position > self.high + 0.5
        return outside

    def to(self, target: torch.dtype | torch.device | str) -> Grid:
        """Return the grid with steps and offsets in another dtype, or all of it on another device."""
        group = self.group if isinstance(target, torch.dtype) else self.group.to(target)
        return replace(self, scale=self.scale.to(target), zero=self.zero.to(target), group=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductGrid:
    """Unbounded codes times a scale of the row and a scale of the column, both on logarithmic ladders of short integers.

        value = 2^(rows / row_resolution) * code * base * 2^(columns / column_resolution)

    Args:
        base: step of exponent 0.
        columns: (in,) int32 exponents, in `1 / column_resolution` octaves.
        column_resolution: steps of the ladder in an octave, a power of two.
        rows: (out,) int32 exponents; 0 where rows have no scale of their own.
        row_resolution: likewise.
    """

    base: float
    columns: Tensor
    column_resolution: int
    rows: Tensor
    row_resolution: int

    def column_scale(self) -> Tensor:
        """Return (in,) float32 `base * 2^(columns / column_resolution)`, rounded once."""
        return (self.base * torch.exp2(self.columns.double() / self.column_resolution)).float()

    def row_scale(self) -> Tensor:
        """Return (out,) float32 `2^(rows / row_resolution)`, rounded once."""
        return torch.exp2(self.rows.double() / self.row_resolution).float()

    def row_weight(self) -> Tensor:
        """Return (out,) float64 `1 / row_scale^2`: how much an error of each row counts if steps were chosen for that."""
        return torch.exp2(-2 * self.rows.double() / self.row_resolution)

    def as_grid(self, rows: Tensor) -> Grid:
        """Return some rows as a `Grid` with a step for every weight, float64, not rounded as decoded values are."""
        columns = self.columns.double() / self.column_resolution
        scale = torch.exp2(self.rows[rows].double() / self.row_resolution)[:, None] * (self.base * torch.exp2(columns))
        return Grid(scale=scale, zero=torch.zeros_like(scale), group=torch.arange(len(columns), device=scale.device))

    def decode(self, codes: Tensor) -> Tensor:
        """Turn (out, in) codes into (out, in) float32 values."""
        return codes.to(torch.float32, copy=True).mul_(self.row_scale()[:, None]).mul_(self.column_scale())

    def to(self, device: torch.device | str) -> ProductGrid:
        """Return the grid on another device."""
        return replace(self, columns=self.columns.to(device), rows=self.rows.to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix:
    """A matrix on a grid.

    Args:
        codes: (out, in) int32, in the column order of the weight.
        grid: steps and limits; its scales are already what the format stores.
    """

    codes: Tensor
    grid: Grid | ProductGrid

    def decode(self) -> Tensor:
        """Return the (out, in) values, in the dtype of the grid's scale."""
        return self.grid.decode(self.codes)

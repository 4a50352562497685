"""Grids with steps on two levels, as GGUF stores them: short integers times a step shared by a block of groups.

    value = (d * sc) * code - dmin * m

Solvers, descents and certificates use it like any other grid: its `scale` is `d * sc`, its `zero` is
`dmin * m / (d * sc)`. `superblock_fit.py` finds the numbers, `formats/gguf/` stores them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.number_formats import BlockType, NumberFormat

MIN_HALF = 2.0**-24  # smallest positive number of 16-bit floating point


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperGrid(Grid):
    """A grid whose steps and offsets are integers times numbers shared by a block of groups; with levels, no offsets.

    Args:
        d: (out, blocks) step of every block, exact in 16-bit floating point; may be negative.
        sc: (out, groups) integers, multiples of `d`; every block has the same number of groups, in order.
        dmin: (out, blocks) offset of every block, exact in 16-bit floating point, may be negative; None: no offsets.
        m: (out, groups) integers, multiples of `dmin`.
        scale: (out, groups) `d * sc` in the dtype of `d`; computed.
        zero: (out, groups) `dmin * m / (d * sc)`, 0 where the step is 0; computed.
    """

    d: Tensor
    sc: Tensor
    dmin: Tensor | None = None
    m: Tensor | None = None
    scale: Tensor = field(init=False)
    zero: Tensor = field(init=False)

    def __post_init__(self) -> None:
        scale = _per_group(self.d, self.sc)
        offset = self.offset
        object.__setattr__(self, "scale", scale)
        zero = torch.zeros_like(scale) if offset is None else torch.where(scale == 0, 0, offset / scale)
        object.__setattr__(self, "zero", zero)

    @property
    def offset(self) -> Tensor | None:
        """Return (out, groups) `dmin * m`, the offset subtracted from every value; None if there is none."""
        return None if self.dmin is None or self.m is None else _per_group(self.dmin, self.m)

    @property
    def parts(self) -> dict[str, Tensor]:
        """Return the numbers that make up the grid, by name, rows first."""
        parts = {"d": self.d, "sc": self.sc, "dmin": self.dmin, "m": self.m}
        return {name: part for name, part in parts.items() if part is not None}

    def decode(self, codes: Tensor) -> Tensor:
        """Turn (out, in) codes into (out, in) values in the dtype of `d`; in float32 exactly those of llama.cpp.

        `d * sc * code` and `dmin * m` have at most 24 bits, so that only the subtraction rounds.
        """
        places = codes if self.levels is None else self.codebook.position(codes, self.scale.dtype)
        values = self.scale[:, self.group] * places
        offset = self.offset
        return values if offset is None else values.sub_(offset[:, self.group])

    def differences_from(self, format: NumberFormat, codes: Tensor) -> Iterator[str]:
        """Yield the differences of codes (out, in) and grid from a number format."""
        yield from Grid.differences_from(self, format, codes)
        if codes.shape[1] != format.run * self.d.shape[1]:
            yield f"its {self.d.shape[1]} blocks per row are not those of {format.name}"

    @property
    def sound(self) -> bool:
        """Whether all steps are finite numbers; they may be negative or 0."""
        return bool(torch.isfinite(self.scale).all())

    def same_as(self, other: object) -> bool:
        """Return whether another grid has the same numbers, groups and limits."""
        if not isinstance(other, SuperGrid) or (self.low, self.high) != (other.low, other.high):
            return False
        ours, theirs = self.parts, other.parts
        return (
            torch.equal(self.group, other.group.to(torch.int64))
            and ours.keys() == theirs.keys()
            and self.same_levels(other)
            and all(
                ours[name].shape == part.shape and bool((ours[name] == part).all()) for name, part in theirs.items()
            )
        )


def on_two_levels(matrix: QuantizedMatrix[Any]) -> QuantizedMatrix[SuperGrid] | None:
    """Return a matrix with every group as a separate block; None if blocks cannot hold its levels or zeros."""
    grid = matrix.grid
    if isinstance(grid, SuperGrid):
        return matrix
    if not isinstance(grid, Grid) or grid.levels is not None or bool(grid.zero.any()):
        return None
    d = grid.scale.expand(len(matrix.codes), -1)
    blocks = SuperGrid(d=d, sc=torch.ones_like(d, dtype=torch.int32), group=grid.group, low=grid.low, high=grid.high)
    return QuantizedMatrix(codes=matrix.codes, grid=blocks)


def in_blocks(matrix: QuantizedMatrix[Grid], kind: BlockType) -> QuantizedMatrix[SuperGrid]:
    """Return a matrix of equal values in blocks of a type, each with the step and the zero of the group in which it lies.

    Args:
        matrix: Codes from `kind.low` to `kind.high`, in groups of neighbours that blocks divide; zeros are whole numbers.
        kind: Type of the blocks; it has minima if the matrix has zeros.
    """
    grid, (out, columns) = matrix.grid, matrix.codes.shape
    scale, zero = (part.expand(out, -1)[:, grid.group] for part in (grid.scale, grid.zero))
    d, m = scale[:, :: kind.columns].contiguous(), zero[:, :: kind.group].to(torch.int32)
    blocks = SuperGrid(
        d=d,
        sc=torch.ones_like(m),
        dmin=d if kind.m else None,
        m=m if kind.m else None,
        group=torch.arange(columns) // kind.group,
        low=kind.low,
        high=kind.high,
    )
    return QuantizedMatrix(codes=matrix.codes, grid=blocks)


def on_one_level(matrix: QuantizedMatrix[Any]) -> QuantizedMatrix[Any]:
    """Return a matrix whose steps are on two levels with the products as steps, and any other matrix unchanged."""
    grid = matrix.grid
    if not isinstance(grid, SuperGrid):
        return matrix
    plain = Grid(scale=grid.scale, zero=grid.zero, group=grid.group, low=grid.low, high=grid.high, levels=grid.levels)
    return QuantizedMatrix(codes=matrix.codes, grid=plain)


def rounded(steps: Tensor, storage: torch.dtype) -> Tensor:
    """Round steps to `storage`, in their dtype; never to 0, and to infinity where they are too large."""
    short = steps.to(storage).to(steps.dtype)
    return torch.where(short == 0, torch.where(steps < 0, -MIN_HALF, MIN_HALF), short)


def _per_group(block_numbers: Tensor, integers: Tensor) -> Tensor:
    """Return (out, groups) block numbers (out, blocks) times integers (out, groups), in the dtype of the former."""
    return block_numbers.repeat_interleave(integers.shape[1] // block_numbers.shape[1], 1).mul_(integers)

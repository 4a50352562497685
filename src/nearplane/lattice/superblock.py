"""Grids with steps on two levels: short integers times a step that a block of groups shares, as GGUF stores them.

    value = (d * sc) * code - dmin * m

Like any other grid to solvers, descents and certificates: its `scale` is `d * sc`, its `zero` is `dmin * m / (d * sc)`. How the
numbers are found is in `superblock_search.py`, how they are stored in `formats/gguf/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.number_formats import NumberFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperGrid(Grid):
    """A grid whose steps and offsets are integers times numbers that a block of groups shares.

    Args:
        d: (out, blocks) step of every block, exact in 16-bit floating point; negative ones are steps too.
        sc: (out, groups) integers, multiples of `d`; every block has the same number of groups, in order.
        dmin: (out, blocks) offset of every block, likewise; None: there are no offsets.
        m: (out, groups) integers, multiples of `dmin`.
        scale: (out, groups) `d * sc`, of `d`'s dtype; it follows from the others, as `zero` does.
        zero: (out, groups) `dmin * m / (d * sc)`, 0 where there is no step.
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
        """Return (out, groups) `dmin * m`, what is subtracted from every value; None where nothing is."""
        return None if self.dmin is None or self.m is None else _per_group(self.dmin, self.m)

    @property
    def parts(self) -> dict[str, Tensor]:
        """Return the numbers that make up the grid, by name, rows first."""
        found = {"d": self.d, "sc": self.sc, "dmin": self.dmin, "m": self.m}
        return {name: part for name, part in found.items() if part is not None}

    def decode(self, codes: Tensor) -> Tensor:
        """Turn (out, in) codes into (out, in) values, in the dtype of `d`: in float32 exactly those that llama.cpp computes.

        `d * sc * code` and `dmin * m` have at most 24 bits, so that the subtraction alone rounds.
        """
        values = self.scale[:, self.group] * codes
        offset = self.offset
        return values if offset is None else values.sub_(offset[:, self.group])

    def unlike(self, format: NumberFormat, codes: Tensor) -> Iterator[str]:
        """Yield what codes (out, in) and grid have that a number format has not."""
        yield from Grid.unlike(self, format, codes)
        if codes.shape[1] != format.run * self.d.shape[1]:
            yield f"it has {self.d.shape[1]} blocks a row, which are not those of {format.name}"

    @property
    def sound(self) -> bool:
        """Whether steps are what they may be: numbers of either sign, and 0."""
        return bool(torch.isfinite(self.scale).all())

    def same_as(self, other: object) -> bool:
        """Return whether another grid has the same numbers, groups and limits."""
        if not isinstance(other, SuperGrid) or (self.low, self.high) != (other.low, other.high):
            return False
        ours, theirs = self.parts, other.parts
        return (
            torch.equal(self.group, other.group.to(torch.int64))
            and ours.keys() == theirs.keys()
            and all(
                ours[name].shape == part.shape and bool((ours[name] == part).all()) for name, part in theirs.items()
            )
        )


def on_two_levels(matrix: QuantizedMatrix[Any]) -> QuantizedMatrix[SuperGrid] | None:
    """Return a matrix with every group as a block of its own; None where codes or zeros are none that blocks have."""
    grid = matrix.grid
    if isinstance(grid, SuperGrid):
        return matrix
    if not isinstance(grid, Grid) or grid.levels is not None or bool(grid.zero.any()):
        return None
    d = grid.scale.expand(len(matrix.codes), -1)
    blocks = SuperGrid(d=d, sc=torch.ones_like(d, dtype=torch.int32), group=grid.group, low=grid.low, high=grid.high)
    return QuantizedMatrix(codes=matrix.codes, grid=blocks)


def _per_group(each: Tensor, integers: Tensor) -> Tensor:
    """Return (out, groups) numbers of blocks (out, blocks) times integers (out, groups), in the dtype of the first."""
    return each.repeat_interleave(integers.shape[1] // each.shape[1], 1).mul_(integers)

"""Grids of levels whose steps are multiples of one number for a block, as llama.cpp's iq4_xs stores them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from nearplane.lattice.grid import Grid
from nearplane.lattice.polish import Fit, PlainFit, State
from nearplane.lattice.scale import Steps
from nearplane.lattice.superblock import SuperGrid, rounded
from nearplane.number_formats import BlockFormat


def multiples(target: Tensor, importance: Tensor, steps: Steps) -> tuple[Grid, Callable[[Grid], Fit]]:
    """Fit one step to every group, and round the steps of a block to multiples of the largest one's share.

    See `fits.GridFit`; `importance` is ignored.
    """
    del importance
    kind, grid = steps.format, steps.grid(target)
    assert isinstance(kind, BlockFormat), "only formats of blocks name this fit"
    used = (target.reshape(*grid.scale.shape, -1) != 0).any(-1)  # a group of zeros has step 1, which no other needs
    wanted = grid.scale.masked_fill(~used, 0).unflatten(1, (-1, kind.columns // kind.group))
    d = rounded(wanted.amax(-1) / kind.sc[1], steps.stored_in)
    sc = _multiple(wanted, d[..., None], kind.sc[1]).flatten(1).to(torch.int32)
    made = SuperGrid(d=d, sc=sc, group=grid.group, low=grid.low, high=grid.high, levels=grid.levels)
    return made, lambda start: MultiplesFit(cast(SuperGrid, start), kind, steps.stored_in)


class MultiplesFit(PlainFit):
    """Fit of steps by least squares, rounded to multiples of their block's number, which stays."""

    def __init__(self, grid: SuperGrid, kind: BlockFormat, storage: torch.dtype) -> None:
        super().__init__(storage)
        self._kind, self._d = kind, grid.d.repeat_interleave(kind.columns // kind.group, 1).T  # (groups, out)

    @property
    def rounding(self) -> None:
        """None: kernels of whole passes round to floats."""

    def stored(self, steps: Tensor, group: int) -> Tensor:
        """Round the steps (out,) of a group."""
        d = self._d[group].to(steps.dtype)
        return d * _multiple(steps, d, self._kind.sc[1])

    def grid(self, state: State, start: Grid) -> Grid:
        """Return the grid `start` with the fitted steps."""
        d = self._d.to(state.scale.dtype)
        sc = _multiple(state.scale, d, self._kind.sc[1]).T.to(torch.int32).contiguous()
        return replace(cast(SuperGrid, start), sc=sc)


def _multiple(steps: Tensor, d: Tensor, largest: int) -> Tensor:
    """Return the whole numbers from 1 to `largest` of which steps are nearest to d times one."""
    return (steps / d).round_().clamp_(1, largest)

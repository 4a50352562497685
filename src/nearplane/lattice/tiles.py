"""Grids whose steps are shared by rows, too: a step for every tile of a matrix, as files of 8-bit floats in blocks store them.

Steps are searched in the range of the weights and stay: the levels of floats are as dense for any step that covers the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nearplane.lattice.grid import Grid
from nearplane.lattice.polish import Fit
from nearplane.lattice.scale import Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class TileGrid(Grid):
    """A grid whose steps (out, groups) are equal in neighbouring rows."""

    fit: ClassVar[str] = "tiles"


def tiles(target: Tensor, importance: Tensor, steps: Steps) -> tuple[Grid, Callable[[Grid], Fit | None]]:
    """Fit one step to every tile of rows and columns; `importance` is ignored. See `fits.GridFit`."""
    del importance
    (out, columns), rows, size = target.shape, steps.format.rows, steps.format.group
    assert size is not None, "only formats with groups name this fit"
    weights = target.reshape(out // rows, rows, columns // size, size).transpose(1, 2).flatten(2)
    scale, zero = (part.repeat_interleave(rows, 0) for part in steps.fit(weights))
    return TileGrid(scale=scale, zero=zero, **steps.columns(target)), lambda _: None

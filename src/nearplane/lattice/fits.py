"""Table of the ways to fit a number format's steps: a search before the solve, and a fit to the codes after it.

To add one, write a function that returns a grid and a constructor of its `Fit`, and add one line to `FITS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from nearplane.lattice.grid import Grid
from nearplane.lattice.multiples import multiples
from nearplane.lattice.number_formats import BlockFormat
from nearplane.lattice.octaves import octaves
from nearplane.lattice.polish import Fit, PlainFit
from nearplane.lattice.scale import Steps
from nearplane.lattice.shared_grid import shared
from nearplane.lattice.superblock_fit import SuperFit
from nearplane.lattice.superblock_search import fit_blocks
from nearplane.lattice.tiles import tiles

GridFit = Callable[[Tensor, Tensor, Steps], tuple[Grid, Callable[[Grid], Fit | None]]]
"""Function from a target (out, in), a weight of each column's errors (in,), and `Steps` to a grid and its `Fit`, or None."""


def plain(target: Tensor, importance: Tensor, steps: Steps) -> tuple[Grid, Callable[[Grid], Fit]]:
    """Fit one step to every group, and a zero point if the format is asymmetric; `importance` is ignored."""
    del importance
    return steps.grid(target), lambda _: PlainFit(steps.stored_in)


def blocks(target: Tensor, importance: Tensor, steps: Steps) -> tuple[Grid, Callable[[Grid], Fit]]:
    """Fit steps and minima of blocks, or of groups on two levels as llama.cpp stores them."""
    kind = steps.format
    assert isinstance(kind, BlockFormat), "only formats of blocks name this fit"
    grid = fit_blocks(kind, target, importance, steps.stored_in)
    return grid, partial(SuperFit, kind=kind, storage=steps.stored_in)


FITS: Mapping[str, GridFit] = {
    "plain": plain, "blocks": blocks, "shared": shared, "octaves": octaves, "tiles": tiles, "multiples": multiples
}  # fmt: skip

"""How the steps of a number format are fitted, by the name that it gives: a search before the solve, a fit to codes after it.

To add one: a function from a target to a grid and to what fits the steps of such grids, and one line in `FITS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from nearplane.lattice.grid import Grid
from nearplane.lattice.number_formats import BlockType
from nearplane.lattice.polish import Fit, PlainFit
from nearplane.lattice.scale import Steps
from nearplane.lattice.superblock_fit import SuperFit

Begin = Callable[[Tensor, Tensor, Steps], tuple[Grid, Callable[[Grid], Fit]]]
"""From a target (out, in) and how much errors of each column count (in,) to a grid, and to what fits the steps of such a grid."""


def plain(target: Tensor, importance: Tensor, steps: Steps) -> tuple[Grid, Callable[[Grid], Fit]]:
    """Fit one step, and where the format is asymmetric a zero-point, to every group; importance is not looked at."""
    del importance
    return steps.grid(target), lambda _: PlainFit(steps.stored_in)


def blocks(target: Tensor, importance: Tensor, steps: Steps) -> tuple[Grid, Callable[[Grid], Fit]]:
    """Fit steps on two levels, those of llama.cpp."""
    from nearplane.lattice.superblock_search import fit_blocks  # compiles

    kind = steps.format
    assert isinstance(kind, BlockType), "of the formats that name this fit"
    return fit_blocks(kind, target, importance), partial(SuperFit, kind=kind)


FITS: Mapping[str, Begin] = {"plain": plain, "blocks": blocks}

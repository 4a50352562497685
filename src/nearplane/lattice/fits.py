"""Table of the ways to fit a number format's steps: a search before the solve, and a fit to the codes after it.

To add one, write a function that returns a grid and a constructor of its `Fit`, and add one line to `FITS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nearplane.lattice.factor import solved_strips
from nearplane.lattice.grid import Grid
from nearplane.lattice.octaves import octaves
from nearplane.lattice.polish import Fit, PlainFit
from nearplane.lattice.scale import Steps, too_small
from nearplane.lattice.shared_grid import shared
from nearplane.lattice.superblock_fit import SuperFit, fit_blocks, multiples
from nearplane.lattice.tiles import tiles
from nearplane.number_formats import BlockFormat

# factor by which steps that are stored too coarsely may raise the error of rounding: what one bit less of each weight costs
MAX_GROWTH = 4.0
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


def check_steps(grid: Grid, target: Tensor, W: Tensor, importance: Tensor, steps: Steps) -> None:
    """Refuse weights whose steps are too small for the dtype in which they are stored, whatever the format.

    The smallest positive number `u` of a dtype is also the distance of its small numbers. A step `s` that was rounded to them
    moves the largest value of its group by up to `c u / 2`, `c` the largest code. Where that is more than `s`, the error of
    rounding all weights to nearest is compared with that of the same weights times a power of two, whose steps are in
    the middle of the range: a group of tiny weights in a layer of larger ones loses nothing that counts, and zeros need no step.

    Args:
        grid: Grid of some rows.
        target: (rows, in) target that was fitted.
        W: (out, in) weights of all rows.
        importance: (in,) importance of the columns.
        steps: Settings of the fit.

    Raises:
        NumericalError: The error is more than `MAX_GROWTH` times as large as with steps of any size.
    """
    storage, book = steps.stored_in, steps.codebook
    number = next(grid.parts[name] for name in ("block", "d", "scale") if name in grid.parts).expand(len(target), -1)
    used = (target.reshape(*number.shape, -1) != 0).any(-1)
    coarse = torch.finfo(storage).smallest_normal * torch.finfo(storage).eps * max(map(abs, book.limits)) / 2
    if not bool((used & (number.abs() <= coarse)).any()):
        return
    largest = float(W.abs().max())
    unit = 2.0 ** -math.frexp(largest)[1]
    lost, least, energy = 0.0, 0.0, 0.0
    for rows in solved_strips(len(W), W.device):
        weights, centred = W[rows], (W[rows].double() * unit).to(W.dtype)
        energy += float((centred.double() * importance).square().sum())
        lost += unit**2 * _rounding_error(weights, importance, steps)
        least += _rounding_error(centred, importance, replace(steps, peak=None))
    if lost > MAX_GROWTH * least:
        share = (
            f": its steps lose {lost / energy:.2g} of their energy, where steps of any size lose {least / energy:.2g}"
        )
        raise too_small(largest, storage, share)


def _rounding_error(W: Tensor, importance: Tensor, steps: Steps) -> float:
    """Return the squared error of rounding weights (rows, in) to nearest on the grid that is fitted to them."""
    grid, _ = FITS[steps.format.fit](W, importance, steps)
    return float(((W.double() - grid.round(W)[1].double()) * importance).square().sum())

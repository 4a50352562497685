"""Grids whose steps are powers of two, as MXFP4 and MXFP8 store them: their search, and their fit to codes.

Least squares, rounded to a power of two, hardly ever moves a step. The fit therefore tries half and twice the step of every
group with codes of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nearplane.lattice.grid import Grid
from nearplane.lattice.kernels import kernels_of
from nearplane.lattice.kernels_torch import Columns, Rounding, State, Tally
from nearplane.lattice.polish import Fit, are_small, groups_in, in_steps
from nearplane.lattice.scale import Steps, least_error

WINDOW = range(1, -4, -1)  # candidates for the exponent of a step, above the smallest one that covers the weights
LIMITS = (-126, 127)  # exponents of normal float32 numbers; files could hold -127, too


@dataclass(frozen=True, slots=True, kw_only=True)
class OctaveGrid(Grid):
    """A grid whose steps are powers of two."""

    fit: ClassVar[str] = "octaves"


def octaves(target: Tensor, importance: Tensor, steps: Steps) -> tuple[Grid, Callable[[Grid], Fit]]:
    """Choose the power of two of every group by the error of its weights; see `fits.GridFit`.

    The error of a weight counts as much as the squared importance of its column, the diagonal of the Hessian.
    """
    groups, levels = steps.groups(target), steps.codebook.levels
    assert levels is not None, "only formats with levels name this fit"
    levels = levels.to(target)
    peak = groups.abs().amax(-1)
    cover = torch.where(peak > 0, peak / levels[-1], 1).log2().ceil()
    exponents = ((cover + offset).clamp_(*LIMITS) for offset in WINDOW)
    best = least_error(groups, importance, steps.codebook, ((exponent, exponent.exp2()) for exponent in exponents))
    scale = torch.where(peak > 0, best, 0).exp2()
    return OctaveGrid(scale=scale, zero=torch.zeros_like(scale), **steps.columns(target)), lambda _: OctaveFit()


class OctaveFit:
    """Fit of every step by trial: a sweep over the codes of its group on half, once and twice the step."""

    rounding = Rounding(0, *(2.0**limit for limit in (LIMITS[0], 0, LIMITS[1])))

    def fit(self, state: State, a: int, b: int, EH: Tensor) -> None:
        """Move steps and codes of the groups one after another; see `Fit`."""
        groups, kernel = groups_in(state, a, b), kernels_of(EH).fit_octaves
        if kernel is not None and EH.dtype == torch.float32 and are_small(groups):
            kernel(state, groups, EH, (self.rounding.least, self.rounding.largest))
            return
        for g, start, end in groups:
            old = state.scale[g].clone()
            values = in_steps(state, start, end).mul_(old)
            codes, moves, least = state.codes[start:end].clone(), torch.zeros_like(values), torch.zeros_like(old)
            for factor in (1.0, 0.5, 2.0):
                step = (old * factor).clamp(*(2.0**limit for limit in LIMITS))
                trial = _trial(state, start, values, EH[start - a : end - a], step)
                better = trial[2] < least
                codes, moves = (torch.where(better, x, y) for x, y in zip(trial, (codes, moves), strict=False))
                state.scale[g], least = torch.where(better, step, state.scale[g]), torch.where(better, trial[2], least)
            state.fitted += least
            state.codes[start:end] = codes
            state.E[start:end] += moves
            EH.addmm_(state.H[a:b, start:end], moves)
            state.moved |= (least < 0).any()

    def grid(self, state: State, start: Grid) -> Grid:
        """Return the grid `start` with the fitted steps."""
        return start.with_parts({"scale": state.scale.T.to(start.scale.dtype).contiguous(), "zero": start.zero})


def _trial(state: State, start: int, values: Tensor, EH: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, old minus new values, and changes of the loss of rows, if columns of a group had another step.

    Args:
        state: State of the descent, not changed.
        start: First column of the group.
        values: (size, out) values of the columns of the group.
        EH: (size, out) `(E H)^T` of these columns.
        step: (out,) step to try.
    """
    end = start + len(values)
    d = state.diagonal[start:end]
    codes, moves, loss = torch.empty_like(state.codes[start:end]), torch.empty_like(values), torch.zeros_like(step)
    columns = Columns(
        values,
        step[None],
        torch.zeros_like(step)[None],
        torch.zeros(end - start, dtype=torch.int64, device=step.device),
        state.codebook,
    )
    tally = Tally(d.masked_fill(d == torch.inf, 0), loss, codes.new_empty(0), moves=True)
    target, U = EH / d[:, None] + values, (state.H[start:end, start:end] / d).triu(1)
    kernels_of(EH).sweep(target, columns, U, codes, moves, tally)
    return codes, moves, loss

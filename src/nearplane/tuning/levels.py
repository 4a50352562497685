"""Four- and eight-bit floats as a function of trained tensors: their steps, and the codes of four bits.

    value = step * level[code]      step = stored(step_0 exp(unit s)),  code = clipped(round(code_0 + v / 6))

A code is the number of its level. A step is stored as a power of two, as an 8-bit float over the number that all steps of a
layer share, which stays, or in the dtype of the file; steps of tiles are shared by rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.octaves import LIMITS, OctaveGrid
from nearplane.lattice.scale import stored
from nearplane.lattice.shared_grid import SharedFit, SharedGrid
from nearplane.lattice.superblock import SuperGrid, rounded
from nearplane.tuning.parameters import TunedLayer
from nearplane.tuning.straight import decoded, through

NAMES = {SharedGrid: "block", SuperGrid: "d", Grid: "scale"}  # parts of grids that hold the trained steps
UNIT = 1 / 6  # of `v` in codes: a third loses, a fifteenth hardly moves a code (docs/log.md)


class TunedLevels(TunedLayer):
    """A matrix on a grid of levels.

    Args:
        matrix: Codes (out, in), which are numbers of levels, and steps (out, groups), as read from a file.
        storage: Dtype of steps in the file, if the format does not fix it.
        rows: Number of neighbouring rows that share their steps.
        codes: Whether codes are trained.
    """

    _grid: Grid

    def __init__(
        self, matrix: QuantizedMatrix[Grid], storage: torch.dtype, *, rows: int = 1, codes: bool = False
    ) -> None:
        grid, device = matrix.grid, matrix.codes.device
        assert grid.levels is not None, "codes are integers"
        self._storage, self._rows = storage, rows
        self._names = (next(name for kind, name in NAMES.items() if isinstance(grid, kind)),)
        self._levels = grid.levels.to(device, grid.scale.dtype)
        gaps = self._levels.diff()
        limits = 0, len(self._levels) - 1
        out, steps = self._steps(grid).shape
        numbers = torch.zeros(out // rows, steps, device=device)
        super().__init__(matrix, numbers, 1.0 / len(self._levels), limits=limits, step=UNIT, codes=codes)
        around = (torch.cat([gaps[:1], gaps]) + torch.cat([gaps, gaps[-1:]])) / 2  # every level
        self._table |= {"levels": self._levels, "gaps": around}

    def values(self) -> Tensor:
        """Return (out, in) `step * level[code]`, exactly as the file will decode."""
        steps = self._rounded_steps()
        if isinstance(self._grid, SuperGrid):
            steps = steps.repeat_interleave(self._grid.sc.shape[1] // steps.shape[1], 1) * self._grid.sc
        return decoded(self._v, steps, self._means())

    def _positions(self, W: Tensor) -> Tensor:
        position = (W / self._grid.scale[:, self._grid.group]).clamp_(float(self._levels[0]), float(self._levels[-1]))
        above = torch.bucketize(position, self._levels).clamp_(min=1)
        low, high = self._levels[above - 1], self._levels[above]
        return above - 1 + (position - low) / (high - low)

    def _steps(self, grid: Grid) -> Tensor:
        """Return the (out, groups or blocks) steps of a grid that are trained."""
        return grid.d if isinstance(grid, SuperGrid) else grid.scale

    def _rounded_grid(self) -> Grid:
        steps = self._rounded_steps().detach()
        if isinstance(self._grid, SharedGrid):
            steps = SharedFit(self._grid.divisor).blocks(steps).to(steps.dtype)
        return self._grid.with_parts({self._names[0]: steps})

    def _rounded_steps(self) -> Tensor:
        """Return (out, groups or blocks) steps as stored."""
        steps = self._steps(self._grid) * (self.unit * self._s).exp().repeat_interleave(self._rows, 0)
        exact = steps.detach()
        match self._grid:
            case SharedGrid():
                short = SharedFit(self._grid.divisor).stored(exact, 0)
            case OctaveGrid():
                short = exact.log2().round().clamp(*LIMITS).exp2()
            case SuperGrid():
                short = rounded(exact, self._storage)
                short = torch.where(torch.isfinite(short), short, self._grid.d)
            case _:
                short = stored(exact, self._storage)
        return through(short, steps)

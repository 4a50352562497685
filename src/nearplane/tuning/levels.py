"""Four-bit floats as a function of trained tensors: their codes are trained, their steps are not.

    value = step * level[code]      code = clipped(round(code_0 + v / 6))

A code is the number of its level. Steps are powers of two or 8-bit floats, too far apart to be trained.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.tuning.parameters import TunedLayer, through

UNIT = 1 / 6  # of `v` in codes: a third loses, a fifteenth hardly moves a code (docs/log.md)


class TunedLevels(TunedLayer):
    """A matrix on a grid of levels, whose steps are not trained.

    Args:
        matrix: Codes (out, in), which are numbers of levels, and steps (out, groups), as read from a file.
        codes: Whether codes are trained.
    """

    _names = ()
    _grid: Grid

    def __init__(self, matrix: QuantizedMatrix[Grid], *, codes: bool = False) -> None:
        grid, device = matrix.grid, matrix.codes.device
        assert grid.levels is not None, "codes are integers"
        self._levels = grid.levels.to(device, grid.scale.dtype)
        gaps = self._levels.diff()
        self._gaps = (torch.cat([gaps[:1], gaps]) + torch.cat([gaps, gaps[-1:]])) / 2  # around every level
        limits = 0, len(self._levels) - 1
        unit = 1.0 / len(self._levels)
        super().__init__(matrix, torch.zeros(0, device=device), unit, limits=limits, step=UNIT, codes=codes)

    def values(self) -> Tensor:
        """Return (out, in) `step * level[code]`, exactly as the file will decode."""
        codes = self._rounded_codes()
        places = codes.detach().long()
        position = self._levels[places]
        if self._v is not None:
            position = through(position, self._gaps[places] * codes)
        return self._grid.scale[:, self._grid.group] * position

    def trained(self) -> dict[str, Tensor]:
        """Return `v` (out, in) if codes are trained."""
        return {} if self._v is None else {"codes": self._v}

    def _positions(self, W: Tensor) -> Tensor:
        position = (W / self._grid.scale[:, self._grid.group]).clamp_(float(self._levels[0]), float(self._levels[-1]))
        above = torch.bucketize(position, self._levels).clamp_(min=1)
        low, high = self._levels[above - 1], self._levels[above]
        return above - 1 + (position - low) / (high - low)

    def _rounded_grid(self) -> Grid:
        return self._grid

"""What is trained of a layer on llama.cpp's grids: steps and offsets of its blocks, and codes of few bits.

    value = d sc code - dmin m      d = stored(d_0 exp(2^-bits s)),  dmin = stored(dmin_0 exp(2^-bits t))

The integers `sc` and `m` of groups stay. `s` and `t` are trained from 0, codes as in `parameters.py`; so are roundings.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.superblock import SuperGrid
from nearplane.lattice.superblock_fit import rounded
from nearplane.tuning.parameters import TunedLayer, through


class TunedBlocks(TunedLayer):
    """A matrix on a `SuperGrid` whose blocks' steps and offsets, (1 or 2, out, blocks), are trained.

    Args:
        matrix: as read from a file.
        codes: whether codes are trained too.
    """

    _grid: SuperGrid

    def __init__(self, matrix: QuantizedMatrix[SuperGrid], *, codes: bool = False) -> None:
        grid = matrix.grid
        assert grid.low is not None, "its codes have limits"
        assert grid.high is not None, "its codes have limits"
        numbers = torch.zeros(1 if grid.dmin is None else 2, *grid.d.shape, device=grid.d.device)
        limits = grid.low, grid.high
        super().__init__(matrix, numbers, 1.0 / (grid.high - grid.low + 1), limits=limits, codes=codes)

    def values(self) -> Tensor:
        """Return (out, in) values, exactly as the file will decode."""
        d, dmin = self._rounded_steps()
        out, groups = self._grid.sc.shape
        each = groups // d.shape[1]
        values = (
            self._rounded_codes().view(out, groups, -1) * (d.repeat_interleave(each, 1) * self._grid.sc)[:, :, None]
        )
        if dmin is not None and self._grid.m is not None:
            values = values - (dmin.repeat_interleave(each, 1) * self._grid.m)[:, :, None]
        return values.view(out, -1)

    def _positions(self, W: Tensor) -> Tensor:
        scale, zero = self._grid.columns(slice(None))
        return W / torch.where(scale == 0, 1, scale) + zero

    def _rounded_grid(self) -> SuperGrid:
        d, dmin = self._rounded_steps()
        return replace(self._grid, d=d.detach(), dmin=None if dmin is None else dmin.detach())

    def _numbers(self, grid: SuperGrid) -> dict[str, Tensor]:
        return {name: part for name, part in grid.parts.items() if name in ("d", "dmin")}

    def _with(self, numbers: dict[str, Tensor]) -> SuperGrid:
        return replace(self._grid, d=numbers["d"], dmin=numbers.get("dmin"))

    def _rounded_steps(self) -> tuple[Tensor, Tensor | None]:
        """Return (out, blocks) steps and offsets as stored; they keep their signs and stay finite."""
        factor = (self.unit * self._s).exp()
        wanted = self._grid.d * factor[0]
        short = rounded(wanted.detach())
        d = through(torch.where(torch.isfinite(short), short, self._grid.d), wanted)
        if self._grid.dmin is None:
            return d, None
        offset = self._grid.dmin * factor[1]
        held = offset.detach().half().to(offset.dtype)
        return d, through(torch.where(torch.isfinite(held), held, self._grid.dmin), offset)

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
from nearplane.tuning.parameters import LEAN, MOST, through


class TunedBlocks:
    """A matrix on a `SuperGrid` whose blocks' steps and offsets, and codes if asked for, are trained.

    Args:
        matrix: as read from a file.
        codes: whether codes are trained too; see `lean`.
    """

    def __init__(self, matrix: QuantizedMatrix, *, codes: bool = False) -> None:
        grid = matrix.grid
        assert isinstance(grid, SuperGrid), "of llama.cpp's grids"
        assert grid.low is not None, "its codes have limits"
        assert grid.high is not None, "its codes have limits"
        self._grid, self._low, self._high = grid, grid.low, grid.high
        self._unit = 1.0 / (grid.high - grid.low + 1)
        self._codes = (matrix.codes - grid.low).to(torch.uint8)
        parts = [part for part in (grid.d, grid.dmin) if part is not None]
        self._s = torch.zeros(len(parts), *grid.d.shape, device=grid.d.device, requires_grad=True)
        self._v = torch.zeros(matrix.codes.shape, device=grid.d.device, requires_grad=True) if codes else None

    @property
    def unit(self) -> float:
        """How far off weights of so many bits are, relative: 2^-bits."""
        return self._unit

    @torch.no_grad()
    def lean(self, W: Tensor) -> None:
        """Where codes are trained, let them begin part of the way to the original weights (out, in), none of them moved."""
        if self._v is not None:
            scale, zero = self._grid.columns(slice(None))
            apart = W / torch.where(scale == 0, 1, scale) + zero - self._codes - self._low
            self._v.copy_(apart.mul_(LEAN).clamp_(-MOST, MOST) / self._unit)

    def trained(self) -> dict[str, Tensor]:
        """Return `s` and `t`, (1 or 2, out, blocks), and `v` (out, in) where codes are trained."""
        return {"steps": self._s} | ({} if self._v is None else {"codes": self._v})

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

    def matrix(self) -> QuantizedMatrix[SuperGrid]:
        """Return codes and steps as the file will hold them."""
        d, dmin = (None if part is None else part.detach() for part in self._rounded_steps())
        assert d is not None, "every block has a step"
        return QuantizedMatrix(
            codes=self._rounded_codes().detach().to(torch.int32), grid=replace(self._grid, d=d, dmin=dmin)
        )

    def state(self) -> dict[str, Tensor]:
        """Return steps and offsets, and codes where they are trained."""
        found = self.matrix()
        parts = {name: found.grid.parts[name].clone() for name in ("d", "dmin") if name in found.grid.parts}
        return parts | ({} if self._v is None else {"codes": (found.codes - self._low).to(torch.uint8)})

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take steps and offsets, and codes where they are trained, for those to begin with."""
        self._grid = replace(self._grid, d=state["d"], dmin=state.get("dmin"))
        with torch.no_grad():
            self._s.zero_()
            if self._v is not None:
                self._codes = state["codes"]
                self._v.zero_()

    def load(self, matrix: QuantizedMatrix) -> None:
        """Take codes and steps of a matrix on the same grid, as read from a file."""
        matrix = matrix.to(self._s.device)
        assert isinstance(matrix.grid, SuperGrid), "of the same grid"
        self._codes = (matrix.codes - self._low).to(torch.uint8)
        self.restore({**matrix.grid.parts, "codes": self._codes})

    def _rounded_steps(self) -> tuple[Tensor, Tensor | None]:
        """Return (out, blocks) steps and offsets as stored; they keep their signs and stay finite."""
        factor = (self._unit * self._s).exp()
        wanted = self._grid.d * factor[0]
        short = rounded(wanted.detach())
        d = through(torch.where(torch.isfinite(short), short, self._grid.d), wanted)
        if self._grid.dmin is None:
            return d, None
        offset = self._grid.dmin * factor[1]
        held = offset.detach().half().to(offset.dtype)
        return d, through(torch.where(torch.isfinite(held), held, self._grid.dmin), offset)

    def _rounded_codes(self) -> Tensor:
        """Return (out, in) float32 codes within the limits of the grid."""
        codes = self._codes.float() + self._low
        if self._v is None:
            return codes
        wanted = codes + self._unit * self._v
        return through(wanted.detach().round().clamp_(self._low, self._high), wanted)

"""What is trained of a quantized network: the steps of its grids, codes of few bits, and the weights of its norms.

    value = step * (code - zero)      step = stored(step_0 * exp(2^-bits s)),  code = clipped(round(code_0 + 2^-bits v))
    norm  = stored(norm_0 + 2^-bits rms(norm_0) t)

`s`, `v` and `t` are trained; `s` and `t` from 0, in units of how far off weights of so many bits are. `v` begins part of the way to
where the original weight lies, so that codes which cost little to move come to move first; by itself that moves none. What is
rounded is rounded in every forward as the file will hold it, so that the predictions that are trained are those of the file;
gradients pass straight through the rounding. Knows matrices, not networks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from nearplane.errors import FormatError
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.scale import stored

LEAN, MOST = 0.5, 0.4  # of the way from a code to the original weight that codes begin at, and in steps at most


class Tuned(Protocol):
    """A tensor of the network as a function of what is trained of it."""

    def values(self) -> Tensor:
        """Return the tensor as the file would hold it, differentiable by what is trained."""

    def trained(self) -> dict[str, Tensor]:
        """Return the leaves, by the kind of what they are, see `settings.RATES`."""

    def state(self) -> dict[str, Tensor]:
        """Return what the file would hold, in memory of its own."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Make `values` what a state says; training may not go on from there."""


class TunedLayer(Tuned, Protocol):
    """The matrix of a layer."""

    @property
    def unit(self) -> float:
        """How far off the weights are, relative."""

    def lean(self, W: Tensor) -> None:
        """Where codes are trained, let them begin nearer to the original weight (out, in), none of them moved."""

    def matrix(self) -> QuantizedMatrix:
        """Return codes and grid as the file will hold them."""

    def load(self, matrix: QuantizedMatrix) -> None:
        """Take a matrix as read from a file."""


class TunedMatrix:
    """A matrix on a grid whose steps, and codes if asked for, are trained.

    Args:
        name: of the layer, for messages.
        matrix: codes (out, in) and steps (out, groups), as read from a file.
        storage: dtype of the steps in the file.
        codes: whether codes are trained too; see `lean`.

    Raises:
        FormatError: groups are not runs of as many neighbours each, or codes are no integers with limits.
    """

    def __init__(self, name: str, matrix: QuantizedMatrix, storage: torch.dtype, *, codes: bool = False) -> None:
        grid, (out, columns) = matrix.grid, matrix.codes.shape
        if not isinstance(grid, Grid) or grid.levels is not None or grid.low is None or grid.high is None:
            raise FormatError(f"{name}: its codes are no integers on a grid with limits; only such grids are tuned.")
        groups = grid.scale.shape[1]
        if columns % groups or not torch.equal(grid.group.cpu(), torch.arange(columns) // (columns // groups)):
            raise FormatError(f"{name}: its groups are not runs of as many inputs each; only such grids are tuned.")
        self._grid, self._storage, self._low, self._high = grid, storage, grid.low, grid.high
        self._unit = 1.0 / (grid.high - grid.low + 1)
        self._codes = (matrix.codes - grid.low).to(torch.uint8)  # all that is kept of them: a byte each
        self._s = torch.zeros(out, groups, device=grid.scale.device, requires_grad=True)
        self._v = torch.zeros(out, columns, device=grid.scale.device, requires_grad=True) if codes else None

    @property
    def unit(self) -> float:
        """How far off weights of so many bits are, relative: 2^-bits."""
        return self._unit

    @torch.no_grad()
    def lean(self, W: Tensor) -> None:
        """Where codes are trained, let them begin half way to the original weights (out, in), short of where another is nearer."""
        if self._v is not None:
            group, scale = self._grid.group, self._grid.scale
            apart = W / scale[:, group] + self._grid.zero[:, group] - self._codes - self._low
            self._v.copy_(apart.mul_(LEAN).clamp_(-MOST, MOST) / self._unit)

    def trained(self) -> dict[str, Tensor]:
        """Return `s` (out, groups), and `v` (out, in) where codes are trained."""
        return {"steps": self._s} | ({} if self._v is None else {"codes": self._v})

    def values(self) -> Tensor:
        """Return (out, in) `step * (code - zero)`, exactly as the file will decode."""
        out, groups = self._s.shape
        position = self._rounded_codes() - self._grid.zero.repeat_interleave(self._codes.shape[1] // groups, 1)
        return (position.view(out, groups, -1) * self._rounded_steps()[:, :, None]).view(out, -1)

    def matrix(self) -> QuantizedMatrix[Grid]:
        """Return codes and steps as the file will hold them."""
        codes, scale = self._rounded_codes().detach(), self._rounded_steps().detach()
        return QuantizedMatrix(codes=codes.to(torch.int32), grid=replace(self._grid, scale=scale))

    def state(self) -> dict[str, Tensor]:
        """Return steps, and codes where they are trained."""
        found = {"steps": self._rounded_steps().detach().clone()}
        if self._v is not None:
            found["codes"] = (self._rounded_codes().detach() - self._low).to(torch.uint8)
        return found

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take steps, and codes where they are trained, for those to begin with."""
        self._grid = replace(self._grid, scale=state["steps"])
        with torch.no_grad():
            self._s.zero_()
            if self._v is not None:
                self._codes = state["codes"]
                self._v.zero_()

    def load(self, matrix: QuantizedMatrix) -> None:
        """Take codes and steps of a matrix on the same grid, as read from a file."""
        assert isinstance(matrix.grid, Grid), "of the same grid"
        scale, codes = matrix.grid.scale.to(self._s.device), matrix.codes.to(self._s.device)
        self._codes = (codes - self._low).to(torch.uint8)
        self.restore({"steps": scale, "codes": self._codes})

    def _rounded_steps(self) -> Tensor:
        """Return (out, groups) steps as stored; a step keeps its sign and stays finite, or the file could not hold it."""
        wanted = self._grid.scale * (self._unit * self._s).exp()
        return through(stored(wanted.detach(), self._storage), wanted)

    def _rounded_codes(self) -> Tensor:
        """Return (out, in) float32 codes within the limits of the grid."""
        codes = self._codes.float() + self._low
        if self._v is None:
            return codes
        wanted = codes + self._unit * self._v
        return through(wanted.detach().round().clamp_(self._low, self._high), wanted)


class TunedVector:
    """The weights of a norm.

    Args:
        weights: (width,) in the dtype in which the file holds them.
        device: where to train.
        unit: how far off the weights of layers are, relative.
    """

    def __init__(self, weights: Tensor, device: torch.device, unit: float) -> None:
        self._storage = weights.dtype
        self._start = weights.to(device, torch.promote_types(weights.dtype, torch.float32))
        size = float(self._start.square().mean().sqrt())
        self._unit = unit * (size if size > 0 else 1.0)
        self._t = torch.zeros(weights.shape, device=device, requires_grad=True)

    def trained(self) -> dict[str, Tensor]:
        """Return `t` (width,)."""
        return {"norms": self._t}

    def values(self) -> Tensor:
        """Return (width,) the weights as stored."""
        wanted = self._start + self._unit * self._t
        return through(wanted.detach().to(self._storage).to(wanted.dtype), wanted)

    def tensor(self) -> Tensor:
        """Return (width,) the weights in the dtype in which the file holds them."""
        return self.values().detach().to(self._storage)

    def state(self) -> dict[str, Tensor]:
        """Return the weights."""
        return {"norms": self.values().detach().clone()}

    def load(self, weights: Tensor) -> None:
        """Take weights as read from a file."""
        self.restore({"norms": weights.to(self._start)})

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take weights for those to begin with."""
        self._start = state["norms"]
        with torch.no_grad():
            self._t.zero_()


def through(rounded: Tensor, wanted: Tensor) -> Tensor:
    """Return `rounded`, to the last digit, with the gradient of `wanted`."""
    return rounded + (wanted - wanted.detach())

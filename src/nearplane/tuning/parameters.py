"""What is trained of a quantized network: the steps of its grids, codes of few bits, and the weights of its norms.

    value = step * (code - zero)      step = stored(step_0 * exp(2^-bits s)),  code = clipped(round(code_0 + 2^-bits v))
    norm  = stored(norm_0 + 2^-bits rms(norm_0) t)

On llama.cpp's grids the integers `sc` and `m` of groups stay. Of entropy-coded weights the scales of rows and columns do: finer
ladders for them take more bytes than they are worth (docs/log.md), and what a norm can take over is trained there. Their codes have
no limits; what keeps them small is `Pressure`, a price for every bit that they cost.

    value = d sc code - dmin m      d = stored(d_0 exp(2^-bits s)),  dmin = stored(dmin_0 exp(2^-bits s'))
    value = row * code * column     base = rung(base_0 exp(unit b)),     code = round(code_0 + unit_of_codes v)

`s`, `b`, `v` and `t` are trained; all but `v` from 0, in units of how far off weights of so many bits are. `v` begins part of the
way to where the original weight lies, so that codes which cost little to move come to move first; by itself that moves none. What
is rounded is rounded in every forward as the file will hold it, so that the predictions that are trained are those of the file;
gradients pass straight through the rounding. Knows matrices, not networks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nearplane.coding.blob import stored_base
from nearplane.errors import FormatError
from nearplane.formats.layer_format import LayerFormat
from nearplane.lattice.grid import Grid, ProductGrid, QuantizedMatrix
from nearplane.lattice.scale import stored
from nearplane.lattice.superblock import SuperGrid
from nearplane.lattice.superblock_fit import rounded

LEAN, MOST = 0.5, 0.4  # of the way from a code to the original weight that codes begin at, and in steps at most
CODE_UNIT = 0.25  # of a step at most: what codes move by, where a rate is low
NOT_SEEN = 8  # rows of a column, as the mean of the matrix has them, that a column's own are taken together with
WORTH = 2 * math.log(2)  # of a bit per weight, over KL: where errors are small a bit more makes a quarter of them
GAIN = 2.0  # by how much the logarithm of the price rises in a step for every bit per weight that is too many
AIM = 0.998  # of the bytes that matrices may take: what is foretold between two looks is off by about a thousandth
RANGE = 16.0  # times its first value, or so much of it, is the price at most and at least


class TunedLayer(ABC):
    """The matrix of a layer: some numbers of its grid are trained and, if asked for, its codes.

    Args:
        matrix: as read from a file.
        numbers: what is trained of the grid, zeros to begin with.
        unit: how far off the weights are, relative: 2^-bits.
        limits: of the codes; None: there are none.
        step: what codes move by in training; None: `unit`.
        codes: whether codes are trained too; see `lean`.
    """

    kind = "steps"  # of the numbers, see `settings.RATES`
    _names: tuple[str, ...] = ("scale",)  # of the fields of the grid that hold them
    _grid: Any

    def __init__(
        self,
        matrix: QuantizedMatrix,
        numbers: Tensor,
        unit: float,
        *,
        limits: tuple[int, int] | None = None,
        step: float | None = None,
        codes: bool = False,
    ) -> None:
        self._grid, self.unit, self._step = matrix.grid, unit, step or unit
        self._limits, self._low = limits, limits[0] if limits is not None else 0
        self._codes = self._short(matrix.codes - self._low)  # all that is kept of them
        self._s = numbers.requires_grad_()
        self._v = torch.zeros(matrix.codes.shape, device=numbers.device, requires_grad=True) if codes else None

    @abstractmethod
    def values(self) -> Tensor:
        """Return (out, in) exactly as the file will decode."""

    @abstractmethod
    def _positions(self, W: Tensor) -> Tensor:
        """Return (out, in) real codes at which the weights `W` would lie."""

    @abstractmethod
    def _rounded_grid(self) -> Any:
        """Return the grid as the file will hold it."""

    def _numbers(self, grid: Any) -> dict[str, Any]:
        """Return the numbers of a grid that are trained."""
        return {name: getattr(grid, name) for name in self._names}

    @torch.no_grad()
    def lean(self, W: Tensor) -> None:
        """Where codes are trained, let them begin half way to the original weights (out, in), short of where another is nearer."""
        if self._v is not None:
            apart = self._positions(W) - self._codes - self._low
            self._v.copy_(apart.mul_(LEAN).clamp_(-MOST, MOST) / self._step)

    def trained(self) -> dict[str, Tensor]:
        """Return the leaves, by their kind: the numbers of the grid, and `v` (out, in) where codes are trained."""
        return {self.kind: self._s} | ({} if self._v is None else {"codes": self._v})

    def matrix(self) -> QuantizedMatrix:
        """Return codes and grid as the file will hold them."""
        return QuantizedMatrix(codes=self._rounded_codes().detach().to(torch.int32), grid=self._rounded_grid())

    def state(self) -> dict[str, Any]:
        """Return the numbers of the grid, and codes where they are trained, as the file would hold them, in memory of its own."""
        found = self._numbers(self._rounded_grid())
        return found if self._v is None else found | {"codes": self._short(self._rounded_codes().detach() - self._low)}

    def restore(self, state: dict[str, Any]) -> None:
        """Make `values` what a state says; training may not go on from there."""
        self._grid = replace(self._grid, **{name: state[name] for name in self._names})
        with torch.no_grad():
            self._s.zero_()
            if self._v is not None:
                self._codes = state["codes"]
                self._v.zero_()

    def load(self, matrix: QuantizedMatrix) -> None:
        """Take a matrix on the same grid, as read from a file."""
        assert type(matrix.grid) is type(self._grid), "of the same grid"
        matrix = matrix.to(self._codes.device)
        self._codes = self._short(matrix.codes - self._low)
        self.restore(self._numbers(matrix.grid) | {"codes": self._codes})

    def _short(self, codes: Tensor) -> Tensor:
        """Return codes less the lowest in a byte each."""
        return codes.to(torch.uint8)

    def _rounded_codes(self) -> Tensor:
        """Return (out, in) float32 codes within the limits of the grid."""
        codes = self._codes.float() + self._low
        if self._v is None:
            return codes
        wanted = codes + self._step * self._v
        rounded = wanted.detach().round()
        if self._limits is not None:
            rounded.clamp_(*self._limits)
        return through(rounded, wanted)


class TunedMatrix(TunedLayer):
    """A matrix on a grid whose steps, (out, groups), are trained.

    Args:
        name: of the layer, for messages.
        matrix: codes (out, in) and steps (out, groups), as read from a file.
        storage: dtype of the steps in the file.
        codes: whether codes are trained too.

    Raises:
        FormatError: groups are not runs of as many neighbours each, or codes are no integers with limits.
    """

    _grid: Grid

    def __init__(self, name: str, matrix: QuantizedMatrix[Grid], storage: torch.dtype, *, codes: bool = False) -> None:
        grid, columns = matrix.grid, matrix.codes.shape[1]
        low, high = grid.low, grid.high
        if grid.levels is not None or low is None or high is None:
            raise FormatError(f"{name}: its codes are no integers on a grid with limits; only such grids are tuned.")
        groups = grid.scale.shape[1]
        if columns % groups or not torch.equal(grid.group.cpu(), torch.arange(columns) // (columns // groups)):
            raise FormatError(f"{name}: its groups are not runs of as many inputs each; only such grids are tuned.")
        self._storage = storage
        numbers = torch.zeros(len(matrix.codes), groups, device=grid.scale.device)
        super().__init__(matrix, numbers, 1.0 / (high - low + 1), limits=(low, high), codes=codes)

    def values(self) -> Tensor:
        """Return (out, in) `step * (code - zero)`, exactly as the file will decode."""
        out, groups = self._s.shape
        position = self._rounded_codes() - self._grid.zero.repeat_interleave(self._codes.shape[1] // groups, 1)
        return (position.view(out, groups, -1) * self._rounded_steps()[:, :, None]).view(out, -1)

    def _positions(self, W: Tensor) -> Tensor:
        return W / self._grid.scale[:, self._grid.group] + self._grid.zero[:, self._grid.group]

    def _rounded_grid(self) -> Grid:
        return replace(self._grid, scale=self._rounded_steps().detach())

    def _rounded_steps(self) -> Tensor:
        """Return (out, groups) steps as stored; a step keeps its sign and stays finite, or the file could not hold it."""
        wanted = self._grid.scale * (self.unit * self._s).exp()
        return through(stored(wanted.detach(), self._storage), wanted)


class TunedBlocks(TunedLayer):
    """A matrix on a `SuperGrid` whose blocks' steps and offsets, (1 or 2, out, blocks), are trained.

    Args:
        matrix: as read from a file.
        codes: whether codes are trained too.
    """

    _names = "d", "dmin"
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


class TunedLadders(TunedLayer):
    """A matrix on ladders, whose base is trained.

    Args:
        matrix: codes (out, in) and exponents, as read from a file.
        rate: bits per weight that it takes.
        codes: whether codes are trained too.
    """

    kind = "base"
    _names = ("base",)
    _grid: ProductGrid

    def __init__(self, matrix: QuantizedMatrix[ProductGrid], rate: float, *, codes: bool = False) -> None:
        unit: float = 2.0**-rate
        numbers = torch.zeros((), device=matrix.codes.device)
        super().__init__(matrix, numbers, unit, step=min(unit, CODE_UNIT), codes=codes)
        out, mean = len(matrix.codes), matrix.codes.abs().float().mean(0)  # (in,)
        mean = ((out * mean + NOT_SEEN * mean.mean()) / (out + NOT_SEEN)).clamp(min=1e-4)
        self._price = -(((1 + mean.square()).sqrt() - 1) / mean).log2()  # (in,) bits, codes two-sided geometric

    def values(self) -> Tensor:
        """Return (out, in) `row * code * column`, exactly as the file will decode."""
        grid = self._rounded_grid()
        column = grid.column_scale()
        column = through(column, column * (self.unit * (self._s - self._s.detach())).exp())
        return self._rounded_codes() * grid.row_scale()[:, None] * column

    @torch.no_grad()
    def press(self, price: float) -> None:
        """Add to the gradients of codes that of `price` times the bits that they take."""
        if self._v is not None and self._v.grad is not None:
            wanted = self._codes + self._step * self._v
            self._v.grad += wanted.mul_(2).clamp_(-1, 1).mul_(price * self._step * self._price)  # towards 0

    @torch.no_grad()
    def bits(self) -> float:
        """Return about how many bits the codes take, less what does not change as they move."""
        return float((self._rounded_codes().abs().sum(0) * self._price).sum())

    def _positions(self, W: Tensor) -> Tensor:
        return W / self._grid.row_scale()[:, None] / self._grid.column_scale()

    def _rounded_grid(self) -> ProductGrid:
        return replace(self._grid, base=stored_base(self._grid.base * math.exp(self.unit * float(self._s.detach()))))

    def _short(self, codes: Tensor) -> Tensor:
        """Return codes in two bytes each where all fit."""
        fits = codes.numel() == 0 or float(codes.abs().max()) < 2**15
        return codes.to(torch.int16 if fits else torch.int32)


class Pressure:
    """Pulls codes towards 0, each by what it costs, harder while the matrices take too much.

    Args:
        matrices: by name.
        most: bytes that all of them may take.
        format: that packs them.
        kl: of the network at the start, nats per token.
    """

    def __init__(self, matrices: Mapping[str, TunedLadders], most: int, format: LayerFormat, kl: float) -> None:
        self._matrices, self.most, self._format = matrices, most, format
        self._weights = sum(each._codes.numel() for each in matrices.values())
        self._first = self._price = WORTH * kl / self._weights
        self._allowed = self._foretold()
        self.measure()

    def press(self) -> None:
        """Add to the gradients of codes what their bits cost."""
        over = (self._foretold() - self._allowed) / self._weights
        price = self._price * math.exp(GAIN * over)
        self._price = min(max(price, self._first / RANGE), self._first * RANGE)
        for each in self._matrices.values():
            each.press(self._price)

    def measure(self) -> int:
        """Return the bytes of all matrices, coded in earnest; what is foretold of them is set right by that."""
        size = 0
        for name, each in self._matrices.items():
            packed = self._format.pack(name, each.matrix(), torch.float32)
            size += sum(tensor.nbytes for tensor in packed.values())
        self._allowed = self._foretold() + 8 * (AIM * self.most - size)
        return size

    def standing(self) -> dict[str, float]:
        """Return what decides how it goes on."""
        return {"price": self._price, "allowed": self._allowed}

    def restore(self, standing: Mapping[str, float]) -> None:
        """Go on from there."""
        self._price, self._allowed = standing["price"], standing["allowed"]

    def _foretold(self) -> float:
        return sum(each.bits() for each in self._matrices.values())


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


Tuned = TunedLayer | TunedVector
"""A tensor of the network as a function of what is trained of it."""


def through(rounded: Tensor, wanted: Tensor) -> Tensor:
    """Return `rounded`, to the last digit, with the gradient of `wanted`."""
    return rounded + (wanted - wanted.detach())

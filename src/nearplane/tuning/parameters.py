"""Trained tensors of a quantized network: the steps of its grids, codes of few bits, and the weights of its norms.

    value = step * (code - zero)      step = stored(step_0 * exp(2^-bits s)),  code = clipped(round(code_0 + 2^-bits v))
    norm  = stored(norm_0 + 2^-bits rms(norm_0) t)

Floats are in `levels.py`.

On llama.cpp's grids the integers `sc` and `m` of groups are not trained. Of entropy-coded weights the scales of rows and columns
are not: finer ladders would take more bytes than they are worth (docs/log.md), and norms are trained instead. Their codes have no
limits; `Pressure`, a price for every bit, keeps them small.

    value = d sc code - dmin m      d = stored(d_0 exp(2^-bits s)),  dmin = stored(dmin_0 exp(2^-bits s'))
    value = row * code * column     base = rung(base_0 exp(unit b)),     code = round(code_0 + unit_of_codes v)

`s`, `b`, `v` and `t` are trained, all but `v` from 0, in units of the relative error of weights of so many bits. `v` starts part
of the way towards the original weight, so that codes whose move costs little move first; the start itself moves no code. All
rounding is done in every forward pass as the file will hold it, so that training sees the predictions of the file; gradients
pass straight through the rounding. Independent of networks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nearplane.coding.scales import stored_base
from nearplane.errors import FormatError
from nearplane.formats.layer_format import LayerFormat
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.product_grid import ProductGrid
from nearplane.lattice.scale import stored
from nearplane.lattice.superblock import SuperGrid, rounded
from nearplane.tuning.straight import Codes, decoded, through

LEAN_FRACTION, MAX_LEAN = 0.5, 0.4  # start of `v` towards the original weight: part of the way, and maximum in steps
CODE_UNIT = 0.25  # maximum unit of `v` in steps, which matters at low rates
PRIOR_ROWS = 8  # rows with the mean of the matrix that are added to the statistics of each column
FIRST_PRICE = 2 * math.log(2)  # of a bit per weight, relative to KL: at small errors one more bit quarters the KL
PRICE_GAIN = 2.0  # increase of the price's logarithm per step for every excess bit per weight
SIZE_TARGET = 0.998  # of the allowed bytes; predictions between measurements are off by about a thousandth
PRICE_RANGE = 16.0  # maximum of the price relative to its first value, and inverse of the minimum


class TunedLayer(ABC):
    """Matrix of a layer with trained numbers of its grid and, optionally, trained codes.

    Args:
        matrix: The matrix as read from a file.
        numbers: Trained numbers of the grid, zeros at the start.
        unit: Relative error of the weights, 2^-bits.
        limits: Lowest and highest code; without limits a subclass rounds codes itself.
        step: Unit of `v` in steps; None: `unit`.
        codes: Whether codes are trained too; see `lean`.
    """

    kind = "steps"  # kind of the numbers, see `settings.RATES`
    _names: tuple[str, ...] = ("scale",)  # fields of the grid that hold the numbers
    _grid: Any

    def __init__(
        self,
        matrix: QuantizedMatrix,
        numbers: Tensor,
        unit: float,
        *,
        limits: tuple[int, int] = (0, 0),
        step: float | None = None,
        codes: bool = False,
    ) -> None:
        self._grid, self.unit, self._step = matrix.grid, unit, step or unit
        self._limits, self._low = limits, limits[0]
        self._table: dict[str, Any] = {}  # fields of `Codes` that say what codes mean
        self._codes = self._short(matrix.codes - self._low)
        self._s = numbers.requires_grad_()
        self._v = torch.zeros(matrix.codes.shape, device=numbers.device, requires_grad=True) if codes else None

    @abstractmethod
    def values(self) -> Tensor:
        """Return (out, in) weights exactly as the file will decode."""

    @abstractmethod
    def _positions(self, W: Tensor) -> Tensor:
        """Return (out, in) real codes at which the weights `W` would lie."""

    @abstractmethod
    def _rounded_grid(self) -> Any:
        """Return the grid as the file will hold it."""

    def _numbers(self, grid: Any) -> dict[str, Any]:
        """Return the trained numbers of a grid."""
        return {name: getattr(grid, name) for name in self._names}

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self._codes.device

    @torch.no_grad()
    def lean(self, W: Tensor) -> None:
        """Start trained codes half way towards the original weights (out, in), but not so far that they round differently."""
        if self._v is not None:
            lean = self._positions(W) - self._codes - self._low
            self._v.copy_(lean.mul_(LEAN_FRACTION).clamp_(-MAX_LEAN, MAX_LEAN) / self._step)

    def trained(self) -> dict[str, Tensor]:
        """Return the leaves by kind: the numbers of the grid, and `v` (out, in) if codes are trained."""
        return {self.kind: self._s} | ({} if self._v is None else {"codes": self._v})

    def matrix(self) -> QuantizedMatrix:
        """Return codes and grid as the file will hold them."""
        return QuantizedMatrix(codes=self._rounded_codes().to(torch.int32) + self._low, grid=self._rounded_grid())

    def state(self) -> dict[str, Any]:
        """Return copies of the grid's numbers, and of codes if they are trained, as the file would hold them."""
        state = self._numbers(self._rounded_grid())
        return state if self._v is None else state | {"codes": self._rounded_codes()}

    def restore(self, state: dict[str, Any]) -> None:
        """Set `values` to a state; the state does not suffice to resume training."""
        self._grid = replace(self._grid, **{name: state[name] for name in self._names})
        with torch.no_grad():
            self._s.zero_()
            if self._v is not None:
                self._codes = state["codes"]
                self._v.zero_()

    def _short(self, codes: Tensor) -> Tensor:
        """Return codes minus the lowest code, one byte each."""
        return codes.to(torch.uint8)

    @torch.no_grad()
    def _rounded_codes(self) -> Tensor:
        """Return (out, in) codes minus the lowest code, in short integers."""
        return self._means().rounded(self._v)

    def _means(self) -> Codes:
        """Return the codes and what they mean."""
        return Codes(self._codes, *self._limits, self._step, **self._table)


class TunedMatrix(TunedLayer):
    """A matrix on a grid with trained steps (out, groups).

    Args:
        name: Name of the layer in messages.
        matrix: Codes (out, in) and steps (out, groups), as read from a file.
        storage: Dtype of the steps in the file.
        codes: Whether codes are trained too.

    Raises:
        FormatError: Groups are not runs of equally many neighbours, or codes are not integers with limits.
    """

    _grid: Grid

    def __init__(self, name: str, matrix: QuantizedMatrix[Grid], storage: torch.dtype, *, codes: bool = False) -> None:
        grid, columns = matrix.grid, matrix.codes.shape[1]
        low, high = grid.low, grid.high
        if grid.levels is not None or low is None or high is None:
            raise FormatError(f"{name}: its codes are not integers with limits, but only such grids can be tuned.")
        groups = grid.scale.shape[1]
        if columns % groups or not torch.equal(grid.group.cpu(), torch.arange(columns) // (columns // groups)):
            raise FormatError(
                f"{name}: its groups are not runs of equally many inputs, but only such grids can be tuned."
            )
        self._storage = storage
        numbers = torch.zeros(len(matrix.codes), groups, device=grid.scale.device)
        super().__init__(matrix, numbers, 1.0 / (high - low + 1), limits=(low, high), codes=codes)
        if bool(grid.zero.any()):
            self._table["zero"] = grid.zero

    def values(self) -> Tensor:
        """Return (out, in) `step * (code - zero)`, exactly as the file will decode."""
        return decoded(self._v, self._rounded_steps(), self._means())

    def _positions(self, W: Tensor) -> Tensor:
        return W / self._grid.scale[:, self._grid.group] + self._grid.zero[:, self._grid.group]

    def _rounded_grid(self) -> Grid:
        return replace(self._grid, scale=self._rounded_steps().detach())

    def _rounded_steps(self) -> Tensor:
        """Return (out, groups) steps as stored; they keep their signs."""
        steps = self._grid.scale * (self.unit * self._s).exp()
        return through(stored(steps.detach(), self._storage), steps)


class TunedBlocks(TunedLayer):
    """A matrix on a `SuperGrid` with trained steps and offsets of blocks, (1 or 2, out, blocks).

    Args:
        matrix: The matrix as read from a file.
        storage: Dtype of steps and offsets in the file.
        codes: Whether codes are trained too.
    """

    _names = "d", "dmin"
    _grid: SuperGrid

    def __init__(self, matrix: QuantizedMatrix[SuperGrid], storage: torch.dtype, *, codes: bool = False) -> None:
        grid, self._storage = matrix.grid, storage
        assert grid.low is not None, "codes without a lower limit"
        assert grid.high is not None, "codes without an upper limit"
        numbers = torch.zeros(1 if grid.dmin is None else 2, *grid.d.shape, device=grid.d.device)
        limits = grid.low, grid.high
        super().__init__(matrix, numbers, 1.0 / (grid.high - grid.low + 1), limits=limits, codes=codes)

    def values(self) -> Tensor:
        """Return (out, in) values exactly as the file will decode."""
        d, dmin = self._rounded_steps()
        out, groups = self._grid.sc.shape
        each = groups // d.shape[1]
        values = decoded(self._v, d.repeat_interleave(each, 1) * self._grid.sc, self._means())
        if dmin is None or self._grid.m is None:
            return values
        return (values.view(out, groups, -1) - (dmin.repeat_interleave(each, 1) * self._grid.m)[:, :, None]).view(
            out, -1
        )

    def _positions(self, W: Tensor) -> Tensor:
        scale, zero = self._grid.columns(slice(None))
        return W / torch.where(scale == 0, 1, scale) + zero

    def _rounded_grid(self) -> SuperGrid:
        d, dmin = self._rounded_steps()
        return replace(self._grid, d=d.detach(), dmin=None if dmin is None else dmin.detach())

    def _rounded_steps(self) -> tuple[Tensor, Tensor | None]:
        """Return (out, blocks) steps and offsets as stored; they keep their signs and stay finite."""
        factor = (self.unit * self._s).exp()
        step = self._grid.d * factor[0]
        short = rounded(step.detach(), self._storage)
        d = through(torch.where(torch.isfinite(short), short, self._grid.d), step)
        if self._grid.dmin is None:
            return d, None
        offset = self._grid.dmin * factor[1]
        short = offset.detach().to(self._storage).to(offset.dtype)
        return d, through(torch.where(torch.isfinite(short), short, self._grid.dmin), offset)


class TunedLadders(TunedLayer):
    """A matrix on ladders with a trained base.

    Args:
        matrix: Codes (out, in) and exponents, as read from a file.
        rate: Bits per weight of the matrix in the file.
        codes: Whether codes are trained too.
    """

    kind = "base"
    _names = ("base",)
    _grid: ProductGrid

    def __init__(self, matrix: QuantizedMatrix[ProductGrid], rate: float, *, codes: bool = False) -> None:
        unit: float = 2.0**-rate
        numbers = torch.zeros((), device=matrix.codes.device)
        super().__init__(matrix, numbers, unit, step=min(unit, CODE_UNIT), codes=codes)
        out, mean = len(matrix.codes), matrix.codes.abs().float().mean(0)  # (in,)
        mean = ((out * mean + PRIOR_ROWS * mean.mean()) / (out + PRIOR_ROWS)).clamp(min=1e-4)
        self._price = -(((1 + mean.square()).sqrt() - 1) / mean).log2()  # (in,) bits per |code|, two-sided geometric

    def values(self) -> Tensor:
        """Return (out, in) `row * code * column` exactly as the file will decode."""
        grid = self._rounded_grid()
        column = grid.column_scale()
        column = through(column, column * (self.unit * (self._s - self._s.detach())).exp())
        position = self._position()
        return through(position.detach().round(), position) * grid.row_scale()[:, None] * column

    def _position(self) -> Tensor:
        """Return (out, in) codes as trained, not rounded."""
        return self._codes.float() if self._v is None else self._codes + self._step * self._v

    @torch.no_grad()
    def _rounded_codes(self) -> Tensor:
        return self._short(self._position().round())

    @torch.no_grad()
    def press(self, price: float) -> None:
        """Add the gradient of `price` times the bits of the codes to the gradients of the codes."""
        if self._v is not None and self._v.grad is not None:
            self._v.grad += self._position().mul_(2).clamp_(-1, 1).mul_(price * self._step * self._price)  # towards 0

    @torch.no_grad()
    def bits(self) -> float:
        """Return an estimate of the bits of the codes, up to a constant."""
        return float((self._position().round_().abs_().sum(0) * self._price).sum())

    def _positions(self, W: Tensor) -> Tensor:
        return W / self._grid.row_scale()[:, None] / self._grid.column_scale()

    def _rounded_grid(self) -> ProductGrid:
        return replace(self._grid, base=stored_base(self._grid.base * math.exp(self.unit * float(self._s.detach()))))

    def _short(self, codes: Tensor) -> Tensor:
        """Return codes in two bytes each if all fit, else in four."""
        fits = codes.numel() == 0 or float(codes.abs().max()) < 2**15
        return codes.to(torch.int16 if fits else torch.int32)


class Pressure:
    """Pressure of codes towards 0 by a price for their bits, which rises while the matrices are too large.

    Args:
        matrices: Matrices by name.
        most: Maximum bytes of all matrices.
        format: Layer format that packs them.
        kl: KL of the network at the start, nats per token.
    """

    def __init__(self, matrices: Mapping[str, TunedLadders], most: int, format: LayerFormat, kl: float) -> None:
        self._matrices, self.most, self._format = matrices, most, format
        self._weights = sum(each._codes.numel() for each in matrices.values())
        self._first = self._price = FIRST_PRICE * kl / self._weights
        self._allowed = self._predicted()
        self.measure()

    def next_price(self) -> float:
        """Return the price of a bit in the next step, which `TunedLadders.press` takes."""
        excess = (self._predicted() - self._allowed) / self._weights
        price = self._price * math.exp(PRICE_GAIN * excess)
        self._price = min(max(price, self._first / PRICE_RANGE), self._first * PRICE_RANGE)
        return self._price

    def measure(self) -> int:
        """Return the bytes of all coded matrices, and correct the predictions by them."""
        size = 0
        for name, each in self._matrices.items():
            packed = self._format.pack(name, each.matrix(), torch.float32)
            size += sum(tensor.nbytes for tensor in packed.values())
        self._allowed = self._predicted() + 8 * (SIZE_TARGET * self.most - size)
        return size

    def standing(self) -> dict[str, float]:
        """Return the state for `restore`."""
        return {"price": self._price, "allowed": self._allowed}

    def restore(self, standing: Mapping[str, float]) -> None:
        """Restore the state that `standing` returned."""
        self._price, self._allowed = standing["price"], standing["allowed"]

    def _predicted(self) -> float:
        return sum(each.bits() for each in self._matrices.values())


class TunedVector:
    """Weights of a norm.

    Args:
        weights: (width,) weights in the dtype of the file.
        device: Device of the training.
        unit: Mean relative error of the layers' weights.
    """

    def __init__(self, weights: Tensor, device: torch.device, unit: float) -> None:
        self._storage = weights.dtype
        self._start = weights.to(device, torch.promote_types(weights.dtype, torch.float32))
        size = float(self._start.square().mean().sqrt())
        self._unit = unit * (size if size > 0 else 1.0)
        self._t = torch.zeros(weights.shape, device=device, requires_grad=True)

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self._t.device

    def trained(self) -> dict[str, Tensor]:
        """Return `t` (width,)."""
        return {"norms": self._t}

    def values(self) -> Tensor:
        """Return (width,) weights as stored."""
        weights = self._start + self._unit * self._t
        return through(weights.detach().to(self._storage).to(weights.dtype), weights)

    def tensor(self) -> Tensor:
        """Return (width,) weights in the dtype of the file."""
        return self.values().detach().to(self._storage)

    def state(self) -> dict[str, Tensor]:
        """Return the weights."""
        return {"norms": self.values().detach().clone()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Set the weights to a state, as a new start."""
        self._start = state["norms"]
        with torch.no_grad():
            self._t.zero_()


Tuned = TunedLayer | TunedVector
"""A tensor of the network as a function of its trained tensors."""

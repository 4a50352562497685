"""An entropy-coded matrix as a function of what is trained of it, its base and its codes, and what keeps it as small as it may be.

    value = row * code * column     base = rung(base_0 exp(unit b)),     code = round(code_0 + unit_of_codes v)

`b` and `v` are trained, as `parameters.py` has it: what is rounded is rounded in every forward as the file will hold it, and
gradients pass straight through. Scales of rows and columns stay: finer ladders for them take more bytes than they are worth
(docs/log.md), and what a norm can take over is trained there. Codes have no limits; what keeps them small is `Pressure`, a
price for every bit that they cost. Knows matrices, not networks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from nearplane.coding.blob import stored_base
from nearplane.formats.layer_format import LayerFormat
from nearplane.lattice.grid import ProductGrid, QuantizedMatrix
from nearplane.tuning.parameters import TunedLayer, through

CODE_UNIT = 0.25  # of a step at most: what codes move by, where a rate is low
NOT_SEEN = 8  # rows of a column, as the mean of the matrix has them, that a column's own are taken together with
WORTH = 2 * math.log(2)  # of a bit per weight, over KL: where errors are small a bit more makes a quarter of them
GAIN = 2.0  # by how much the logarithm of the price rises in a step for every bit per weight that is too many
AIM = 0.998  # of the bytes that matrices may take: what is foretold between two looks is off by about a thousandth
RANGE = 16.0  # times its first value, or so much of it, is the price at most and at least


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

    @property
    def weights(self) -> int:
        """How many there are."""
        return self._codes.numel()

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
        self._weights = sum(each.weights for each in matrices.values())
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

"""An entropy-coded matrix as a function of what is trained of it: its base, and its codes.

    value = row * code * column     base = rung(base_0 exp(unit b)),     code = round(code_0 + unit_of_codes v)

`b` and `v` are trained, as `parameters.py` has it: what is rounded is rounded in every forward as the file will hold it, and
gradients pass straight through. Scales of rows and columns stay: finer ladders for them take more bytes than they are worth
(docs/log.md), and what a norm can take over is trained there. Codes have no limits; what keeps them small is what they cost, see
`pressure.py`. Knows matrices, not networks.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from nearplane.coding.blob import stored_base
from nearplane.errors import FormatError
from nearplane.lattice.grid import ProductGrid, QuantizedMatrix
from nearplane.tuning.parameters import LEAN, MOST, through

CODE_UNIT = 0.25  # of a step at most: what codes move by, where a rate is low
NOT_SEEN = 8  # rows of a column, as the mean of the matrix has them, that a column's own are taken together with


class TunedLadders:
    """A matrix on ladders.

    Args:
        name: of the layer, for messages.
        matrix: codes (out, in) and exponents, as read from a file.
        rate: bits per weight that it takes.
        codes: whether codes are trained too; see `lean`.

    Raises:
        FormatError: it is on another kind of grid.
    """

    def __init__(self, name: str, matrix: QuantizedMatrix, rate: float, *, codes: bool = False) -> None:
        grid, (out, width) = matrix.grid, matrix.codes.shape
        if not isinstance(grid, ProductGrid):
            raise FormatError(f"{name}: a {type(grid).__name__}, where scales on ladders were expected.")
        device = matrix.codes.device
        self._grid: ProductGrid = grid
        self._codes = _short(matrix.codes)
        self._unit: float = 2.0**-rate
        self._fine = min(self._unit, CODE_UNIT)
        self._b = torch.zeros((), device=device, requires_grad=True)
        self._v = torch.zeros(out, width, device=device, requires_grad=True) if codes else None
        mean = matrix.codes.abs().float().mean(0)  # (in,)
        mean = ((out * mean + NOT_SEEN * mean.mean()) / (out + NOT_SEEN)).clamp(min=1e-4)
        self._price = -(((1 + mean.square()).sqrt() - 1) / mean).log2()  # (in,) bits, codes two-sided geometric

    @property
    def unit(self) -> float:
        """How far off the weights are, relative: 2^-rate."""
        return self._unit

    @property
    def weights(self) -> int:
        """How many there are."""
        return self._codes.numel()

    @torch.no_grad()
    def lean(self, W: Tensor) -> None:
        """Where codes are trained, let them begin half way to the original weights (out, in), short of where another is nearer."""
        if self._v is not None:
            apart = W / self._grid.row_scale()[:, None] / self._grid.column_scale() - self._codes
            self._v.copy_(apart.mul_(LEAN).clamp_(-MOST, MOST) / self._fine)

    def trained(self) -> dict[str, Tensor]:
        """Return `b` (), and `v` (out, in) where codes are trained."""
        return {"base": self._b} | ({} if self._v is None else {"codes": self._v})

    def values(self) -> Tensor:
        """Return (out, in) `row * code * column`, exactly as the file will decode."""
        grid = self._rounded()
        column = grid.column_scale()
        column = through(column, column * (self._unit * (self._b - self._b.detach())).exp())
        return self._rounded_codes() * grid.row_scale()[:, None] * column

    def matrix(self) -> QuantizedMatrix[ProductGrid]:
        """Return codes and scales as the file will hold them."""
        return QuantizedMatrix(codes=self._rounded_codes().detach().to(torch.int32), grid=self._rounded())

    def state(self) -> dict[str, Tensor]:
        """Return base, and codes where they are trained."""
        found = {"base": torch.tensor(self._rounded().base, dtype=torch.float64)}
        return found if self._v is None else found | {"codes": _short(self._rounded_codes().detach())}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take base, and codes where they are trained, for those to begin with."""
        self._grid = replace(self._grid, base=float(state["base"]))
        with torch.no_grad():
            self._b.zero_()
            if self._v is not None:
                self._codes = state["codes"]
                self._v.zero_()

    def load(self, matrix: QuantizedMatrix) -> None:
        """Take base and codes of a matrix with the same scales of rows and columns, as read from a file."""
        assert isinstance(matrix.grid, ProductGrid), "on the same ladders"
        self._codes = _short(matrix.codes.to(self._codes.device))
        self.restore({"base": torch.tensor(matrix.grid.base, dtype=torch.float64), "codes": self._codes})

    @torch.no_grad()
    def press(self, price: float) -> None:
        """Add to the gradients of codes that of `price` times the bits that they take."""
        if self._v is not None and self._v.grad is not None:
            wanted = self._codes + self._fine * self._v
            self._v.grad += wanted.mul_(2).clamp_(-1, 1).mul_(price * self._fine * self._price)  # towards 0

    @torch.no_grad()
    def bits(self) -> float:
        """Return about how many bits the codes take, less what does not change as they move."""
        return float((self._rounded_codes().abs().sum(0) * self._price).sum())

    def _rounded(self) -> ProductGrid:
        """Return the grid as stored."""
        return replace(self._grid, base=stored_base(self._grid.base * math.exp(self._unit * float(self._b.detach()))))

    def _rounded_codes(self) -> Tensor:
        """Return (out, in) float32 codes."""
        codes = self._codes.float()
        if self._v is None:
            return codes
        wanted = codes + self._fine * self._v
        return through(wanted.detach().round(), wanted)


def _short(codes: Tensor) -> Tensor:
    """Return codes in two bytes each where all fit."""
    fits = codes.numel() == 0 or float(codes.abs().max()) < 2**15
    return codes.to(torch.int16 if fits else torch.int32)

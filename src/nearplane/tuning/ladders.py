"""An entropy-coded matrix as a function of what is trained of it: scales of rows and columns, the base, and codes.

    value = row * code * column     row = 2^(rows / resolution),  column = base * 2^(columns / resolution)
    rows = rung(rows_0 + unit r / ln 2),  columns and base likewise,     code = round(code_0 + unit_codes v)

`r`, `c`, `b` and `v` are trained, as `parameters.py` has it: what is rounded is rounded in every forward as the file will hold it,
and gradients pass straight through. Codes have no limits; what keeps them small is what they cost, see `pressure.py`. Knows
matrices, not networks.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from nearplane.coding.blob import stored_base
from nearplane.coding.header import MAX_EXPONENT
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
        scales: whether scales of rows and columns are, on the ladders that they are on.

    Raises:
        FormatError: it is on another kind of grid.
    """

    def __init__(
        self, name: str, matrix: QuantizedMatrix, rate: float, *, codes: bool = False, scales: bool = False
    ) -> None:
        grid, (out, width) = matrix.grid, matrix.codes.shape
        if not isinstance(grid, ProductGrid):
            raise FormatError(f"{name}: a {type(grid).__name__}, where scales on ladders were expected.")
        device = matrix.codes.device
        self._grid: ProductGrid = grid
        self._codes = _short(matrix.codes)
        self._unit: float = 2.0**-rate
        self._fine = min(self._unit, CODE_UNIT)
        self._b = torch.zeros((), device=device, requires_grad=True)
        self._r = torch.zeros(out, device=device, requires_grad=True) if scales and bool(grid.rows.any()) else None
        self._c = torch.zeros(width, device=device, requires_grad=True) if scales else None
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
        """Return `b` (), and `r` (out,), `c` (in,) and `v` (out, in) where these are trained."""
        found = {"base": self._b, "rows": self._r, "columns": self._c, "codes": self._v}
        return {kind: leaf for kind, leaf in found.items() if leaf is not None}

    def values(self) -> Tensor:
        """Return (out, in) `row * code * column`, exactly as the file will decode."""
        grid = self._rounded()
        octaves = self._unit / math.log(2)
        row, column = grid.row_scale(), grid.column_scale()
        if self._r is not None:
            wanted = torch.exp2(self._grid.rows / self._grid.row_resolution + octaves * self._r)
            row = through(row, wanted)
        wanted = octaves * self._b + self._grid.columns / self._grid.column_resolution
        if self._c is not None:
            wanted = wanted + octaves * self._c
        column = through(column, self._grid.base * torch.exp2(wanted))
        return self._rounded_codes() * row[:, None] * column

    def matrix(self) -> QuantizedMatrix[ProductGrid]:
        """Return codes and scales as the file will hold them."""
        return QuantizedMatrix(codes=self._rounded_codes().detach().to(torch.int32), grid=self._rounded())

    def state(self) -> dict[str, Tensor]:
        """Return codes, exponents and base."""
        grid = self._rounded()
        base = torch.tensor(grid.base, dtype=torch.float64)
        return {
            "codes": _short(self._rounded_codes().detach()),
            "rows": grid.rows,
            "columns": grid.columns,
            "base": base,
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take codes, exponents and base for those to begin with."""
        self._codes = state["codes"]
        self._grid = replace(self._grid, rows=state["rows"], columns=state["columns"], base=float(state["base"]))
        with torch.no_grad():
            for leaf in self.trained().values():
                leaf.zero_()

    def load(self, matrix: QuantizedMatrix) -> None:
        """Take a matrix on the same ladders, as read from a file."""
        matrix = matrix.to(self._codes.device)
        assert isinstance(matrix.grid, ProductGrid), "on the same ladders"
        self._grid = matrix.grid
        base = torch.tensor(matrix.grid.base, dtype=torch.float64)
        rows, columns = matrix.grid.rows, matrix.grid.columns
        self.restore({"codes": _short(matrix.codes), "rows": rows, "columns": columns, "base": base})

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

    @torch.no_grad()
    def _rounded(self) -> ProductGrid:
        """Return the grid as stored."""
        octaves, grid = self._unit / math.log(2), self._grid
        rows = _rungs(grid.rows, self._r, octaves * grid.row_resolution)
        columns = _rungs(grid.columns, self._c, octaves * grid.column_resolution)
        base = stored_base(grid.base * 2.0 ** (octaves * float(self._b)))
        return replace(grid, base=base, rows=rows, columns=columns)

    def _rounded_codes(self) -> Tensor:
        """Return (out, in) float32 codes."""
        codes = self._codes.float()
        if self._v is None:
            return codes
        wanted = codes + self._fine * self._v
        return through(wanted.detach().round(), wanted)


def _rungs(exponents: Tensor, leaf: Tensor | None, unit: float) -> Tensor:
    """Return exponents `unit` times a leaf further on, whole."""
    if leaf is None:
        return exponents
    return (exponents + unit * leaf).round().clamp(-MAX_EXPONENT, MAX_EXPONENT).to(torch.int32)


def _short(codes: Tensor) -> Tensor:
    """Return codes in two bytes each where all fit."""
    fits = codes.numel() == 0 or float(codes.abs().max()) < 2**15
    return codes.to(torch.int16 if fits else torch.int32)

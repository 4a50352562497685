"""Linear layer whose weights stay packed on a device: 4 or 8 bits per code, and a scale for every row and column.

    y = row_scale * (codes @ (column_scale * x)) + bias

A weight takes half a byte if codes lie in -8 ... 7. The layer replaces Linear and Conv1D, which both multiply by an
(out, in) matrix; on the CPU `coded_linear.py` takes its place once its codes are decoded. Many tokens are multiplied by
strips of decoded rows, on any device. On CUDA a few tokens are multiplied by the packed codes themselves, compiled by
Triton, see `product_triton.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from nearplane.coding.packed_matrix import PackedCodes, column_table
from nearplane.errors import FormatError

if TYPE_CHECKING:
    from nearplane.coding.packed_matrix import ColumnGroup, PackedMatrix

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int32]

MAX_STRIP_WEIGHTS = 2**22  # weights decoded at a time


@cache
def _triton() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    from nearplane.loading import product_triton

    return product_triton


PRODUCTS: dict[str, Callable[[], ModuleType | None]] = {"cuda": _triton}


def products_of(device: torch.device) -> ModuleType | None:
    """Return the module of the kernels of a device, as `product_triton`; None: strips are decoded by torch."""
    return PRODUCTS.get(device.type, lambda: None)()


BUFFERS = ("codes", "column_order", "row_place", "column_bits", "row_bits", "patch_start", "patch_at", "patch_delta")


class PackedLinear(nn.Module):
    """`y = x @ values.T + bias` with packed (out, in) values; empty until `fill`.

    Args:
        in_features, out_features: Width and height of the matrix.
        bias: Whether the layer has a bias.
        dtype: Dtype of the bias, and of `weight`.
        device: Device of the bias.

    Attributes:
        codes: (bytes,) uint8: row after row of each group of columns, in the order of `column_order` and sorted rows.
        column_order: (in,) int32 column of x at each position.
        row_place: (out,) int32 position of each row of the matrix.
        column_bits, row_bits: (in,), (out,) scales by position, float32 seen as int32 so that no cast of the module
            rounds them.
        patch_start, patch_at, patch_delta: (out + 1,), (patches,) int32, (patches,) int64: corrections of codes that do
            not fit in nibbles or bytes, by position of the row; `patch_at` is the position of the column.
    """

    bias: nn.Parameter | None
    codes: Tensor
    column_order: Tensor
    row_place: Tensor
    column_bits: Tensor
    row_bits: Tensor
    patch_start: Tensor
    patch_at: Tensor
    patch_delta: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self.groups: tuple[ColumnGroup, ...] = ()
        self._patches_before = np.empty(0, np.int32)  # `patch_start` on the host: forward passes wait for no device
        self._tables = torch.empty(0), torch.empty(0)  # `groups` and columns on a device with kernels
        empty = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device), requires_grad=False)
        self.bias = empty if bias else None
        for name in BUFFERS:
            self.register_buffer(name, None)

    def fill(self, packed: PackedMatrix, device: torch.device | str | None = None) -> None:
        """Store the codes and scales of a decoded matrix.

        Raises:
            FormatError: The matrix has another shape than the layer.
        """
        if tuple(packed.shape) != (self.out_features, self.in_features):
            raise FormatError(
                f"A matrix of shape {tuple(packed.shape)} does not fit a layer of {(self.out_features, self.in_features)}."
            )
        self.groups = packed.groups
        orders = packed.orders.rows, packed.orders.columns
        row_place, column_place = (np.argsort(order).astype(np.int32) for order in orders)
        rows = row_place[packed.patches.rows]
        by_row = np.argsort(rows, kind="stable")
        patch_start = np.searchsorted(rows[by_row], np.arange(self.out_features + 1)).astype(np.int32)
        buffers = {
            "column_order": packed.orders.columns,
            "row_place": row_place,
            "column_bits": packed.scales.column_scale[packed.orders.columns].view(np.int32),
            "row_bits": packed.scales.row_scale[packed.orders.rows].view(np.int32),
            "patch_start": patch_start,
            "patch_at": column_place[packed.patches.columns[by_row]],
            "patch_delta": packed.patches.delta[by_row],
        }
        self._patches_before = patch_start
        self.codes = torch.as_tensor(packed.codes).to(device)
        for name, array in buffers.items():
            setattr(self, name, torch.from_numpy(np.ascontiguousarray(array)).to(device))
        if products_of(self.codes.device) is not None:
            self._make_tables(packed.orders.columns)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product (..., out) for an input `x` (..., in), in its dtype."""
        if self.codes is None:
            raise FormatError("This layer has no weights yet. Load them with nearplane.load or from_pretrained.")
        flat = x.reshape(-1, self.in_features)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        kernels = products_of(flat.device)
        plain = x.dtype != torch.float64 and not (torch.is_grad_enabled() and x.requires_grad)
        if kernels is not None and plain and 0 < len(flat) <= kernels.MAX_PRODUCT_ROWS:
            y: Tensor = kernels.product(flat, self._packed_codes(), bias)
        else:
            sorted_x = flat if kernels is not None else flat.index_select(1, self.column_order)
            strips = self._strips() if kernels is None else self._ordered_strips(kernels, x.dtype)
            y = torch.cat([nn.functional.linear(sorted_x, strip.to(x.dtype)) for strip in strips], dim=1)
            y = y if kernels is not None else y.index_select(1, self.row_place)
            y = y if bias is None else y + bias
        return y.reshape(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """The (out, in) values in the layer's dtype, decoded at each access; no elements while the layer is empty."""
        if self.codes is None:
            nothing = torch.empty(0, dtype=self.dtype)
            nothing._is_hf_initialized = True  # some models initialise weights of their layers
            return nothing
        if (kernels := products_of(self.codes.device)) is not None:
            return torch.cat(list(self._ordered_strips(kernels, self.dtype)))
        strips = torch.cat(list(self._strips()))
        return strips.index_select(0, self.row_place).index_select(1, self.column_order.argsort()).to(self.dtype)

    def extra_repr(self) -> str:
        """Return the sizes as Linear does."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _strips(self) -> Iterator[Tensor]:
        """Yield (rows, in) float32 values strip by strip, rows and columns by position."""
        column_scale, row_scale = self.column_bits.view(torch.float32), self.row_bits.view(torch.float32)
        rows = max(1, MAX_STRIP_WEIGHTS // max(1, self.in_features))
        for a in range(0, self.out_features, rows):
            b = min(a + rows, self.out_features)
            yield self._codes(a, b).mul_(row_scale[a:b, None]).mul_(column_scale)

    def _ordered_strips(self, kernels: ModuleType, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield (rows, in) values strip by strip, in the order of the matrix, by the kernels of a device."""
        packed, rows = self._packed_codes(), max(1, kernels.MAX_STRIP_WEIGHTS // max(1, self.in_features))
        for a in range(0, self.out_features, rows):
            yield kernels.values(packed, a, min(a + rows, self.out_features), dtype)

    def _packed_codes(self) -> PackedCodes:
        """Return what kernels of a device read."""
        if self._tables[0].device != self.codes.device:  # the layer was moved after it was filled
            self._make_tables(self.column_order.cpu().numpy())
        column_scale, row_scale = self.column_bits.view(torch.float32), self.row_bits.view(torch.float32)
        patches = self.patch_start, self.patch_at, self.patch_delta
        return PackedCodes(
            self.codes, column_scale, row_scale, *patches, self.column_order, self.row_place, *self._tables
        )

    def _make_tables(self, column_order: Integers) -> None:
        groups = np.array(self.groups, np.int64), column_table(self.groups, column_order)
        self._tables = (
            torch.from_numpy(groups[0]).to(self.codes.device),
            torch.from_numpy(groups[1]).to(self.codes.device),
        )

    def _codes(self, a: int, b: int) -> Tensor:
        """Return (b - a, in) codes of the rows at positions a ... b - 1 as float32, columns by position."""
        codes = torch.empty(b - a, self.in_features, device=self.codes.device, dtype=torch.float32)
        for start, stop, nibbles, first, width in self.groups:
            block = self.codes[first + a * width : first + b * width].view(b - a, width)
            if nibbles:
                codes[:, start:stop:2] = block & 15
                codes[:, start + 1 : stop : 2] = (block >> 4)[:, : (stop - start) // 2]
                codes[:, start:stop] -= 8
            else:
                codes[:, start:stop] = block.view(torch.int8)
        if self.patch_at.numel():
            first, last = int(self._patches_before[a]), int(self._patches_before[b])
            counts = self.patch_start[a + 1 : b + 1] - self.patch_start[a:b]
            rows = torch.arange(b - a, device=codes.device).repeat_interleave(counts, output_size=last - first)
            at = rows, self.patch_at[first:last].long()
            codes[at] = (codes[at].long() + self.patch_delta[first:last]).float()  # rounded at most once
        return codes

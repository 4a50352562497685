"""A linear layer whose weights stay packed: 4 or 8 bits a code, and a scale for every row and column.

    y = row_scale * (codes @ (column_scale * x)) + bias

Takes half a byte a weight where codes lie in -8 ... 7. Serves Linear and Conv1D alike: both multiply by an (out, in)
matrix. Many tokens are multiplied by strips of decoded rows, on any device; a few on the CPU by the packed codes
themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from nearplane.errors import FormatError
from nearplane.loading.packed_product import GroupBytes, PackedCodes, products

if TYPE_CHECKING:
    from nearplane.coding.packed_matrix import PackedMatrix

MAX_STRIP_WEIGHTS = 2**22  # weights decoded at a time
MAX_PACKED_PRODUCT_ROWS = 16  # rows of x, up to which the CPU multiplies packed codes


class PackedLinear(nn.Module):
    """`y = x @ values.T + bias` with packed (out, in) values; empty until `fill`.

    Args:
        in_features, out_features: of the matrix.
        bias: whether there is one.
        dtype: of the bias, and of `weight`.
        device: of the bias.

    Attributes:
        codes: (bytes,) uint8: row after row of each group of columns, in the order of `column_order` and sorted rows.
        column_order: (in,) int32 which column of x stands at each position.
        row_place: (out,) int32 at which position each row of the matrix stands.
        column_bits, row_bits: (in,), (out,) scales by position, float32 seen as int32 so that no cast of the module
            rounds them.
        patch_start, patch_at, patch_delta: (out + 1,), (patches,) int32, (patches,) int64: what is added to codes that
            nibbles or bytes do not hold, by position of the row; `patch_at` is the position of the column.
    """

    BUFFERS = (
        "codes",
        "column_order",
        "row_place",
        "column_bits",
        "row_bits",
        "patch_start",
        "patch_at",
        "patch_delta",
    )

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
        self.groups: tuple[GroupBytes, ...] = ()
        empty = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device), requires_grad=False)
        self.bias = empty if bias else None
        for name in self.BUFFERS:
            self.register_buffer(name, None)

    @classmethod
    def of(
        cls, packed: PackedMatrix, bias: Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> PackedLinear:
        """Return a filled module."""
        out, columns = packed.shape
        module = cls(columns, out, bias=bias is not None, dtype=dtype)
        if bias is not None:
            module.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
        module.fill(packed)
        return module

    def fill(self, packed: PackedMatrix, device: torch.device | str | None = None) -> None:
        """Take the codes and scales of a decoded matrix.

        Raises:
            FormatError: its shape is another one.
        """
        if tuple(packed.shape) != (self.out_features, self.in_features):
            raise FormatError(f"A matrix {tuple(packed.shape)} for a layer {(self.out_features, self.in_features)}.")
        groups, offset = [], 0
        for group in packed.groups:
            width = group.array.shape[1]
            groups.append(GroupBytes(group.start, group.stop, group.nibbles, offset, width))
            offset += group.array.size
        self.groups = tuple(groups)
        arrays = [group.array.reshape(-1).view(np.uint8) for group in packed.groups]
        row_place, column_place = _inverse(packed.row_order), _inverse(packed.column_order)
        rows = row_place[packed.patch_rows]
        by_row = np.argsort(rows, kind="stable")
        buffers = {
            "codes": _joined(arrays),
            "column_order": packed.column_order,
            "row_place": row_place,
            "column_bits": packed.column_scale[packed.column_order].view(np.int32),
            "row_bits": packed.row_scale[packed.row_order].view(np.int32),
            "patch_start": np.searchsorted(rows[by_row], np.arange(self.out_features + 1)).astype(np.int32),
            "patch_at": column_place[packed.patch_columns[by_row]],
            "patch_delta": packed.patch_delta[by_row],
        }
        for name, array in buffers.items():
            setattr(self, name, torch.from_numpy(np.ascontiguousarray(array)).to(device))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply (..., in) `x`; returns (..., out) in its dtype."""
        if self.codes is None:
            raise FormatError("This layer holds no weights yet: it is filled when its model is loaded.")
        flat = x.reshape(-1, self.in_features)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        few = len(flat) <= MAX_PACKED_PRODUCT_ROWS and flat.device.type == "cpu" and x.dtype != torch.float64
        if few and not (torch.is_grad_enabled() and x.requires_grad):
            y = self._product(flat, bias)
        else:
            sorted_x = flat.index_select(1, self.column_order)
            y = torch.cat([nn.functional.linear(sorted_x, strip.to(x.dtype)) for strip in self._strips()], dim=1)
            y = y.index_select(1, self.row_place)
            y = y if bias is None else y + bias
        return y.reshape(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """The (out, in) values in the layer's dtype, decoded anew; nothing while the layer is empty."""
        if self.codes is None:
            nothing = torch.empty(0, dtype=self.dtype)
            nothing._is_hf_initialized = True  # some models initialise weights of their layers
            return nothing
        strips = torch.cat(list(self._strips()))
        column_place = torch.empty_like(self.column_order)
        column_place[self.column_order] = torch.arange(self.in_features, dtype=torch.int32, device=column_place.device)
        return strips.index_select(0, self.row_place).index_select(1, column_place).to(self.dtype)

    def extra_repr(self) -> str:
        """Describe sizes, as Linear does."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _strips(self) -> Iterator[Tensor]:
        """Yield (rows, in) float32 values strip by strip, rows and columns by position."""
        column_scale, row_scale = self.column_bits.view(torch.float32), self.row_bits.view(torch.float32)
        rows = max(1, MAX_STRIP_WEIGHTS // max(1, self.in_features))
        for a in range(0, self.out_features, rows):
            b = min(a + rows, self.out_features)
            yield self._codes(a, b).mul_(row_scale[a:b, None]).mul_(column_scale)

    def _codes(self, a: int, b: int) -> Tensor:
        """Return (b - a, in) codes as float32, of the rows at positions a ... b, columns by position."""
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
            first, last = int(self.patch_start[a]), int(self.patch_start[b])
            counts = self.patch_start[a + 1 : b + 1] - self.patch_start[a:b]
            rows = torch.arange(b - a, device=codes.device).repeat_interleave(counts)
            at = rows, self.patch_at[first:last].long()
            codes[at] = (codes[at].long() + self.patch_delta[first:last]).float()  # rounded once, if at all
        return codes

    def packed_codes(self) -> PackedCodes:
        """Return the codes as compiled functions take them; on the CPU."""
        groups = np.array(self.groups, np.int64).reshape(-1, 5)
        patches = (part.numpy() for part in (self.patch_start, self.patch_at, self.patch_delta))
        return PackedCodes(self.codes.numpy(), groups, *patches)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return (tokens, out): x times the packed codes, on the CPU."""
        scaled = x.detach().float().index_select(1, self.column_order) * self.column_bits.view(torch.float32)
        packed = self.packed_codes()
        y = torch.from_numpy(products(scaled.numpy(), packed))
        y = (y * self.row_bits.view(torch.float32)).index_select(1, self.row_place)
        return (y if bias is None else y + bias).to(x.dtype)


def _inverse(order: Any) -> Any:
    """Return the int32 permutation that undoes `order`."""
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    return place


def _joined(arrays: list[Any]) -> Any:
    """Return (bytes,) arrays one after the other; not copied if they lie so in memory, as a decoder leaves them."""
    ends = [array.ctypes.data + array.size for array in arrays[:-1]]
    if (
        arrays
        and ends == [array.ctypes.data for array in arrays[1:]]
        and len({id(array.base) for array in arrays}) == 1
    ):
        whole = arrays[0].base
        first = arrays[0].ctypes.data - whole.ctypes.data
        return whole.reshape(-1).view(np.uint8)[first : first + sum(array.size for array in arrays)]
    return np.concatenate(arrays) if arrays else np.empty(0, np.uint8)

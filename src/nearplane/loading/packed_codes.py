"""What kernels of a device read of a packed matrix; see `packed_linear.py`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PackedCodes(NamedTuple):
    """The codes of a matrix for kernels of a device; by position of row and column but for the last three."""

    codes: Tensor  # (bytes,) uint8
    column_scale: Tensor  # (in,) float32
    row_scale: Tensor  # (out,) float32
    patch_start: Tensor  # (out + 1,) int32
    patch_at: Tensor  # (patches,) int32
    patch_delta: Tensor  # (patches,) int64
    column_order: Tensor  # (in,) int32 column at each position
    row_place: Tensor  # (out,) int32 position of each row
    groups: Tensor  # (groups, 5) int64 fields of `ColumnGroup`
    columns: Tensor  # (4, in) int64 see `column_table`

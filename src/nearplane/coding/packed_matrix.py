"""Decoded matrix in the form of a runtime: nibbles or int8 by groups of columns, and patches for other codes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearplane.coding.chunk import Patches
from nearplane.coding.layout import Layout
from nearplane.compiled import compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnGroup:
    """Neighbouring columns of `PackedMatrix.column_order` that are stored in the same way.

    Args:
        start, stop: Positions in the column order.
        nibbles: Whether a byte holds two codes + 8, the first column low; a last odd column is paired with 8, code 0.
        array: (out, ceil((stop - start) / 2)) uint8, or (out, stop - start) int8; rows in the row order.
    """

    start: int
    stop: int
    nibbles: bool
    array: NDArray[np.uint8] | NDArray[np.int8]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """A decoded matrix for multiplication: codes in groups of columns, scales and patches.

        value[i, j] = row_scale[i] * code[i, j] * column_scale[j]

    Rows and columns of scales and patches are those of the matrix.

    Args:
        shape: (out, in) of the matrix.
        column_order: (in,) column at each position.
        row_order: (out,) row at each position.
        groups: Groups that cover the column order.
        patch_rows, patch_columns, patch_delta: (patches,) places of single codes, and numbers to add there.
        column_scale: (in,) float32 scales of the columns.
        row_scale: (out,) float32 scales of the rows.
    """

    shape: tuple[int, int]
    column_order: NDArray[np.int32]
    row_order: NDArray[np.int32]
    groups: list[ColumnGroup]
    patch_rows: NDArray[np.int32]
    patch_columns: NDArray[np.int32]
    patch_delta: NDArray[np.int64]
    column_scale: NDArray[np.float32]
    row_scale: NDArray[np.float32]


@compiled()
def _fits(symbols: NDArray[np.uint8]) -> bool:
    for block in range(0, len(symbols), 1024):
        outside = np.uint8(0)
        for symbol in symbols[block : block + 1024]:
            outside |= np.uint8(symbol + np.uint8(8)) & np.uint8(240)
        if outside:
            return False
    return True


@compiled()
def _nibbles(symbols: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    for i in range(symbols.shape[0]):
        width = symbols.shape[1]
        for j in range(width >> 1):
            out[i, j] = ((symbols[i, 2 * j] + 8) & 15) | ((symbols[i, 2 * j + 1] + 8) & 15) << 4
        if width & 1:
            out[i, width >> 1] = ((symbols[i, width - 1] + 8) & 15) | 128


def pack(
    layout: Layout,
    symbols: NDArray[np.uint8],
    patches: Patches,
    column_scale: NDArray[np.float32],
    row_scale: NDArray[np.float32],
) -> PackedMatrix:
    """Return a packed matrix that shares the decoder's symbols; groups of bytes that fit are packed to nibbles."""
    out = len(layout.orders.rows)
    groups = []
    for g in range(len(layout.groups.starts)):
        start, stop = int(layout.groups.starts[g]), int(layout.groups.stops[g])
        part = symbols[layout.groups.offsets[g] : layout.groups.offsets[g + 1]]
        array = part.reshape(out, -1)
        nibbles = bool(layout.groups.pairs[g])
        if not nibbles and _fits(part):
            packed = np.empty((out, (stop - start + 1) // 2), np.uint8)
            _nibbles(array, packed)
            array, nibbles = packed, True
        groups.append(
            ColumnGroup(start=start, stop=stop, nibbles=nibbles, array=array if nibbles else array.view(np.int8))
        )
    return PackedMatrix(
        shape=(out, len(layout.orders.columns)),
        column_order=layout.orders.columns,
        row_order=layout.orders.rows,
        groups=groups,
        patch_rows=patches.rows,
        patch_columns=patches.columns,
        patch_delta=patches.delta,
        column_scale=column_scale,
        row_scale=row_scale,
    )

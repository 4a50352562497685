"""Decoded matrix in the form of a runtime: nibbles or int8 by groups of columns, and patches for other codes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearplane.coding.chunk import Patches
from nearplane.coding.layout import Layout, Orders
from nearplane.coding.scales import Scales
from nearplane.compiled import compiled

if TYPE_CHECKING:
    from torch import Tensor


class ColumnGroup(NamedTuple):
    """Neighbouring columns of `PackedMatrix.orders` whose codes are stored in the same way, row after row.

    A byte holds two codes + 8, the first column low, or one code as int8. A last odd column is paired with 8, code 0.
    """

    start: int  # position of the first column
    stop: int  # position after the last
    nibbles: bool  # whether a byte holds two codes
    first_byte: int  # of the group's first row
    row_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """A decoded matrix for multiplication: codes in groups of columns, scales and patches.

        value[i, j] = row_scale[i] * code[i, j] * column_scale[j]

    Rows and columns of scales and patches are those of the matrix.

    Args:
        orders: Row and column at each position.
        codes: (bytes,) uint8 on the CPU or a device: row after row of each group, rows in the row order.
        groups: Groups that cover the column order.
        patches: Places of single codes, and numbers to add there.
        scales: Scales of the rows and columns.
    """

    orders: Orders
    codes: NDArray[np.uint8] | Tensor
    groups: tuple[ColumnGroup, ...]
    patches: Patches
    scales: Scales

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the matrix."""
        return len(self.orders.rows), len(self.orders.columns)


class PackedCodes(NamedTuple):
    """What kernels of a device read of a packed matrix; by position of row and column but for the last three."""

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
    scales: Scales,
) -> PackedMatrix:
    """Return a packed matrix that shares the decoder's symbols unless a group of bytes is packed to nibbles."""
    out = len(layout.orders.rows)
    parts = [symbols[begin:end] for begin, end in itertools.pairwise(layout.groups.offsets)]
    repacked = [not pairs and _fits(part) for part, pairs in zip(parts, layout.groups.pairs, strict=True)]
    groups = column_groups(layout, np.array(repacked))
    for g in np.flatnonzero(repacked):
        array = np.empty((out, groups[g].row_bytes), np.uint8)
        _nibbles(parts[g].reshape(out, -1), array)
        parts[g] = array.reshape(-1)
    codes = np.concatenate(parts) if any(repacked) else symbols
    return PackedMatrix(orders=layout.orders, codes=codes, groups=groups, patches=patches, scales=scales)


def part(matrix: PackedMatrix, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> PackedMatrix:
    """Return the matrix of some rows and columns, both ascending; its codes are on the CPU unless all are kept."""
    if (len(rows), len(columns)) == matrix.shape:
        return matrix
    new_row, new_column = (np.full(count, -1, np.int32) for count in matrix.shape)
    new_row[rows], new_column[columns] = np.arange(len(rows)), np.arange(len(columns))
    codes = matrix.codes if isinstance(matrix.codes, np.ndarray) else matrix.codes.cpu().numpy()
    row_order, column_order = new_row[matrix.orders.rows], new_column[matrix.orders.columns]
    groups, blocks, start, at = list[ColumnGroup](), [np.empty(0, np.uint8)], 0, 0
    for group in matrix.groups:
        kept = np.flatnonzero(column_order[group.start : group.stop] >= 0)
        block = codes[group.first_byte :][: group.row_bytes * len(row_order)].reshape(len(row_order), -1)[
            row_order >= 0
        ]
        if group.nibbles:
            halves = np.full((len(block), len(kept) + len(kept) % 2), 8, np.uint8)
            halves[:, : len(kept)] = np.stack([block & 15, block >> 4], axis=2).reshape(len(block), -1)[:, kept]
            block = halves[:, ::2] | halves[:, 1::2] << 4
        else:
            block = block[:, kept]
        if len(kept):
            groups.append(ColumnGroup(start, start + len(kept), group.nibbles, at, block.shape[1]))
            blocks.append(block.reshape(-1).astype(np.uint8, copy=False))
            start, at = start + len(kept), at + block.size
    patch_rows, patch_columns = new_row[matrix.patches.rows], new_column[matrix.patches.columns]
    inside = (patch_rows >= 0) & (patch_columns >= 0)
    return PackedMatrix(
        orders=Orders(row_order[row_order >= 0], column_order[column_order >= 0]),
        codes=np.concatenate(blocks),
        groups=tuple(groups),
        patches=Patches(patch_rows[inside], patch_columns[inside], matrix.patches.delta[inside]),
        scales=replace(matrix.scales, rows=matrix.scales.rows[rows], columns=matrix.scales.columns[columns]),
    )


def column_groups(layout: Layout, repacked: NDArray[np.bool_]) -> tuple[ColumnGroup, ...]:
    """Return the groups of a packed matrix.

    Args:
        repacked: (groups,) whether the bytes of a group are packed to nibbles.
    """
    groups, at = [], 0
    for start, stop, pairs, packed in zip(*layout.groups[1:], repacked, strict=True):
        nibbles = bool(pairs or packed)
        width = int(stop - start + 1) // 2 if nibbles else int(stop - start)
        groups.append(ColumnGroup(int(start), int(stop), nibbles, at, width))
        at += width * len(layout.orders.rows)
    return tuple(groups)


def column_table(groups: Sequence[ColumnGroup], column_order: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return (4, in) of each column: its byte in the first row; bytes of a row; how a byte holds its code; its position.

    Bytes hold codes as int8 (0), in the low nibble (1) or in the high one (2).
    """
    table = np.empty((4, len(column_order)), np.int64)
    for start, stop, nibbles, first_byte, row_bytes in groups:
        within, columns = np.arange(stop - start), column_order[start:stop]
        table[0, columns] = first_byte + (within >> 1 if nibbles else within)
        table[1, columns] = row_bytes
        table[2, columns] = 1 + (within & 1) if nibbles else 0
        table[3, columns] = start + within
    return table

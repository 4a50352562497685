"""The header of a coded matrix: its fields, their bounds, and the levels that columns and rows have by them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearplane.coding import frequency_tables

VERSION = 2
TANS = 0  # number of the coder
MAX_WEIGHTS_PER_BYTE = 1 << 14  # weights per byte: no encoder reaches that, so a blob that claims it is refused
MAX_COLUMN_LEVEL = 40  # a column's level is clamped to -40 ... 40
MAX_ROW_LEVEL = 8  # a row's lies within -8 ... 8
MAX_EXPONENT = 1 << 15  # bound on the exponents of scales
MAX_SIDE = 1 << 28  # bound on rows and on columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """All that precedes the codes: scales, and which table codes each column and row.

    Levels are steps of 16/level_resolution sixteenths of an octave of spread.
    """

    shape: tuple[int, int]
    base: int  # u16 of the ladder 2 ** ((base - 32768) / 256)
    column_resolution: int
    row_resolution: int
    columns: NDArray[np.int32]  # (in,)
    rows: NDArray[np.int32]  # (out,)
    spread: int = 0
    mixture: int = 0  # shape of the family
    slope: int = 0  # quarters: how many levels a column's exponent predicts
    level_resolution: int = 1  # 1, 2, 4, 8
    row_level_resolution: int = 1
    corrections: NDArray[np.int32] = field(repr=False)  # (in,) of the predicted levels
    row_levels: NDArray[np.int32] = field(repr=False)  # (out,)
    pairs: int = 0  # groups, from the lowest level on, whose symbols are pairs
    stored: dict[int, NDArray[np.uint16]] = field(default_factory=dict)  # spread -> frequencies, where not the family's

    def column_levels(self) -> NDArray[np.int64]:
        """Return the level of every column (in,)."""
        predicted = predict(self.columns, self.column_resolution, self.slope, self.level_resolution)
        levels: NDArray[np.int64] = np.clip(predicted + self.corrections, -MAX_COLUMN_LEVEL, MAX_COLUMN_LEVEL)
        return levels

    def spread_of(self, column_level: NDArray[Any] | int, row_level: NDArray[Any] | int) -> NDArray[np.int64]:
        """Return the spreads of cells, the index of their tables in the family."""
        step, row_step = 16 // self.level_resolution, 16 // self.row_level_resolution
        spreads: NDArray[np.int64] = self.spread + step * np.asarray(column_level) + row_step * np.asarray(row_level)
        return spreads.clip(0, frequency_tables.SPREADS - 1)


def predict(columns: NDArray[np.int32], resolution: int, slope: int, level_resolution: int) -> NDArray[np.int64]:
    """Return the levels (in,) that exponents predict: -(exponent - centre) * slope/4 octaves, rounded half up."""
    middle = np.partition(columns, (len(columns) - 1) // 2)[(len(columns) - 1) // 2]
    doubled = -2 * (columns.astype(np.int64) - int(middle)) * slope * level_resolution
    return (doubled + 4 * resolution) // (8 * resolution)

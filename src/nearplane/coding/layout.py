"""Header of a coded matrix, and the layout derived from it: order of the symbols, tables and chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearplane.coding import frequency_tables
from nearplane.coding.bit_stream import centre_of
from nearplane.coding.scales import Scales

VERSION = 2
TANS = 0  # number of the coder
MAX_WEIGHTS_PER_BYTE = 1 << 14  # no encoder reaches this, so blobs that claim more are refused
MAX_COLUMN_LEVEL = 40  # a column's level is clamped to -40 ... 40
MAX_ROW_LEVEL = 8  # a row's level lies within -8 ... 8
MAX_SIDE = 1 << 28  # bound on rows and on columns
SPREADS_PER_OCTAVE = 16  # tables for each doubling of the codes
CHUNK_SYMBOLS = 1 << 17  # approximate number of symbols per chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Everything before the codes: scales, and the table of each column and row.

    Levels are in units of 16/level_resolution sixteenths of an octave of spread.
    """

    shape: tuple[int, int]
    scales: Scales
    spread: int = 0
    mixture: int = 0  # shape of the family
    slope: int = 0  # quarters of an octave of spread that a column's exponent predicts per octave
    level_resolution: int = 1  # 1, 2, 4, 8
    row_level_resolution: int = 1
    corrections: NDArray[np.int32] = field(repr=False)  # (in,) added to the predicted levels
    row_levels: NDArray[np.int32] = field(repr=False)  # (out,)
    pairs: int = 0  # groups, from the lowest level on, whose symbols are pairs
    stored: dict[int, NDArray[np.uint16]] = field(default_factory=dict)  # spread -> frequencies, if not the family's

    def column_levels(self) -> NDArray[np.int64]:
        """Return the level of every column (in,)."""
        return clipped(self.predicted(self.slope, self.level_resolution) + self.corrections)

    def predicted(self, slope: int, level_resolution: int) -> NDArray[np.int64]:
        """Return the levels (in,) that exponents predict: -(exponent - centre) * slope/4 octaves, rounded half up."""
        columns, resolution = self.scales.columns, self.scales.column_resolution
        doubled = -2 * (columns.astype(np.int64) - centre_of(columns)) * slope * level_resolution
        return (doubled + 4 * resolution) // (8 * resolution)

    def table(self, spread: int) -> NDArray[np.uint16]:
        """Return the frequencies (256,) of single codes of a spread: the stored ones, or the family's."""
        stored = self.stored.get(spread)
        return frequency_tables.parametric(spread, self.mixture) if stored is None else stored

    def spread_of(self, column_level: NDArray[Any] | int, row_level: NDArray[Any] | int) -> NDArray[np.int64]:
        """Return the spreads of cells, which are the indices of their tables in the family."""
        step, row_step = SPREADS_PER_OCTAVE // self.level_resolution, SPREADS_PER_OCTAVE // self.row_level_resolution
        spreads: NDArray[np.int64] = self.spread + step * np.asarray(column_level) + row_step * np.asarray(row_level)
        return spreads.clip(0, frequency_tables.SPREADS - 1)


def clipped(levels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return levels of columns, those out of range replaced by the nearest in it."""
    return levels.clip(-MAX_COLUMN_LEVEL, MAX_COLUMN_LEVEL)


class Groups(NamedTuple):
    """Groups of columns of one level; the symbols of a group are contiguous."""

    offsets: NDArray[np.int64]  # (groups + 1,) first symbol of every group, and the end
    starts: NDArray[np.int64]  # (groups,) first column, a position in the column order
    stops: NDArray[np.int64]  # (groups,) the column after the last
    pairs: NDArray[np.bool_]  # (groups,) whether a symbol holds two columns


class Orders(NamedTuple):
    """Row and column of the matrix at each position of the order."""

    rows: NDArray[np.int32]  # (out,)
    columns: NDArray[np.int32]  # (in,)


class Cells(NamedTuple):
    """Runs of symbols that share a table: a group of columns in a class of rows."""

    edges: NDArray[np.int64]  # (cells + 1,) first symbol of every cell, and the end
    tables: NDArray[np.int64]  # (cells,) index into the keys of the layout


class Layout(NamedTuple):
    """The order of the symbols: groups of columns of one level, in them classes of rows of one level, row by row."""

    groups: Groups
    orders: Orders
    cells: Cells
    tags: NDArray[np.int64]  # (tables,) increasing: twice the spread, and 1 where symbols are pairs

    @property
    def keys(self) -> list[tuple[int, bool]]:
        """Spread, and whether symbols are pairs, of every table that occurs, in increasing order."""
        return [(int(tag) >> 1, bool(tag & 1)) for tag in self.tags]

    @property
    def total(self) -> int:
        """Number of symbols of the matrix."""
        return int(self.groups.offsets[-1])


def lay_out(header: Header) -> Layout:
    """Derive the order of the symbols from the header; all readers must derive the same order."""
    levels, row_levels = header.column_levels(), header.row_levels
    orders = Orders(
        rows=np.argsort(row_levels, kind="stable").astype(np.int32),
        columns=np.argsort(levels, kind="stable").astype(np.int32),
    )
    unique_levels = np.unique(levels)
    starts = np.searchsorted(levels[orders.columns], unique_levels)
    stops = np.append(starts[1:], len(levels))
    row_classes, sizes = np.unique(row_levels, return_counts=True)
    pairs = np.arange(len(unique_levels)) < header.pairs
    widths = np.where(pairs, (stops - starts + 1) // 2, stops - starts)  # (groups,) symbols of a row
    groups = Groups(
        offsets=np.concatenate([[0], np.cumsum(widths * header.shape[0])]).astype(np.int64),
        starts=starts.astype(np.int64),
        stops=stops.astype(np.int64),
        pairs=pairs,
    )
    spreads = header.spread_of(unique_levels[:, None], row_classes.astype(np.int64)[None, :])  # (groups, classes)
    tags, tables = np.unique((spreads * 2 + pairs[:, None]).reshape(-1), return_inverse=True)
    counts = (widths[:, None] * sizes[None, :]).reshape(-1)
    edges = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    cells = Cells(edges=edges, tables=tables.reshape(-1).astype(np.int64))
    return Layout(groups=groups, orders=orders, cells=cells, tags=tags)


def chunk_edges(total: int) -> list[int]:
    """Return the first symbol of each chunk and the end; all chunks have nearly the same length."""
    chunks = max(1, (total + CHUNK_SYMBOLS // 2) // CHUNK_SYMBOLS)
    return [i * total // chunks for i in range(chunks + 1)]


def frequencies(header: Header, layout: Layout) -> NDArray[np.uint16]:
    """Return the frequencies (tables, 256) used by the coder, in the order of the layout's keys."""
    tables = np.empty((len(layout.keys), 256), np.uint16)
    for row, (spread, pairs) in zip(tables, layout.keys, strict=True):
        row[:] = frequency_tables.paired(header.table(spread)) if pairs else header.table(spread)
    return tables

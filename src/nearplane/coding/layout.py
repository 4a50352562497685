"""The order of the symbols of a coded matrix, its tables and its chunks: what follows from a header by rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearplane.coding import frequency_tables
from nearplane.coding.blob_header import Header

CHUNK_SYMBOLS = 1 << 17  # symbols of a chunk, about


class Groups(NamedTuple):
    """Groups of columns of one level: the symbols of a group stand together."""

    offsets: NDArray[np.int64]  # (groups + 1,) first symbol of every group, and the end
    starts: NDArray[np.int64]  # (groups,) first column, a position in the column order
    stops: NDArray[np.int64]  # (groups,) the column after the last
    pairs: NDArray[np.bool_]  # (groups,) whether a symbol is two columns


class Orders(NamedTuple):
    """Which row and column of the matrix stands at each position."""

    rows: NDArray[np.int32]  # (out,)
    columns: NDArray[np.int32]  # (in,)


class Cells(NamedTuple):
    """Runs of symbols that share a table: a group of columns in a class of rows."""

    edges: NDArray[np.int64]  # (cells + 1,) first symbol of every cell, and the end
    tables: NDArray[np.int64]  # (cells,) index into the keys of the layout


class Traversal(NamedTuple):
    """The order of the symbols, as compiled functions take it."""

    groups: Groups
    orders: Orders
    cells: Cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The order of the symbols: groups of columns of one level, in them classes of rows of one level, row by row."""

    traversal: Traversal
    keys: list[tuple[int, bool]]  # (spread, whether symbols are pairs) of every table that occurs, in increasing order

    @property
    def groups(self) -> Groups:
        """Groups of columns."""
        return self.traversal.groups

    @property
    def orders(self) -> Orders:
        """Orders of rows and columns."""
        return self.traversal.orders

    @property
    def cells(self) -> Cells:
        """Runs of symbols that share a table."""
        return self.traversal.cells

    @property
    def total(self) -> int:
        """Symbols of the matrix."""
        return int(self.groups.offsets[-1])


def lay_out(header: Header) -> Layout:
    """Derive the order of the symbols from the header; every reader must come to the same."""
    levels, row_levels = header.column_levels(), header.row_levels
    orders = Orders(
        rows=np.argsort(row_levels, kind="stable").astype(np.int32),
        columns=np.argsort(levels, kind="stable").astype(np.int32),
    )
    found = np.unique(levels)
    starts = np.searchsorted(levels[orders.columns], found)
    stops = np.append(starts[1:], len(levels))
    row_found, sizes = np.unique(row_levels, return_counts=True)
    pairs = np.arange(len(found)) < header.pairs
    widths = np.where(pairs, (stops - starts + 1) // 2, stops - starts)  # (groups,) symbols of a row
    groups = Groups(
        offsets=np.concatenate([[0], np.cumsum(widths * header.shape[0])]).astype(np.int64),
        starts=starts.astype(np.int64),
        stops=stops.astype(np.int64),
        pairs=pairs,
    )
    spreads = header.spread_of(found[:, None], row_found.astype(np.int64)[None, :])  # (groups, classes)
    tags, tables = np.unique((spreads * 2 + pairs[:, None]).reshape(-1), return_inverse=True)
    counts = (widths[:, None] * sizes[None, :]).reshape(-1)
    cells = Cells(
        edges=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), tables=tables.reshape(-1).astype(np.int64)
    )
    return Layout(
        traversal=Traversal(groups=groups, orders=orders, cells=cells),
        keys=[(int(tag) >> 1, bool(tag & 1)) for tag in tags],
    )


def chunk_edges(total: int) -> list[int]:
    """Return the first symbols of the chunks, all of nearly one length, and the end."""
    chunks = max(1, (total + CHUNK_SYMBOLS // 2) // CHUNK_SYMBOLS)
    return [i * total // chunks for i in range(chunks + 1)]


def frequencies(header: Header, layout: Layout) -> NDArray[np.uint16]:
    """Return the frequencies (tables, 256) that the coder uses, in the order of the layout's keys."""
    found = np.empty((len(layout.keys), 256), np.uint16)
    for row, (spread, pairs) in zip(found, layout.keys, strict=True):
        single = header.stored.get(spread)
        if single is None:
            single = frequency_tables.parametric(spread, header.mixture)
        row[:] = frequency_tables.paired(single) if pairs else single
    return found

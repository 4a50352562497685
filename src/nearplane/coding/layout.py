"""The order of the symbols of a coded matrix, its tables and its chunks: what follows from a header by rule."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearplane.coding import frequency_tables, huffman
from nearplane.coding.header import Header

CHUNK_SYMBOLS = 1 << 17  # symbols of a chunk, about


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The order of the symbols: groups of columns of one level, in them classes of rows of one level, row by row."""

    column_order: NDArray[np.int32]  # (in,) position -> column
    row_order: NDArray[np.int32]  # (out,)
    starts: NDArray[np.int64]  # (groups,) first position of a group in the column order
    stops: NDArray[np.int64]
    pairs: NDArray[np.bool_]
    widths: NDArray[np.int64]  # symbols per row
    offsets: NDArray[np.int64]  # (groups + 1,) first symbol of a group
    counts: NDArray[np.int64]  # (cells,) symbols
    which: NDArray[np.int64]  # (cells,) index into keys
    keys: list[tuple[int, bool]]  # (spread, pairs) of every table that occurs, in increasing order

    @property
    def total(self) -> int:
        """Symbols of the matrix."""
        return int(self.offsets[-1])

    @property
    def edges(self) -> NDArray[np.int64]:
        """First symbols of the cells, and the end (cells + 1,)."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts)])

    @property
    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Where the symbols of the groups stand, for kernels: offsets, starts, stops, pairs."""
        return self.offsets, self.starts, self.stops, self.pairs

    @property
    def orders(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Orders of rows and columns, for kernels."""
        return self.row_order, self.column_order


def lay_out(header: Header) -> Layout:
    """Derive the order of symbols from the header; every reader must come to the same."""
    levels, row_levels = header.column_levels(), header.row_levels
    column_order = np.argsort(levels, kind="stable").astype(np.int32)
    row_order = np.argsort(row_levels, kind="stable").astype(np.int32)
    found = np.unique(levels)
    ordered = levels[column_order]
    starts = np.searchsorted(ordered, found)
    stops = np.append(starts[1:], len(levels))
    row_found, sizes = np.unique(row_levels, return_counts=True)
    pairs = np.arange(len(found)) < header.pairs
    widths = np.where(pairs, (stops - starts + 1) // 2, stops - starts)
    offsets = np.concatenate([[0], np.cumsum(widths * header.shape[0])])
    spreads = header.spread_of(found[:, None], row_found.astype(np.int64)[None, :])  # (groups, classes)
    tags = spreads * 2 + pairs[:, None]
    unique, which = np.unique(tags.reshape(-1), return_inverse=True)
    return Layout(
        column_order=column_order,
        row_order=row_order,
        starts=starts.astype(np.int64),
        stops=stops.astype(np.int64),
        pairs=pairs,
        widths=widths.astype(np.int64),
        offsets=offsets.astype(np.int64),
        counts=(widths[:, None] * sizes[None, :]).reshape(-1).astype(np.int64),
        which=which.reshape(-1).astype(np.int64),
        keys=[(int(tag) >> 1, bool(tag & 1)) for tag in unique],
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
        if header.coder == "huffman":
            row[:] = huffman.frequencies(row)
    return found

"""The header of a coded matrix, and what follows from it by rule: levels, groups, tables, segments, chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearplane.coding import huffman, model
from nearplane.coding.side import BitReader, BitWriter, array_bits, rice_parameter, zigzag
from nearplane.errors import FormatError

VERSION = 1
CODERS = ("tans", "huffman", "zstd")
CHUNKED = 1 << 17  # weights from which on a matrix is coded in chunks of eight lanes
CHUNK = 1 << 17  # symbols of a chunk, about
DENSEST = 1 << 14  # weights per byte: no encoder reaches that, so a blob that claims it is refused
LEVEL = 40  # a column's level is clamped to -40 ... 40
ROW_LEVEL = 8  # a row's lies within -8 ... 8
EXPONENT = 1 << 15  # bound on the exponents of scales
SIDE = 1 << 28  # bound on rows and on columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """All that precedes the codes. Levels are steps of 16/level_resolution sixteenths of an octave of spread."""

    coder: str
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

    @property
    def chunked(self) -> bool:
        return self.shape[0] * self.shape[1] >= CHUNKED

    def column_levels(self) -> NDArray[np.int64]:
        """Return the level of every column (in,)."""
        predicted = predict(self.columns, self.column_resolution, self.slope, self.level_resolution)
        return np.clip(predicted + self.corrections, -LEVEL, LEVEL)

    def spread_of(self, column_level: NDArray[Any] | int, row_level: NDArray[Any] | int) -> NDArray[np.int64]:
        """Return the spreads of cells, the index of their tables in the family."""
        step, row_step = 16 // self.level_resolution, 16 // self.row_level_resolution
        return np.clip(
            self.spread + step * np.asarray(column_level) + row_step * np.asarray(row_level), 0, model.SPREADS - 1
        )


def predict(columns: NDArray[np.int32], resolution: int, slope: int, level_resolution: int) -> NDArray[np.int64]:
    """Return the levels that exponents predict (in,): -(exponent - centre) * slope/4 octaves, rounded, halves upwards."""
    middle = np.partition(columns, (len(columns) - 1) // 2)[(len(columns) - 1) // 2]
    doubled = -2 * (columns.astype(np.int64) - int(middle)) * slope * level_resolution
    return (doubled + 4 * resolution) // (8 * resolution)


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
    chunks = max(1, (total + CHUNK // 2) // CHUNK)
    return [i * total // chunks for i in range(chunks + 1)]


def tables(header: Header, layout: Layout) -> NDArray[np.uint16]:
    """Return the frequencies (tables, 256) that the coder uses, in the order of the layout's keys."""
    found = np.empty((len(layout.keys), 256), np.uint16)
    for row, (spread, pairs) in zip(found, layout.keys, strict=True):
        single = header.stored.get(spread)
        if single is None:
            single = model.parametric(spread, header.mixture)
        row[:] = model.paired(single) if pairs else single
        if header.coder == "huffman":
            row[:] = huffman.frequencies(row)
    return found


def write_header(header: Header, layout: Layout) -> tuple[BitWriter, int]:
    """Return the header's bits after the tag and the shape, and how many of them grow with the rows."""
    out = BitWriter()
    out.put(header.base, 16)
    out.put(header.column_resolution.bit_length() - 1, 3)
    out.put(header.row_resolution.bit_length() - 1, 3)
    out.array(header.columns)
    out.optional(header.rows)
    out.put(header.spread, 8)
    out.put(header.mixture, 4)
    out.put(header.slope, 3)
    out.put(header.level_resolution.bit_length() - 1, 2)
    out.optional(header.corrections)
    out.optional(header.row_levels)
    if header.row_levels.any():
        out.put(header.row_level_resolution.bit_length() - 1, 2)
    out.gamma(header.pairs)
    if header.coder != "zstd":
        _write_tables(out, header, layout)
    return out, array_bits(header.rows) + array_bits(header.row_levels)


def _write_tables(out: BitWriter, header: Header, layout: Layout) -> None:
    out.put(bool(header.stored), 1)
    if header.stored:
        for spread in sorted({spread for spread, _ in layout.keys}):
            table = header.stored.get(spread)
            out.put(table is not None, 1)
            if table is not None:
                write_table(out, table, model.parametric(spread, header.mixture))


def write_table(out: BitWriter, table: NDArray[np.uint16], reference: NDArray[np.uint16]) -> None:
    """Write frequencies as what they differ by from the family's: largest |code|, Rice parameter, escape, codes."""
    used = np.flatnonzero(table[1:])
    top = int(np.abs(used - 127).max()) if len(used) else 0
    out.gamma(top)
    kept = np.concatenate([[0], np.arange(128 - top, 129 + top)])
    difference = table[kept].astype(np.int64) - reference[kept]
    parameter = rice_parameter(zigzag(difference))
    out.put(parameter, 4)
    out.rice(difference, parameter)


def read_header(data: NDArray[np.uint8], name: str) -> tuple[Header, Layout, BitReader]:
    """Read and check a header.

    Returns:
        The header, its layout, and the reader behind its last bit.

    Raises:
        FormatError: the bytes are not a header of this version, or end early.
    """
    coder, shape, at = read_shape(data, name)
    out, width = shape
    if out * width > DENSEST * len(data):
        raise FormatError(
            f"{name}: {len(data)} bytes claim to hold {out} x {width} weights; the matrix is damaged or cut short"
        )
    bits = BitReader(data, 8 * at, name)
    base, column_resolution, row_resolution = bits.take(16), 1 << bits.take(3), 1 << bits.take(3)
    if max(column_resolution, row_resolution) > 64:
        raise FormatError(f"{name}: a ladder has 128 steps per octave, at most 64 are possible; the file is damaged")
    columns = bits.array(width, "column exponents", EXPONENT)
    rows = bits.optional(out, "row exponents", EXPONENT)
    spread, mixture, slope, level_resolution = bits.take(8), bits.take(4), bits.take(3), 1 << bits.take(2)
    if spread >= model.SPREADS:
        raise FormatError(
            f"{name}: the spread is {spread}, at most {model.SPREADS - 1} is possible; the file is damaged"
        )
    corrections = bits.optional(width, "column levels", EXPONENT)
    row_levels = bits.optional(out, "row levels", ROW_LEVEL)
    row_level_resolution = 1 << bits.take(2) if row_levels.any() else 1
    header = Header(
        coder=coder,
        shape=shape,
        base=base,
        column_resolution=column_resolution,
        row_resolution=row_resolution,
        columns=columns,
        rows=rows,
        spread=spread,
        mixture=mixture,
        slope=slope,
        level_resolution=level_resolution,
        row_level_resolution=row_level_resolution,
        corrections=corrections,
        row_levels=row_levels,
        pairs=bits.gamma(),
    )
    layout = lay_out(header)
    if header.pairs > len(layout.starts):
        raise FormatError(
            f"{name}: {header.pairs} groups of pairs, there are {len(layout.starts)} groups; the file is damaged"
        )
    if coder != "zstd" and bits.take(1):
        for key in sorted({key for key, _ in layout.keys}):
            if bits.take(1):
                header.stored[key] = _read_table(bits, model.parametric(key, mixture))
    return header, layout, bits


def _read_table(bits: BitReader, reference: NDArray[np.uint16]) -> NDArray[np.uint16]:
    top = bits.gamma("tables")
    if top > model.LARGEST:
        raise FormatError(f"{bits.name}: a table reaches to {top}, at most 127 is possible; the file is damaged")
    kept = np.concatenate([[0], np.arange(128 - top, 129 + top)])
    table = np.zeros(256, np.int64)
    table[kept] = reference[kept] + bits.rice(len(kept), bits.take(4, "tables"), "tables")
    if table.min() < 0 or table.sum() != model.TOTAL:
        raise FormatError(
            f"{bits.name}: the frequencies of a table sum to {table.sum()}, not 4096; the file is damaged"
        )
    return table.astype(np.uint16)


def read_shape(data: NDArray[np.uint8], name: str) -> tuple[str, tuple[int, int], int]:
    """Return coder, shape and the byte after them."""
    if len(data) < 8:
        raise FormatError(f"{name}: {len(data)} bytes, a coded matrix has at least 8; the file is cut short")
    version, tag = int(data[0]) >> 4, int(data[0]) & 15
    if version != VERSION:
        raise FormatError(
            f"{name}: coded in version {version} of the format, this nearplane reads version {VERSION}; "
            "a newer nearplane may read it, or the file is damaged"
        )
    if tag >= len(CODERS):
        raise FormatError(
            f"{name}: coder {tag} is unknown, known are 0 (tans), 1 (huffman), 2 (zstd); a newer nearplane may read it"
        )
    sides, at = [], 1
    for _ in range(2):
        value, shift = 0, 0
        while True:
            if at >= len(data) or shift > 28:
                raise FormatError(f"{name}: the shape does not end; the file is damaged")
            byte = int(data[at])
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        if not 1 <= value <= SIDE:
            raise FormatError(f"{name}: a side of {value}, expected 1 ... {SIDE}; the file is damaged")
        sides.append(value)
    return CODERS[tag], (sides[0], sides[1]), at

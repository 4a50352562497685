"""Header of a coded matrix as bits: writing, reading, and refusal of damaged ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nearplane.coding import frequency_tables
from nearplane.coding.bit_stream import DAMAGED, BitReader, BitWriter, array_bits, best_rice, read_varint, zigzag
from nearplane.coding.layout import (
    MAX_ROW_LEVEL,
    MAX_SIDE,
    MAX_WEIGHTS_PER_BYTE,
    TANS,
    VERSION,
    Header,
    Layout,
    lay_out,
)
from nearplane.coding.scales import MAX_EXPONENT, Scales, base_exponent, base_of
from nearplane.errors import FormatError


def write_header(header: Header, layout: Layout) -> tuple[BitWriter, int]:
    """Return the header's bits after the tag and the shape, and the number of bits that grow with the rows."""
    out = BitWriter()
    scales = header.scales
    out.put(base_exponent(scales.base), 16)
    out.put(scales.column_resolution.bit_length() - 1, 3)
    out.put(scales.row_resolution.bit_length() - 1, 3)
    out.array(scales.columns)
    out.optional(scales.rows)
    out.put(header.spread, 8)
    out.put(header.mixture, 4)
    out.put(header.slope, 3)
    out.put(header.level_resolution.bit_length() - 1, 2)
    out.optional(header.corrections)
    out.optional(header.row_levels)
    if header.row_levels.any():
        out.put(header.row_level_resolution.bit_length() - 1, 2)
    out.gamma(header.pairs)
    out.put(bool(header.stored), 1)
    for spread in sorted({spread for spread, _ in layout.keys}) if header.stored else ():
        out.put(spread in header.stored, 1)
        if spread in header.stored:
            write_table(out, header.stored[spread], frequency_tables.parametric(spread, header.mixture))
    return out, array_bits(scales.rows) + array_bits(header.row_levels)


def write_table(out: BitWriter, table: NDArray[np.uint16], reference: NDArray[np.uint16]) -> None:
    """Write frequencies as differences from the family's: largest |code|, Rice parameter, escape, codes."""
    used = np.flatnonzero(table[1:])
    top = int(np.abs(used - 127).max()) if len(used) else 0
    out.gamma(top)
    symbols = np.concatenate([[0], np.arange(128 - top, 129 + top)])
    difference = table[symbols].astype(np.int64) - reference[symbols]
    parameter, _ = best_rice(zigzag(difference))
    out.put(parameter, 4)
    out.rice(difference, parameter)


def read_header(blob: NDArray[np.uint8], name: str) -> tuple[Header, Layout, BitReader]:
    """Read and check a header.

    Returns:
        The header, its layout, and the reader positioned after its last bit.

    Raises:
        ValueError: The blob is no array of bytes.
        FormatError: The bytes are not a header of this version, or end too early.
    """
    if blob.dtype != np.uint8 or blob.ndim != 1:
        raise ValueError(f"A coded matrix must be one-dimensional uint8; got {blob.ndim} dimensions of {blob.dtype}.")
    blob = np.require(blob, requirements=["C", "W"])  # kernels are compiled for writable memory only
    shape, at = read_shape(blob, name)
    out, width = shape
    if out * width > MAX_WEIGHTS_PER_BYTE * len(blob):
        raise FormatError(
            f"{name}: the header describes {out} x {width} weights, too many for {len(blob)} bytes. {DAMAGED}"
        )
    bits = BitReader(blob, 8 * at, name)
    base, column_resolution, row_resolution = bits.take(16), 1 << bits.take(3), 1 << bits.take(3)
    if max(column_resolution, row_resolution) > 64:
        raise FormatError(f"{name}: the scales have 128 steps per octave; the limit is 64. {DAMAGED}")
    scales = Scales(
        base=base_of(base),
        columns=bits.array(width, "column exponents", MAX_EXPONENT),
        column_resolution=column_resolution,
        rows=bits.optional(out, "row exponents", MAX_EXPONENT),
        row_resolution=row_resolution,
    )
    spread, mixture, slope, level_resolution = bits.take(8), bits.take(4), bits.take(3), 1 << bits.take(2)
    if spread >= frequency_tables.SPREADS:
        raise FormatError(f"{name}: the spread is {spread}; the limit is {frequency_tables.SPREADS - 1}. {DAMAGED}")
    corrections = bits.optional(width, "column levels", MAX_EXPONENT)
    row_levels = bits.optional(out, "row levels", MAX_ROW_LEVEL)
    row_level_resolution = 1 << bits.take(2) if row_levels.any() else 1
    header = Header(
        shape=shape,
        scales=scales,
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
    if header.pairs > len(layout.groups.starts):
        raise FormatError(f"{name}: {header.pairs} of only {len(layout.groups.starts)} groups are in pairs. {DAMAGED}")
    if bits.take(1):
        for key in sorted({key for key, _ in layout.keys}):
            if bits.take(1):
                header.stored[key] = _read_table(bits, frequency_tables.parametric(key, mixture))
    return header, layout, bits


def _read_table(bits: BitReader, reference: NDArray[np.uint16]) -> NDArray[np.uint16]:
    top = bits.gamma("tables")
    if top > frequency_tables.MAX_BYTE_CODE:
        raise FormatError(f"{bits.name}: a table reaches to code {top}; the limit is 127. {DAMAGED}")
    symbols = np.concatenate([[0], np.arange(128 - top, 129 + top)])
    table = np.zeros(256, np.int64)
    table[symbols] = reference[symbols] + bits.rice(len(symbols), bits.take(4, "tables"), "tables")
    if table.min() < 0 or table.sum() != frequency_tables.FREQUENCY_SUM:
        raise FormatError(f"{bits.name}: the frequencies of a table sum to {table.sum()}, not 4096. {DAMAGED}")
    return table.astype(np.uint16)


def read_shape(blob: NDArray[np.uint8], name: str) -> tuple[tuple[int, int], int]:
    """Return the shape and the byte after it."""
    if len(blob) < 8:
        raise FormatError(f"{name}: {len(blob)} bytes, but a coded matrix has at least 8. {DAMAGED}")
    version, tag = int(blob[0]) >> 4, int(blob[0]) & 15
    if version != VERSION:
        raise FormatError(
            f"{name}: coded in version {version} of the format; this nearplane reads version {VERSION}. Use the "
            f"nearplane that wrote the file, or fetch the file again if it is damaged."
        )
    if tag != TANS:
        raise FormatError(f"{name}: coder {tag} is unknown; expected 0 (tans). A newer nearplane may read the file.")
    sides, at = [], 1
    for _ in range(2):
        value, at = read_varint(blob, at)
        if at < 0:
            raise FormatError(f"{name}: the shape does not end. {DAMAGED}")
        if not 1 <= value <= MAX_SIDE:
            raise FormatError(f"{name}: a side has length {value}; expected 1 ... {MAX_SIDE}. {DAMAGED}")
        sides.append(value)
    return (sides[0], sides[1]), at

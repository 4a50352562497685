"""Matrices of integers to code: column spreads that follow the exponents, rows of different norms, and odd ones."""

from __future__ import annotations

import zlib

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from nearplane.coding import header_bits, layout
from nearplane.coding.blob import Contents
from nearplane.coding.packed_matrix import PackedMatrix
from nearplane.coding.scales import Scales, stored_base
from nearplane.errors import FormatError


def contents_of(codes: NDArray[np.int64], **given: object) -> Contents:
    """Return contents with plain scales around codes."""
    out, width = codes.shape
    fields: dict[str, object] = {
        "base": stored_base(0.02),
        "columns": np.zeros(width, np.int32),
        "column_resolution": 8,
        "rows": np.zeros(out, np.int32),
        "row_resolution": 1,
    }
    return Contents(codes=codes.astype(np.int32), scales=Scales(**(fields | given)))  # type: ignore[arg-type]


def gaussian(
    out: int,
    width: int,
    bits: float,
    *,
    seed: int = 0,
    columns: float = 0.5,
    rows: float = 0.0,
    freedom: int | None = None,
) -> tuple[Contents, NDArray[np.float64]]:
    """Return a matrix as water-filling leaves it, and the standard deviations of its cells before rounding (out, in).

    Args:
        bits: about the entropy.
        columns, rows: standard deviations of their log2 spread.
        freedom: of a Student t with unit variance, in place of a Gaussian.
    """
    rng = np.random.default_rng(seed)
    octaves = rng.normal(0, columns, width)
    spread = 2.0 ** (bits - 2.05 + octaves[None, :] + rng.normal(0, rows, out)[:, None])
    noise = rng.standard_normal((out, width))
    if freedom is not None:
        noise = rng.standard_t(freedom, (out, width)) * np.sqrt((freedom - 2) / freedom)
    exponents = np.round(-8 * octaves).astype(np.int32)
    return contents_of(np.rint(noise * spread).astype(np.int64), columns=exponents), spread


@st.composite
def any_contents(draw: st.DrawFn, largest: int = 24) -> Contents:
    """Draw a small matrix: of any spread, sparse, constant, or with entries as large as int32 holds."""
    out, width = draw(st.integers(1, largest)), draw(st.integers(1, largest))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["gaussian", "heavy", "sparse", "constant", "huge", "columns"]))
    spread = 2.0 ** draw(st.floats(-5, 12))
    codes = rng.standard_normal((out, width)) * spread
    if kind == "heavy":
        codes = rng.standard_cauchy((out, width)) * spread
    elif kind == "sparse":
        codes *= rng.random((out, width)) < 0.05
    elif kind == "constant":
        codes[:] = round(spread)
    elif kind == "huge":
        codes = rng.integers(-(2**31), 2**31, (out, width)).astype(np.float64)
        codes.flat[0], codes.flat[-1] = -(2**31), 2**31 - 1
    elif kind == "columns":
        codes *= 2.0 ** rng.integers(-6, 6, width)
    codes = np.clip(np.rint(codes), -(2**31), 2**31 - 1).astype(np.int64)
    return contents_of(
        codes,
        base=stored_base(2.0 ** draw(st.floats(-120, 120))),
        columns=rng.integers(-40, 41, width).astype(np.int32) * draw(st.sampled_from([0, 1, 800])),
        column_resolution=draw(st.sampled_from([1, 2, 4, 8, 16, 32, 64])),
        rows=rng.integers(-3, 4, out).astype(np.int32) * draw(st.sampled_from([0, 1, 10000])),
        row_resolution=draw(st.sampled_from([1, 4, 64])),
    )


def codes_of(packed: PackedMatrix) -> NDArray[np.int32]:
    """Return the codes (out, in) of a packed matrix."""
    ordered = np.empty(packed.shape, np.int64)
    for group in packed.groups:
        start, stop, nibbles, first, width = group
        array = packed.codes[first : first + packed.shape[0] * width].reshape(-1, width)
        if nibbles:
            both = np.stack([array & 15, array >> 4], 2).reshape(packed.shape[0], -1)
            ordered[:, start:stop] = both[:, : stop - start].astype(np.int64) - 8
        else:
            ordered[:, start:stop] = array.view(np.int8)
    codes = np.empty_like(ordered)
    codes[packed.orders.rows[:, None], packed.orders.columns[None, :]] = ordered
    codes[packed.patches.rows, packed.patches.columns] += packed.patches.delta
    return codes.astype(np.int32)


def total_entropy(codes: NDArray[np.int32]) -> float:
    """Return the plug-in entropy of all codes as one source, in bits, times their number."""
    counts = np.unique(codes, return_counts=True)[1]
    return float(counts @ (np.log2(codes.size) - np.log2(counts)))


def mended(blob: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Make the checksums of a damaged blob right, as far as its header can still be read."""
    blob = blob.copy()
    try:
        _, arrangement, bits = header_bits.read_header(blob, "")
        at = (bits.at + 7) // 8
        places = []
        for _ in range(len(layout.chunk_edges(arrangement.total)) - 1):
            bits.at = 8 * at
            length = shift = 0
            while (byte := bits.take(8)) > 127:
                length, shift = length | (byte & 127) << shift, shift + 7
            length |= byte << shift
            places.append((bits.at // 8, length))
            at = bits.at // 8 + 4
        start = at + 4
        for place, length in places:
            blob[place : place + 4] = np.frombuffer(
                zlib.crc32(blob[start : start + length]).to_bytes(4, "little"), np.uint8
            )
            start += length
        blob[at : at + 4] = np.frombuffer(zlib.crc32(blob[:at]).to_bytes(4, "little"), np.uint8)
    except (FormatError, ValueError):
        pass
    return blob


def same(a: Contents, b: Contents) -> bool:
    """Tell whether two contents agree in every field."""
    return (
        np.array_equal(a.codes, b.codes)
        and np.array_equal(a.scales.columns, b.scales.columns)
        and np.array_equal(a.scales.rows, b.scales.rows)
        and (a.scales.base, a.scales.column_resolution, a.scales.row_resolution)
        == (b.scales.base, b.scales.column_resolution, b.scales.row_resolution)
    )

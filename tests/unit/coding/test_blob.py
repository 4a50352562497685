"""The coded matrix: exact, close to the entropy, the same bytes for ever."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given

from coded_matrices import any_contents, codes_of, contents_of, gaussian, total_entropy
from nearplane.coding import cost
from nearplane.coding.blob import Contents, Size, decode, decode_packed, encode, shape_of, size
from nearplane.coding.header_bits import read_header
from nearplane.coding.scales import Scales, stored_base


def same(a: Contents, b: Contents) -> bool:
    """Tell whether two contents agree in every field."""
    return (
        np.array_equal(a.codes, b.codes)
        and np.array_equal(a.scales.columns, b.scales.columns)
        and np.array_equal(a.scales.rows, b.scales.rows)
        and (a.scales.base, a.scales.column_resolution, a.scales.row_resolution)
        == (b.scales.base, b.scales.column_resolution, b.scales.row_resolution)
    )


@given(any_contents())
def test_decode_returns_what_was_encoded(contents: Contents) -> None:
    blob = encode(contents)
    assert shape_of(blob) == contents.codes.shape
    assert same(decode(blob), contents)
    packed = decode_packed(blob)
    assert np.array_equal(codes_of(packed), contents.codes)
    assert np.array_equal(packed.scales.column_scale, contents.scales.column_scale)
    assert np.array_equal(packed.scales.row_scale, contents.scales.row_scale)


LARGE = {
    "pairs": gaussian(384, 401, 1.7)[0],
    "bytes and pairs": gaussian(384, 401, 3.5, rows=0.5)[0],
    "heavy tails": gaussian(384, 401, 2.5, freedom=3)[0],
    "bytes": gaussian(384, 401, 6.5)[0],
    "beyond a byte": gaussian(384, 401, 9.0)[0],
    "zero": contents_of(np.zeros((384, 401), np.int64)),
    "one column": contents_of(np.arange(-70000, 70000)[:, None]),
    "one row": gaussian(1, 140001, 2.5)[0],
}


@pytest.mark.parametrize("name", LARGE)
def test_chunks_of_a_large_matrix_decode_to_what_was_encoded(name: str) -> None:
    blob = encode(LARGE[name])
    assert same(decode(blob), LARGE[name])
    assert np.array_equal(codes_of(decode_packed(blob)), LARGE[name].codes)


@pytest.mark.parametrize("name", ["pairs", "bytes and pairs"])
def test_threads_change_no_byte_and_no_code(name: str) -> None:
    big = contents_of(np.tile(LARGE[name].codes, (3, 1)), columns=LARGE[name].scales.columns)
    blobs = [encode(big, threads=threads) for threads in (1, 3, None)]
    assert all(np.array_equal(blob, blobs[0]) for blob in blobs)
    assert all(same(decode(blobs[0], threads=threads), big) for threads in (1, 2, 7, None))


@pytest.mark.parametrize("name", LARGE)
def test_what_the_sample_of_rows_lacks_is_coded_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = LARGE[name].codes.copy()
    monkeypatch.setattr(cost, "SAMPLED_CODES", 20 * codes.shape[1])
    seen = cost.sample(*codes.shape)
    others = np.setdiff1d(np.arange(len(codes)), seen)
    assert len(seen) <= 20
    codes[others[::7]] *= 5
    codes[others[-1:], 0] = 2**31 - 1
    contents = contents_of(codes, columns=LARGE[name].scales.columns)
    blob = encode(contents)
    assert same(decode(blob), contents)
    assert np.array_equal(codes_of(decode_packed(blob)), codes)


SMALL = [(32, 64), (64, 64), (128, 128), (352, 128)]


@pytest.mark.parametrize(("out", "width"), SMALL)
@pytest.mark.parametrize("bits", [1.0, 2.0, 3.0, 4.0])
def test_a_small_matrix_takes_little_more_than_its_information(out: int, width: int, bits: float) -> None:
    """The bound: -log2 of the true probabilities, the entropies of the exponents, 56 bytes, and 0.02 bit per weight.

    Of the 56 bytes 38 say where eight lanes begin and end.
    """
    contents, spread = gaussian(out, width, bits, rows=0.3)
    columns = width * math.log2(4 * math.sqrt(2 * math.pi * math.e))
    rows = out * math.log2(0.3 * 4 * math.sqrt(2 * math.pi * math.e))  # at most: the encoder may leave them out
    least = ideal_bits(contents.codes, spread) + columns + rows
    assert 8 * len(encode(contents)) < least + 8 * 56 + 0.02 * out * width


def ideal_bits(codes: np.ndarray, spread: np.ndarray) -> float:
    """Return -log2 of the probabilities of rounded Gaussians."""
    low, high = (codes - 0.5) / spread, (codes + 0.5) / spread
    upper = np.vectorize(math.erfc)
    swap = low > 0  # far tails: the difference of the small ones
    a, b = np.where(swap, low, -high) / math.sqrt(2), np.where(swap, high, -low) / math.sqrt(2)
    return float(-np.log2((upper(a) - upper(b)) / 2).sum())


@pytest.mark.parametrize("freedom", [None, 5])
def test_coded_bytes_are_near_the_entropies(freedom: int | None) -> None:
    """At 1024 x 1024 side information weighs four times (columns) and sixteen times (tables) what it does at 4096 x 4096."""
    rng = np.random.default_rng(1)
    spread = np.exp(rng.uniform(math.log(0.3), math.log(8), 1024))
    noise = rng.standard_normal((1024, 1024)) if freedom is None else rng.standard_t(5, (1024, 1024)) * math.sqrt(0.6)
    exponents = np.round(-8 * np.log2(spread)).astype(np.int32)
    contents = contents_of(np.rint(noise * spread).astype(np.int64), columns=exponents)
    blob = encode(contents)
    bits = 8 * len(blob) / contents.codes.size
    header = read_header(blob, "")[0]
    spreads = header.spread_of(header.column_levels()[None, :], header.row_levels[:, None])  # (out, in)
    classes = sum(total_entropy(contents.codes[spreads == s]) for s in np.unique(spreads)) / contents.codes.size
    columns = sum(total_entropy(column) for column in contents.codes.T) / contents.codes.size
    assert columns <= classes < bits < classes * 1.011
    symbols = sum(len(np.unique(column)) - 1 for column in contents.codes.T)
    miller_madow = symbols / (2 * math.log(2) * contents.codes.size)
    assert bits < columns + miller_madow + 0.025


@pytest.mark.parametrize("out", [64, 352, 1200])
@pytest.mark.parametrize("bits", [0.7, 2.0, 3.0, 6.5])
def test_size_foretells_the_bytes(out: int, bits: float) -> None:
    for freedom in (None, 5):
        contents, _ = gaussian(out, 128, bits, rows=0.3, freedom=freedom)
        found = size(contents)
        assert isinstance(found, Size)
        assert found.bytes == pytest.approx(len(encode(contents)), rel=1e-3, abs=2)


def test_side_and_payload_extrapolate_from_rows() -> None:
    contents, _ = gaussian(4096, 128, 2.5)
    part = contents_of(contents.codes[::8], columns=contents.scales.columns)
    found = size(part)
    assert found.side + found.payload * 8 / 8 == pytest.approx(len(encode(contents)), rel=0.005)


def test_zero_exponents_and_a_small_header_leave_what_a_chunk_takes() -> None:
    contents = contents_of(np.zeros((32, 64), np.int64))
    assert len(encode(contents)) <= 43


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": np.zeros((0, 3), np.int32)}, "at least 1 x 1"),
        ({"codes": np.zeros((2, 3), np.int64)}, "int32"),
        ({"columns": np.zeros(2, np.int32)}, "columns"),
        ({"columns": np.full(3, 1 << 17, np.int32)}, "exponents"),
        ({"row_resolution": 3}, "steps per octave"),
        ({"base": 0.3}, "stored_base"),
    ],
)
def test_contents_that_cannot_be_stored_are_refused(change: dict[str, object], message: str) -> None:
    fields = {
        "base": stored_base(1.0),
        "columns": np.zeros(3, np.int32),
        "column_resolution": 8,
        "rows": np.zeros(2, np.int32),
        "row_resolution": 1,
    }
    codes = change.pop("codes", np.zeros((2, 3), np.int32))
    with pytest.raises(ValueError, match=message):
        Contents(codes=codes, scales=Scales(**(fields | change)))  # type: ignore[arg-type]

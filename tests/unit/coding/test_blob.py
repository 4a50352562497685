"""The coded matrix: exact, close to the entropy, the same bytes for ever."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given

from coded_matrices import any_contents, codes_of, contents_of, gaussian, same
from nearplane.coding.blob import Contents, Size, decode, decode_packed, encode, shape_of, size, stored_base
from nightly import daily


@given(any_contents())
def test_decode_returns_what_was_encoded(contents: Contents) -> None:
    blob = encode(contents)
    assert shape_of(blob) == contents.codes.shape
    assert same(decode(blob), contents)
    packed = decode_packed(blob)
    assert np.array_equal(codes_of(packed), contents.codes)
    assert np.array_equal(packed.column_scale, contents.column_scale)
    assert np.array_equal(packed.row_scale, contents.row_scale)


@pytest.mark.parametrize(
    ("out", "bits"),
    daily(product([64, 352, 1200], [0.7, 2.0, 3.0, 6.5]), [(64, 0.7), (64, 6.5), (352, 2.0), (352, 3.0), (1200, 0.7)]),
)
def test_size_foretells_the_bytes(out: int, bits: float) -> None:
    for freedom in (None, 5):
        contents, _ = gaussian(out, 128, bits, rows=0.3, freedom=freedom)
        found = size(contents)
        assert isinstance(found, Size)
        assert found.bytes == pytest.approx(len(encode(contents)), rel=1e-3, abs=2)


def test_side_and_payload_extrapolate_from_rows() -> None:
    contents, _ = gaussian(4096, 128, 2.5)
    part = contents_of(contents.codes[::8], columns=contents.columns)
    found = size(part)
    assert found.side + found.payload * 8 / 8 == pytest.approx(len(encode(contents)), rel=0.005)


def test_zero_exponents_and_a_small_header_leave_what_a_chunk_takes() -> None:
    contents = contents_of(np.zeros((32, 64), np.int64))
    assert len(encode(contents)) <= 43


def test_stored_base_is_a_fixed_point_near_what_was_asked() -> None:
    for x in 2.0 ** np.linspace(-126, 126, 301):
        base = stored_base(float(x))
        assert stored_base(base) == base
        assert abs(math.log2(base / x)) <= 1 / 512 + 1e-6


def test_scales_are_rounded_once_from_double_precision() -> None:
    contents = contents_of(np.zeros((2, 3), np.int64), columns=np.array([-5, 0, 3], np.int32), column_resolution=4)
    expected = [np.float32(contents.base * 2 ** (e / 4)) for e in (-5, 0, 3)]
    assert contents.column_scale.tolist() == [float(e) for e in expected]
    assert contents.row_scale.tolist() == [1.0, 1.0]


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
        "codes": np.zeros((2, 3), np.int32),
        "base": stored_base(1.0),
        "columns": np.zeros(3, np.int32),
        "column_resolution": 8,
        "rows": np.zeros(2, np.int32),
        "row_resolution": 1,
    }
    with pytest.raises(ValueError, match=message):
        Contents(**(fields | change))  # type: ignore[arg-type]

"""The coded matrix: exact, close to the entropy, the same bytes for ever."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given

from coded_matrices import any_contents, codes_of, contents_of, gaussian, same
from nearplane.coding.blob import Contents, Size, decode, decode_packed, encode, shape_of, size
from nearplane.coding.scales import Scales, stored_base
from nightly import daily_of_several


@given(any_contents())
def test_decode_returns_what_was_encoded(contents: Contents) -> None:
    blob = encode(contents)
    assert shape_of(blob) == contents.codes.shape
    assert same(decode(blob), contents)
    packed = decode_packed(blob)
    assert np.array_equal(codes_of(packed), contents.codes)
    assert np.array_equal(packed.scales.column_scale, contents.scales.column_scale)
    assert np.array_equal(packed.scales.row_scale, contents.scales.row_scale)


@pytest.mark.parametrize(
    ("out", "bits"),
    daily_of_several(
        product([64, 352, 1200], [0.7, 2.0, 3.0, 6.5]), [(64, 0.7), (64, 6.5), (352, 2.0), (352, 3.0), (1200, 0.7)]
    ),
)
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

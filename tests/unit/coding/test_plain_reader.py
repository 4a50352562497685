"""A reader written from docs/format.md alone reads what encode writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

import plain_reader
from coded_matrices import any_contents, contents_of, gaussian
from nearplane.coding.blob import Contents, decode, encode

LARGE = {
    "pairs, rows, tables": gaussian(300, 451, 2.0, rows=0.4, freedom=4)[0],
    "one odd group": contents_of(gaussian(451, 301, 2.0, columns=0.0)[0].codes.astype(np.int64)),
}


def agrees(contents: Contents) -> bool:
    """Tell whether both readers find the same."""
    blob = encode(contents)
    values, codes, column_scale, row_scale = plain_reader.read(blob.tobytes())
    found = decode(blob)
    wanted = (
        found.scales.row_scale[:, None].astype(np.float64) * found.codes * found.scales.column_scale.astype(np.float64)
    )
    return (
        np.array_equal(codes, contents.codes)
        and np.array_equal(column_scale, contents.scales.column_scale)
        and np.array_equal(row_scale, contents.scales.row_scale)
        and np.array_equal(values, wanted, equal_nan=True)
    )


@given(any_contents(largest=16))
@settings(max_examples=15)
def test_a_plain_reader_reads_small_matrices(contents: Contents) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        assert agrees(contents)


@pytest.mark.parametrize("name", LARGE)
def test_a_plain_reader_reads_chunks(name: str) -> None:
    assert agrees(LARGE[name])


def test_the_plain_reader_is_plain_and_short() -> None:
    text = Path(plain_reader.__file__).read_text()
    assert "import nearplane" not in text
    assert "from nearplane" not in text
    assert sum(bool(line) for line in text.splitlines()) <= 150

"""Matrices of several chunks are coded as they are, by any number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from coded_matrices import codes_of, contents_of, gaussian, same
from nearplane.coding import cost
from nearplane.coding.blob import decode, decode_packed, encode

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

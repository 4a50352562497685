"""Bytes that were written once stay readable and are written again; a change of any is a new version of the format."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from coded_matrices import contents_of
from nearplane.coding.blob import Contents, decode, encode
from nearplane.coding.scales import stored_base


def integers(out: int, width: int, spread: int) -> Contents:
    """Return a matrix made by integer arithmetic alone: sums of four bytes of a multiplicative hash."""
    i, j = np.arange(out, dtype=np.int64)[:, None], np.arange(width, dtype=np.int64)[None, :]
    mixed = (i * width + j + 1) * 2654435761 % 2**32
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 % 2**32
    mixed ^= mixed >> 13
    total = (mixed & 255) + (mixed >> 8 & 255) + (mixed >> 16 & 255) + (mixed >> 24) - 510
    octaves = j % 5 - 2
    codes = (total * spread * 2 ** (octaves + 2) + 2048) // 4096
    return contents_of(codes, base=stored_base(0.013), columns=(-8 * octaves[0]).astype(np.int32))


def test_a_tiny_matrix_is_these_bytes() -> None:
    contents = integers(4, 6, 8)
    assert encode(contents).tobytes().hex() == TINY
    assert np.array_equal(decode(np.frombuffer(bytes.fromhex(TINY), np.uint8)).codes, contents.codes)


@pytest.mark.parametrize(("out", "width", "spread"), [(40, 60, 6), (40, 60, 2000), (300, 500, 6), (300, 500, 60)])
def test_larger_matrices_have_these_hashes(out: int, width: int, spread: int) -> None:
    blob = encode(integers(out, width, spread))
    assert hashlib.sha256(blob.tobytes()).hexdigest()[:16] == HASHES[out, spread]


TINY = (
    "200406bc79031904c0f7032fe00bfcc00f40012283fe94811426c97500f74391"
    "3af7437933a544cc32fe444272010101010101010000000000000080770e"
)
HASHES = {
    (40, 6): "2ed328f0b40a1991",
    (40, 2000): "5b331f32e8990d78",
    (300, 6): "70d1a5568d247c79",
    (300, 60): "dde742f64f79b2f7",
}

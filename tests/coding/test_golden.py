"""Bytes that were written once stay readable and are written again; a change of any is a new version of the format."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from coding.matrices import contents_of
from nearplane.coding.blob import Contents, decode, encode, stored_base


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


@pytest.mark.parametrize("name", ["tans", "huffman"])
@pytest.mark.parametrize(("out", "width", "spread"), [(40, 60, 6), (40, 60, 2000), (300, 500, 6), (300, 500, 60)])
def test_larger_matrices_have_these_hashes(name: str, out: int, width: int, spread: int) -> None:
    blob = encode(integers(out, width, spread), coder=name)
    assert hashlib.sha256(blob.tobytes()).hexdigest()[:16] == HASHES[name, out, spread]


TINY = "100406bc79031904c0f7032fe081b229c41d61a3078d2cc5cb"
HASHES = {
    ("tans", 40, 6): "8dd3b909dfd55fb2",
    ("tans", 40, 2000): "5bd61c4585bceb05",
    ("tans", 300, 6): "99f8ad75b89007f1",
    ("tans", 300, 60): "8025b16ae100cead",
    ("huffman", 40, 6): "5b13085d7fe84dee",
    ("huffman", 40, 2000): "54f292f4651b04e1",
    ("huffman", 300, 6): "d83eed0abde9f3d2",
    ("huffman", 300, 60): "ac02d5aef0d265d8",
}

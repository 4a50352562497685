"""Huffman codes: complete, as short as the limit allows, and what a matrix takes behind one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coded_matrices import gaussian, total_entropy
from nearplane.coding import frequency_tables
from nearplane.coding.blob import encode
from nearplane.theory import huffman


@given(st.lists(st.integers(0, 500), min_size=2, max_size=256))
def test_huffman_codes_are_complete_and_as_short_as_the_limit_allows(weights: list[int]) -> None:
    """Complete: Kraft's sum is one. Short: no two lengths could be exchanged, and without the limit the cost is Huffman's."""
    weight = np.zeros(256, np.int64)
    weight[: len(weights)] = weights
    if (weight > 0).sum() < 2:
        return
    frequency = frequency_tables.normalise(weight)
    lengths = huffman.lengths(frequency)
    used = frequency > 0
    assert np.array_equal(lengths > 0, used)
    assert lengths.max() <= 12
    assert sum(4096 >> int(n) for n in lengths[used]) == 4096
    heap = sorted(int(f) for f in frequency[used])
    cost = 0
    while len(heap) > 1:  # the cost of Huffman's algorithm is the sum of its merges
        merged = heap.pop(0) + heap.pop(0)
        cost += merged
        heap = sorted([*heap, merged])
    found = int(lengths @ frequency.astype(np.int64))
    assert found >= cost
    if lengths.max() < 12:
        assert found == cost


@pytest.mark.parametrize("bits", [1.2, 2.5, 5.0, 8.5])
@pytest.mark.parametrize("out", [352, 1200])
def test_a_matrix_takes_within_a_bit_of_its_entropy_and_more_than_by_tans(out: int, bits: float) -> None:
    """Side information counted; the last case has codes that no table holds."""
    contents, _ = gaussian(out, 128, bits, columns=0.0)
    entropy = total_entropy(contents.codes) / contents.codes.size
    found = huffman.coded_bytes(contents.codes)
    assert entropy < 8 * found / contents.codes.size < entropy + 1
    assert found == pytest.approx(huffman.estimated_size(contents.codes).bytes, rel=1e-3, abs=3)
    assert found > 0.999 * len(encode(contents))


def test_what_is_beside_the_codes_is_counted() -> None:
    """Codes +-1 as often as 0 take 1, 2, 2 bits; a header and a table besides, and 12 bits of a state and one of a list."""
    codes = np.tile(np.array([[0, 0, 1, -1]], np.int32), (200, 30))
    found = huffman.estimated_size(codes)
    assert found.payload == 1.5 * codes.size + 13
    assert 10 < found.side < 40
    assert huffman.coded_bytes(codes) - found.side - math.ceil(found.payload / 8) in (
        0,
        1,
    )  # `side` is cut to whole bytes

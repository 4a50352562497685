"""The tables: integers that every machine computes alike, complete, and close to what they stand for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearplane.coding import frequency_tables

TIE = 1e-5  # of the constants from a half: an error of a thousand units in the last place would change none


def test_no_constant_is_near_a_tie() -> None:
    tails = [2**31 * math.erfc(i / 64 / math.sqrt(2)) / 2 for i in range(424)]
    octaves = [2**20 * 2 ** (-j / 16) for j in range(16)]
    assert min(abs(x % 1 - 0.5) for x in tails + octaves) > TIE


@pytest.mark.parametrize("shape", range(0, frequency_tables.SHAPES, 3))
def test_tables_of_the_family_are_complete_and_symmetric(shape: int) -> None:
    for spread in range(frequency_tables.SPREADS):
        table = frequency_tables.parametric(spread, shape).astype(np.int64)
        assert table.sum() == frequency_tables.FREQUENCY_SUM
        assert table.min() >= 0
        assert min(table[0], table[127], table[128], table[129]) >= 1
        assert np.array_equal(table[129:], table[1:128][::-1])
        pairs = frequency_tables.paired(table.astype(np.uint16)).astype(np.int64)
        assert pairs.sum() == frequency_tables.FREQUENCY_SUM
        assert pairs[0] >= 1


@pytest.mark.parametrize("spread", range(20, 150, 10))
def test_a_gaussian_costs_its_entropy_and_a_hundredth(spread: int) -> None:
    """Beyond +-127 an escape's list is not counted here; at sigma 64 that is 5 % of the codes."""
    sigma = 2 ** ((spread - 48) / 16)
    edges = (np.arange(-127, 129) - 0.5) / sigma / math.sqrt(2)
    inside = np.diff(np.vectorize(math.erf)(edges)) / 2
    p = np.append(1 - inside.sum(), inside)
    table = frequency_tables.parametric(spread, 0)
    kept = (table > 0) & (p > 0)
    missed = p[~kept].sum()  # escaped, at the escape's price
    bits = -(p[kept] @ np.log2(table[kept] / 4096)) - missed * math.log2(table[0] / 4096)
    assert bits < -(p[p > 0] @ np.log2(p[p > 0])) + 0.01


@given(st.lists(st.integers(0, 2**24), min_size=2, max_size=256))
def test_normalised_weights_sum_to_4096_and_none_is_lost(weights: list[int]) -> None:
    weight = np.zeros(256, np.int64)
    weight[: len(weights)] = weights
    if not weight.any():
        return
    table = frequency_tables.normalise(weight).astype(np.int64)
    assert table.sum() == frequency_tables.FREQUENCY_SUM
    assert np.array_equal(table > 0, weight > 0)

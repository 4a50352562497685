"""What codes take by estimates: exact where codes are what the estimate takes them for."""

import numpy as np
import pytest

from nearplane.coding.cost import geometric_bits


@pytest.mark.parametrize("share", [0.02, 0.3, 0.8])
def test_two_sided_geometric_codes_take_their_entropy(share: float) -> None:
    rng = np.random.default_rng(0)
    codes = (rng.geometric(1 - share, (1 << 16, 4)) - rng.geometric(1 - share, (1 << 16, 4))).astype(np.int32)
    k = np.arange(-200, 201)
    p = (1 - share) / (1 + share) * share ** np.abs(k)
    expected = -(p[p > 0] * np.log2(p[p > 0])).sum()
    assert geometric_bits(np.abs(codes).mean(0)) == pytest.approx(expected, rel=0.03)


def test_columns_of_zeros_take_nothing() -> None:
    codes = np.zeros((8, 4), np.int32)
    assert geometric_bits(np.abs(codes).mean(0)) == 0
    codes[:4, 0] = 1
    assert 0 < geometric_bits(np.abs(codes).mean(0)) < 0.5

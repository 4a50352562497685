"""Scales of rows and columns as files hold them."""

from __future__ import annotations

import math

import numpy as np

from coded_matrices import contents_of
from nearplane.coding.scales import stored_base


def test_stored_base_is_a_fixed_point_near_what_was_asked() -> None:
    for x in 2.0 ** np.linspace(-126, 126, 301):
        base = stored_base(float(x))
        assert stored_base(base) == base
        assert abs(math.log2(base / x)) <= 1 / 512 + 1e-6


def test_scales_are_rounded_once_from_double_precision() -> None:
    contents = contents_of(np.zeros((2, 3), np.int64), columns=np.array([-5, 0, 3], np.int32), column_resolution=4)
    expected = [np.float32(contents.scales.base * 2 ** (e / 4)) for e in (-5, 0, 3)]
    assert contents.scales.column_scale.tolist() == [float(e) for e in expected]
    assert contents.scales.row_scale.tolist() == [1.0, 1.0]

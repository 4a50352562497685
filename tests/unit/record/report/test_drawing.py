"""Axes, ticks and scales of the figures of a report."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearplane.record.report.drawing import PLOT_HEIGHT, Scale, spanning

FINITE = st.floats(min_value=1e-30, max_value=1e30)


@settings(deadline=None)
@given(values=st.lists(FINITE, min_size=1, max_size=5), log=st.booleans(), most=st.integers(3, 12))
def test_every_value_and_every_tick_has_a_place_on_its_axis(values, log, most):
    scale = spanning(values, log=log)
    assert all(0 < scale(value) < 1 for value in values)
    ticks = scale.ticks(most)
    assert len(ticks) <= most + 1
    assert ticks == sorted(set(ticks))
    assert all(-1e-9 <= scale(tick) <= 1 + 1e-9 for tick in ticks)


def test_equal_ratios_are_equally_far_apart_on_a_logarithmic_axis():
    scale = Scale(low=1e-4, high=1.0, log=True)
    assert [scale(value) for value in (1e-4, 1e-3, 1e-2, 1.0)] == pytest.approx([0, 0.25, 0.5, 1], abs=1e-12)
    assert (scale.down(1e-4), scale.down(1.0), scale.across(1e-2)) == (str(PLOT_HEIGHT), "0", "50%")

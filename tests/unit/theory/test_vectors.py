"""The two textbook ways to quantize a vector, against the slides they are from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from nearplane.theory.vectors import absmax_codes, zero_point_codes
from oracles import absmax, zero_point


@given(st.integers(0, 2**32 - 1), st.integers(2, 40))
def test_absmax_and_zero_point_are_those_of_the_slides(seed: int, size: int) -> None:
    w = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for expected, positions, (codes, *_) in ((*absmax(w), absmax_codes(w)), (*zero_point(w), zero_point_codes(w))):
        assume(float((positions - positions.floor() - 0.5).abs().min()) > 1e-9)
        assert torch.equal(codes, expected)


@given(st.integers(0, 2**32 - 1), st.integers(2, 40))
def test_absmax_and_zero_point_decode_to_within_half_a_step_and_one(seed: int, size: int) -> None:
    """Rounding the zero may push the ends of the range over the limit by half a step more."""
    w = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    codes, scale = absmax_codes(w)
    assert bool(((scale * codes - w).abs() <= scale / 2 * (1 + 1e-12)).all())
    codes, scale, zero = zero_point_codes(w)
    assert bool(((scale * (codes - zero) - w).abs() <= scale * (1 + 1e-12)).all())


@pytest.mark.parametrize("value", [0.0, 0.4, -3.0])
def test_a_vector_without_a_range_is_held_exactly(value: float) -> None:
    w = torch.full((5,), value)
    codes, scale = absmax_codes(w)
    assert torch.equal(codes.sign(), w.sign().int())
    codes, scale, zero = zero_point_codes(w)
    assert torch.equal(scale * (codes - zero), w)

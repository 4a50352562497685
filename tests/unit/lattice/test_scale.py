"""Steps: from the range, by search."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice import scale as scale_module
from nearplane.lattice.kernels_torch import NORM
from nearplane.lattice.scale import SHRINKS, Search, Steps, stored
from nearplane.number_formats import FP8, integers
from oracles import same
from strategies import groups

STORAGES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SEARCHES: tuple[Search, ...] = ("minmax", "mse")
BITS = st.integers(2, 8)


def fitted(bits: int, symmetric: bool, search: Search = "minmax", storage: torch.dtype = torch.float64) -> Steps:
    return Steps(format=integers(bits, None, symmetric=symmetric), search=search, storage=storage)


def rounded(weights: Tensor, scale: Tensor, zero: Tensor, steps: Steps) -> Tensor:
    """Return the values that weights (..., g) are rounded to."""
    s, z = scale[..., None], zero[..., None]
    return s * ((weights / s + z).round().clamp(steps.format.low, steps.format.high) - z)


@pytest.mark.parametrize(("symmetric", "low", "high"), [(True, -4, 3), (False, 0, 7)])
def test_codes_of_three_bits(symmetric: bool, low: int, high: int) -> None:
    steps = fitted(3, symmetric)
    assert (steps.format.low, steps.format.high) == (low, high)


@given(groups(), BITS)
def test_the_symmetric_step_is_the_smallest_that_reaches_both_ends(weights: Tensor, bits: int) -> None:
    """`low s <= min` and `max <= high s`; a thousandth of a billionth less, and one fails."""
    steps = fitted(bits, symmetric=True)
    scale, zero = steps.fit(weights)
    minimum, maximum = weights.amin(-1), weights.amax(-1)
    some = (weights != 0).any(-1)

    def reaches(s: Tensor) -> Tensor:
        return (steps.format.low * s <= minimum) & (maximum <= steps.format.high * s)

    assert bool(reaches(scale * (1 + 1e-12)).all())
    assert not bool(reaches(scale * (1 - 1e-12))[some].any())
    assert not bool(zero.any())


@given(groups(), BITS)
def test_the_asymmetric_grid_spans_the_range_of_the_weights_and_0(weights: Tensor, bits: int) -> None:
    steps = fitted(bits, symmetric=False)
    scale, zero = steps.fit(weights)
    extent = weights.amax(-1).clamp(min=0) - weights.amin(-1).clamp(max=0)
    some = (weights != 0).any(-1)
    assert same((scale * steps.format.high)[some], extent[some])
    assert torch.equal(zero, zero.round())
    assert bool(((zero >= steps.format.low) & (zero <= steps.format.high)).all())


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("symmetric", [True, False])
@given(groups(), BITS, st.sampled_from((1, -1)))
def test_a_group_of_one_sign_does_not_clip(
    symmetric: bool, storage: torch.dtype, weights: Tensor, bits: int, sign: int
) -> None:
    """Half a step is the largest error, or what rounding the step for storage takes from the range where that is more."""
    weights = sign * weights.abs()
    steps = fitted(bits, symmetric, storage=storage)
    scale, zero = steps.fit(weights)
    error = (weights - rounded(weights, scale, zero, steps)).abs().amax(-1)
    taken = max(-steps.format.low, steps.format.high) * (fitted(bits, symmetric).fit(weights)[0] - scale)
    assert bool((error <= torch.maximum(scale / 2, taken) * (1 + 1e-12)).all())


@pytest.mark.parametrize("search", SEARCHES)
@given(groups(), BITS, st.booleans(), st.sampled_from(STORAGES))
def test_steps_are_exactly_what_the_file_will_hold(
    search: Search, weights: Tensor, bits: int, symmetric: bool, storage: torch.dtype
) -> None:
    scale, _ = fitted(bits, symmetric, search, storage).fit(weights)
    assert torch.equal(scale.to(storage).to(scale.dtype), scale)
    assert bool((scale > 0).all())


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_group_of_zeros_gets_step_1_and_decodes_to_zeros(symmetric: bool, search: Search) -> None:
    steps = fitted(4, symmetric, search, torch.float16)
    weights = torch.zeros(2, 3, 8)
    scale, zero = steps.fit(weights)
    assert torch.equal(scale, torch.ones(2, 3))
    assert torch.equal(rounded(weights, scale, zero, steps), weights)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16])
def test_tiny_weights_do_not_get_step_0(
    storage: torch.dtype, symmetric: bool, search: Search, generator: torch.Generator
) -> None:
    """1e-12 is nothing in half precision, and a step of 0 would make NaN of the whole group."""
    steps = fitted(4, symmetric, search, storage)
    weights = 1e-12 * torch.randn(3, 16, generator=generator)
    scale, zero = steps.fit(weights)
    assert bool((scale > 0).all())
    assert torch.equal(scale.to(storage).to(scale.dtype), scale)
    assert bool(torch.isfinite(rounded(weights, scale, zero, steps)).all())


@pytest.mark.parametrize("search", SEARCHES)
def test_weights_too_large_for_the_storage_are_refused(search: Search) -> None:
    weights = torch.tensor([[1e7, -1e7]])
    with pytest.raises(NumericalError, match=r"float16"):
        fitted(4, True, search, torch.float16).fit(weights)
    fitted(4, True, search, torch.bfloat16).fit(weights)


def test_the_largest_step_of_half_precision_is_still_stored() -> None:
    assert stored(torch.tensor([65504.0]), torch.float16).item() == 65504
    with pytest.raises(NumericalError):
        stored(torch.tensor([65520.0]), torch.float16)


@given(groups(), BITS, st.booleans(), st.sampled_from(STORAGES))
def test_the_error_search_is_never_worse_than_the_range(
    weights: Tensor, bits: int, symmetric: bool, storage: torch.dtype
) -> None:
    """In its own norm; the full range is the first candidate."""
    searched, plain = (fitted(bits, symmetric, search, storage) for search in ("mse", "minmax"))
    errors = [
        (rounded(weights, *steps.fit(weights), steps) - weights).abs().pow(NORM).sum(-1) for steps in (searched, plain)
    ]
    assert bool((errors[0] <= errors[1] * (1 + 1e-12)).all())


@given(groups(), BITS, st.booleans(), st.sampled_from(SEARCHES))
def test_groups_are_fitted_one_by_one(weights: Tensor, bits: int, symmetric: bool, search: Search) -> None:
    """The grid of a matrix holds for every group what fitting it alone gives."""
    out, number, size = weights.shape
    steps = replace(fitted(bits, symmetric, search, torch.float16), format=integers(bits, size, symmetric=symmetric))
    grid = steps.grid(weights.reshape(out, -1))
    assert (grid.low, grid.high) == (steps.format.low, steps.format.high)
    assert grid.group.tolist() == [g for g in range(number) for _ in range(size)]
    for g in range(number):
        scale, zero = steps.fit(weights[:, g])
        assert torch.equal(grid.scale[:, g], scale)
        assert torch.equal(grid.zero[:, g], zero)


def test_without_a_group_size_there_is_one_step_a_row(generator: torch.Generator) -> None:
    W = torch.randn(3, 8, generator=generator)
    grid = fitted(4, True).grid(W)
    assert grid.scale.shape == (3, 1)
    assert torch.equal(grid.scale, replace(fitted(4, True), format=integers(4, 8)).grid(W).scale)


@given(groups(), BITS, st.sampled_from((-20, 20)), st.booleans())
def test_steps_scale_with_the_weights(weights: Tensor, bits: int, exponent: int, symmetric: bool) -> None:
    """By powers of two, exactly."""
    steps, factor = fitted(bits, symmetric), 2.0**exponent
    (scale, zero), (other, other_zero) = (steps.fit(w) for w in (weights, factor * weights))
    some = (weights != 0).any(-1)
    assert torch.equal(other[some], factor * scale[some])
    assert torch.equal(other_zero, zero)


@pytest.mark.parametrize("power", [1, 3])
def test_eight_bit_floats_need_no_step_of_less_than_half_the_range(
    power: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    W = torch.randn(64, 256, generator=generator) ** power
    steps = Steps(format=FP8, search="mse", storage=torch.bfloat16)
    scale, _ = steps.fit(W)
    monkeypatch.setattr(scale_module, "OCTAVE", SHRINKS)
    assert torch.equal(scale, steps.fit(W)[0])
    assert scale.unique().numel() > 20  # each row has a step of its own

"""Profiles: the lengths that each order makes of one volume."""

from __future__ import annotations

import pytest
import torch

from nearplane.lattice.factor import factorize
from nearplane.theory.profiles import profile
from strategies import problem

ORDERS = ("natural", "activation", "pivoted", "reversed")


@pytest.mark.parametrize("order", ORDERS)
def test_lengths_are_those_of_the_factor_and_their_product_that_of_any_order(order: str) -> None:
    H = problem(columns=12, tokens=40).H
    found, natural = profile(H, order), profile(H, "natural")
    assert torch.equal(found.lengths, factorize(H, order, damp=0.01).d)
    assert float(found.lengths.log().sum()) == pytest.approx(float(natural.lengths.log().sum()), rel=1e-9)
    assert found.trace == float(found.lengths.sum())


def test_the_spread_is_what_one_step_for_all_columns_costs() -> None:
    """Lengths 1 and 4: half of log2(2.5 / 2)."""
    H = torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64))
    assert profile(H, damp=0.0).spread == pytest.approx(0.16096404744368118)
    assert profile(torch.eye(5)).spread == pytest.approx(0.0, abs=1e-12)


def test_pivots_make_the_flattest_profile_here() -> None:
    """The greedy choice of the least pivot; no theorem, but so on every layer that was measured."""
    H = problem(columns=24, tokens=60).H
    pivoted, *others = (profile(H, order).trace for order in ("pivoted", "natural", "activation", "reversed"))
    assert pivoted <= min(others)

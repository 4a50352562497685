"""What a scheme derives from its options."""

import pytest

from nearplane import GridScheme, RateScheme
from nearplane.number_formats import number_format
from nearplane.recipe.scheme import SWEEP_DAMP

RATE = RateScheme(rate=3.0)


@pytest.mark.parametrize(
    ("scheme", "corrected", "expected"),
    [
        (GridScheme(damp=0.02), True, SWEEP_DAMP),
        (GridScheme(damp=0.02), False, 0.02),
        (GridScheme(damp=0.02, correct=False), True, 0.02),
        (GridScheme(damp="auto"), False, "auto"),
        (GridScheme(damp="auto"), True, SWEEP_DAMP),
        (GridScheme(damp=0.02, sweep_damp=0.3), True, 0.3),
        (GridScheme(damp=0.02, sweep_damp=0.0), True, 0.0),
        (GridScheme(damp=0.02, sweep_damp=0.3), False, 0.3),
        (GridScheme(damp=0.02, solver="round-to-nearest"), True, 0.02),
        (GridScheme(damp=0.02, solver="k-best"), True, SWEEP_DAMP),
        (RateScheme(rate=3, damp=0.02), True, SWEEP_DAMP),
        (RateScheme(rate=3, damp=0.02, sweep_damp=0.3), True, 0.3),
    ],
)
def test_the_sweep_is_damped_as_asked_else_more_where_targets_are_corrected(scheme, corrected, expected):
    assert SWEEP_DAMP == 0.1
    assert scheme.damp_of_the_sweep(corrected) == expected


def test_a_scheme_names_the_number_format_of_its_layers():
    assert GridScheme(bits=3, group_size=32).number_format.name == "int3-g32"
    mixed = GridScheme(bits=3.5, group_size=None, symmetric=False)
    assert mixed.number_format.name == "int4-row-asym"
    assert mixed.stored_in(number_format("int2-row-asym")).number_format.name == "int2-row-asym"
    assert RATE.number_format.name == "coded"
    assert RATE.stored_in(number_format("int3-row")) is RATE


def test_the_group_size_that_auto_stands_for():
    assert GridScheme().grouped([256, 96]).group_size == 32
    assert GridScheme(group_size=64).grouped([96]).group_size == 64
    assert RATE.grouped([96]) is RATE

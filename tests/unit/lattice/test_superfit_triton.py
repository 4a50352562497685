"""The fit of blocks' steps in Triton, run by its interpreter on the CPU."""

from __future__ import annotations

import pytest

from nearplane.number_formats import TYPES
from triton_processes import DAILY, NIGHTLY, problems, triton_runs_here


def check(counts: dict[str, int]) -> None:
    """Compare what random problems find with what `SuperFit` finds in float64."""
    found = problems("superfit_problems", counts)
    assert {each["kind"] for each in found} == {
        *(name for name, kind in TYPES.items() if kind.fit == "blocks"),
        "int3-g24-min",
    }
    for each in found:
        rounding = 2e-6 if each["dtype"] == "float32" else 1e-12
        assert each["moved"], each
        assert each["steps"] == 0, each
        assert each["E"] <= rounding, each  # weights minus values
        assert each["EH"] <= rounding, each
        assert each["loss"] <= rounding, each  # its change, against what E loses
        assert each["gained_less"] <= 2 * rounding, each
        assert each["unlike_torch"] == 0 or each["dtype"] == "float32", each
    assert sum(each["unlike_torch"] > 0 for each in found) <= 0.1 * len(found)


@triton_runs_here
def test_interpreted_fits_find_the_numbers_of_the_torch_form() -> None:
    """In float32 a number may be another where two losses, or a number and a tie, are equal up to rounding."""
    check(DAILY)


@triton_runs_here
@pytest.mark.nightly
def test_interpreted_fits_find_the_numbers_of_the_torch_form_in_many_problems() -> None:
    check(NIGHTLY)

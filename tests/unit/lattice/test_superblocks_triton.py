"""The search for the steps of blocks in Triton, run by its interpreter on the CPU."""

from __future__ import annotations

import pytest

from nearplane.number_formats import TYPES
from triton_processes import DAILY, NIGHTLY, problems, triton_runs_here


def check(counts: dict[str, int]) -> None:
    """Compare what random problems find with what the torch form finds."""
    found = problems("superblock_problems", counts)
    assert {each["kind"] for each in found} == {
        *(name for name, kind in TYPES.items() if kind.fit == "blocks"),
        "int3-g24-min",
    }
    for each in found:
        assert each["names"], each
        assert each["unstored"] == each["zeros"] == 0, each
        assert each["excess"] <= 1e-5, each  # of the error; errors are sums in float32
    assert sum(each["unlike_torch"] > 0 for each in found) <= 0.05 * len(found)


@triton_runs_here
def test_interpreted_searches_find_the_numbers_of_the_torch_form() -> None:
    """But for candidates whose errors are equal up to rounding."""
    check(DAILY)


@triton_runs_here
@pytest.mark.nightly
def test_interpreted_searches_find_the_numbers_of_the_torch_form_in_many_problems() -> None:
    check(NIGHTLY)

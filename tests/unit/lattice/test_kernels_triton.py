"""The kernels in Triton: run by its interpreter on the CPU, and compiled for cards that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from triton_processes import DAILY, NIGHTLY, problems, results, triton_runs_here

KINDS = {"4 bits", "symmetric", "2 bits", "unbounded", "E2M1", "200 levels"}


def check(counts: dict[str, int]) -> None:
    """Compare the results of random problems with the arithmetic that the torch forms state."""
    found = problems("triton_problems", counts)
    assert {each["book"] for each in found} == KINDS
    for each in found:
        assert each["wrong_values"] == each["far"] == each["miscounted"] == 0, each
        assert each["off_boundary"] <= 1e-5, each
        assert each["loss"] <= 1e-6, each
        assert each["excess"] <= 1e-6, each
        assert each["unlike_sums"] == 0, each


@triton_runs_here
def test_interpreted_kernels_do_the_arithmetic_of_the_torch_forms() -> None:
    """E is exactly what the codes leave; codes are the nearest ones but within 1e-5 of a step of a boundary."""
    check(DAILY)


@triton_runs_here
@pytest.mark.nightly
def test_interpreted_kernels_do_the_arithmetic_of_the_torch_forms_in_many_problems() -> None:
    check(NIGHTLY)


@triton_runs_here
@pytest.mark.nightly
def test_kernels_compile_for_cards_without_spills(tmp_path: Path) -> None:
    """For Ampere, Ada, Hopper and both kinds of Blackwell; the table is in docs/results/gpu.md."""
    compiled = results("triton_compiled.py", TRITON_CACHE_DIR=str(tmp_path))
    assert {each["card"] for each in compiled} == {80, 89, 90, 100, 120}
    for each in compiled:
        assert each["spilled"] == 0, each
        assert each["shared"] <= 99 << 10, each

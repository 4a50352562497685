"""Whole passes in Triton: run by its interpreter from a pretended GPU, and compiled for cards that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from triton_processes import DAILY, NIGHTLY, problems, results, triton_runs_here

KINDS = {
    "book": {"4 bits", "symmetric", "2 bits", "unbounded", "E2M1", "200 levels"},
    "fit": {"none", "float16", "bfloat16", "float32", "E4M3", "octaves"},
    "step": {"usual", "huge", "tiny"},
    "dead": {False, True},
}


def check(counts: dict[str, int]) -> None:
    """Compare sweeps and descents of random problems with their formulas; each pass is one launch."""
    found = problems("passes_problems", counts)
    for name, kinds in KINDS.items():
        assert {each[name] for each in found} == kinds
    for each in found:
        assert each["sweep_launches"] == 1, each
        assert each["descent_launches"] == each["descent_passes"], each
        for kind in ("sweep", "descent"):
            assert each[f"{kind}_wrong_values"] == each[f"{kind}_far"] == 0, each
            assert each[f"{kind}_off_boundary"] <= 1e-5, each
            assert each[f"{kind}_loss"] <= 1e-6, each
        assert each["sweep_miscounted"] == each["descent_wrong_steps"] == 0, each
    rows = sum(each["rows"] for each in found)
    assert sum(each["sweep_unlike_torch"] + each["descent_unlike_torch"] for each in found) <= 0.01 * rows


@triton_runs_here
def test_interpreted_passes_do_what_their_formulas_say_in_one_launch_each() -> None:
    """E is exactly what codes and steps leave; codes are the nearest but within 1e-5 of a step of a boundary."""
    check(DAILY)


@triton_runs_here
@pytest.mark.nightly
def test_interpreted_passes_do_what_their_formulas_say_in_many_problems() -> None:
    check(NIGHTLY)


@triton_runs_here
@pytest.mark.nightly
def test_passes_compile_for_cards_with_few_spills(tmp_path: Path) -> None:
    """For Ampere, Ada, Hopper and both kinds of Blackwell; the table is in docs/results/gpu.md, with what spills cost."""
    compiled = results("passes_compiled.py", TRITON_CACHE_DIR=str(tmp_path))
    assert {each["card"] for each in compiled} == {80, 89, 90, 100, 120}
    for each in compiled:
        assert each["spilled"] <= 128, each
        assert each["shared"] <= 99 << 10, each

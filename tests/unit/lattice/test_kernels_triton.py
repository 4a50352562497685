"""The kernels in Triton: run by its interpreter on the CPU, and compiled for cards that are not there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nearplane.errors import RecipeError
from nearplane.lattice import kernels
from triton_processes import results, triton_runs_here

KINDS = {"4 bits", "symmetric", "2 bits", "unbounded", "E2M1", "200 levels"}


def check(problems: list[dict[str, Any]], count: int) -> None:
    """Compare the results of random problems with the arithmetic that the torch forms state."""
    assert len(problems) == count
    assert {each["book"] for each in problems} == KINDS
    for each in problems:
        assert each["wrong_values"] == each["far"] == each["miscounted"] == 0, each
        assert each["off_boundary"] <= 1e-5, each
        assert each["loss"] <= 1e-6, each
        assert each["excess"] <= 1e-6, each
        assert each["unlike_sums"] == 0, each


@triton_runs_here
def test_interpreted_kernels_do_the_arithmetic_of_the_torch_forms() -> None:
    """E is exactly what the codes leave; codes are the nearest ones but within 1e-5 of a step of a boundary."""
    check(results("triton_problems.py", 20), 20)


@triton_runs_here
@pytest.mark.nightly
def test_interpreted_kernels_do_the_arithmetic_of_the_torch_forms_in_many_problems() -> None:
    check(results("triton_problems.py", 500), 500)


@triton_runs_here
@pytest.mark.nightly
def test_kernels_compile_for_cards_without_spills(tmp_path: Path) -> None:
    """For Ampere, Ada, Hopper and both kinds of Blackwell; the table is in docs/results/gpu.md."""
    compiled = results("triton_compiled.py", TRITON_CACHE_DIR=str(tmp_path))
    assert {each["card"] for each in compiled} == {80, 89, 90, 100, 120}
    for each in compiled:
        assert each["spilled"] == 0, each
        assert each["shared"] <= 99 << 10, each


def test_cuda_without_triton_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    kernels._triton.cache_clear()
    with pytest.raises(RecipeError, match=re.escape("Run pip install triton, or use --device cpu.")):
        kernels.KERNELS["cuda"]()


@triton_runs_here
@pytest.mark.skipif(torch.cuda.is_available(), reason="it starts here")
def test_a_triton_that_does_not_start_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here as there is no driver; elsewhere for want of a compiler."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kernels._triton.cache_clear()
    with pytest.raises(RecipeError, match=r"^triton does not start on the CUDA device: .* Or use --device cpu\.$"):
        kernels.KERNELS["cuda"]()


def test_a_device_without_kernels_of_its_own_uses_the_torch_forms() -> None:
    assert kernels.kernels_of(torch.empty(0, device="meta")) is kernels.torch_kernels()

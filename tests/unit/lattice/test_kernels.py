"""Which kernels a device has."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from nearplane.errors import RecipeError
from nearplane.lattice import kernels
from triton_processes import triton_runs_here


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

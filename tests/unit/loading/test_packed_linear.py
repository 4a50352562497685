"""A packed layer on a device multiplies by strips without waiting for it, and is filled with a matrix of its shape."""

from __future__ import annotations

import sys

import pytest
import torch

from coded import contents
from nearplane.coding.blob import decode_packed, encode
from nearplane.errors import FormatError
from nearplane.formats.native import matrix_of
from nearplane.loading import packed_linear
from nearplane.loading.packed_linear import PackedLinear
from pretended import pretended

CASE = contents(48, 96, outliers=25)


def test_a_layer_of_another_shape_or_without_weights_is_refused() -> None:
    layer = PackedLinear(5, 4, bias=False, dtype=torch.float32)
    with pytest.raises(FormatError, match="no weights yet"):
        layer(torch.zeros(1, 5))
    with pytest.raises(FormatError, match=r"\(48, 96\).*\(4, 5\)"):
        layer.fill(decode_packed(encode(CASE)))


def test_a_forward_pass_on_a_gpu_waits_for_nothing(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    """In several strips, with patches."""
    monkeypatch.setattr("nearplane.loading.packed_linear.MAX_STRIP_WEIGHTS", 5 * 96)
    packed = decode_packed(encode(CASE))
    here, there = (PackedLinear(96, 48, bias=False, dtype=torch.float32) for _ in range(2))
    here.fill(packed)
    assert torch.equal(here.weight, matrix_of(CASE).decode())
    x = torch.randn(40, 96, generator=generator)
    with pretended() as gpu:
        there.fill(packed, torch.device("pretend:0"))
        assert len(there.patch_at)
        on_gpu = x.to("pretend:0")
        gpu.forget()
        y = there(on_gpu)
        assert (gpu.total.synchronizations, gpu.total.waiting) == (0, 0)
        assert torch.equal(y.cpu(), here(x))


def test_without_triton_a_gpu_multiplies_by_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    packed_linear._triton.cache_clear()
    assert packed_linear.products_of(torch.device("cuda")) is None
    packed_linear._triton.cache_clear()

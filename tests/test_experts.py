"""Models with experts from end to end: every expert quantized on what it sees, and read back by plain transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import nearplane
from nearplane.errors import RecipeError
from nearplane.record import RunRecord
from readers.types import save_type

WINDOWS = torch.randint(3, 96, (24, 32), generator=torch.Generator().manual_seed(1))
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
APART = ("qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "deepseek_v3")  # files hold every expert's matrices apart


def quantized(kind: str, place: Path, **how: Any) -> RunRecord:
    """Quantize a tiny random model of a type from `place / "model"` into `place / "out"`."""
    save_type(place / "model", kind)
    return nearplane.quantize(place / "model", place / "out", calibration=WINDOWS, device="cpu", **how)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(WINDOWS[:2, :16], use_cache=False).logits


@pytest.mark.parametrize("kind", APART if NIGHTLY else APART[:2])
def test_plain_transformers_computes_with_the_experts_that_were_solved(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    record = quantized(kind, tmp_path, bits=4, group_size=16)
    experts = [layer for layer in record.layers if ".experts." in layer.name]
    assert len({layer.name for layer in experts}) == len(experts) >= 12
    assert all(0 < layer.tokens < record.tokens for layer in experts)
    assert any(layer.correction > 0 for layer in experts)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    nearplane.export(tmp_path / "out", tmp_path / "dense", dtype="float32")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    torch.testing.assert_close(logits(plain), logits(dense), rtol=0, atol=1e-5)
    again = nearplane.verify(tmp_path / "out", against=tmp_path / "model", calibration=WINDOWS, device="cpu")
    assert not again.faults
    assert again.measured


def test_gptq_is_refused_with_a_format_that_works(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"experts\.0\.gate_proj is one of several experts .* --format compressed-tensors"
    ):
        quantized("qwen3_moe", tmp_path, bits=4, group_size=16, format="gptq")
    record = nearplane.quantize(
        tmp_path / "model",
        tmp_path / "out",
        calibration=WINDOWS,
        bits=4,
        group_size=16,
        format="gptq",
        ignore=["experts"],
    )
    assert not any(".experts." in layer.name for layer in record.layers)

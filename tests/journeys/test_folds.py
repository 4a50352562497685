"""Checkpoints with channel scales folded from norms: written, verified, tuned, and computed by transformers."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import forgery
import nearplane
from families import VOCABULARY
from native_checkpoints import save_tiny
from nearplane.record.record_file import read_record
from nearplane.record.remarks import remarks
from nightly import daily

SIZES = dict(hidden_size=64, intermediate_size=64, head_dim=32, num_attention_heads=2, num_key_value_heads=2)
WORDS = dict(grid="nvfp4", activations="fp4")


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (12, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return made(tmp_path / "model", "llama")


def made(folder: Path, family: str) -> Path:
    """Write a model whose norms have channels of very different size, and weights behind them that make up for it."""
    sizes = SIZES | (
        {"num_hidden_layers": 1, "num_experts": 4, "moe_intermediate_size": 32}
        if family == "qwen3_moe"
        else {"num_hidden_layers": 2}
    )
    save_tiny(folder, family, torch.bfloat16, **sizes)
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(1)
    tensors = load_file(file)
    second = "pre_feedforward_layernorm" if family == "gemma2" else "post_attention_layernorm"
    for name in [name for name in tensors if name.endswith(("input_layernorm.weight", f"{second}.weight"))]:
        factors = torch.randint(-4, 5, tensors[name].shape, generator=generator).bfloat16().exp2()
        tensors[name] *= factors
        block, read = name.rpartition(".")[0].rpartition(".")[0], ("self_attn.q", "self_attn.k", "self_attn.v")
        for other, each in tensors.items():
            behind = read if "input" in name else ("gate", "up_proj")
            if (
                other.startswith(f"{block}.")
                and any(part in other for part in behind)
                and each.shape[-1] == len(factors)
            ):
                each /= factors
    save_file(tensors, file, {"format": "pt"})
    return folder


def unfolded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let inputs of four bits be as inputs of eight, which leave norms as they are."""
    monkeypatch.setattr("nearplane.calibration.folding.BITS", 0)


@pytest.mark.parametrize(
    "kind",
    daily([("llama", "nvfp4"), ("llama", "mxfp4"), ("gemma2", "nvfp4"), ("qwen3_moe", "mxfp4")], [("llama", "nvfp4")]),
)
def test_folded_scales_lose_less_and_certificates_are_those_of_the_folded_network(
    tmp_path: Path, tokens: Tensor, kind: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, grid = kind
    words, folder = WORDS | {"grid": grid, "calibration": tokens}, made(tmp_path / "model", family)
    folded, plain = tmp_path / "folded", tmp_path / "plain"
    record = nearplane.quantize(folder, folded, **words)
    assert len(record.folds) == (2 if family == "qwen3_moe" else 4)
    assert {each.offset for each in record.folds} == {float(family == "gemma2")}
    assert any("adapters made for the original do not fit" in each for each in remarks(record))
    found = nearplane.verify(folded, against=folder, calibration=tokens)
    assert (found.faults, found.measured) == ((), True)
    with monkeypatch.context() as patch:
        unfolded(patch)
        assert nearplane.quantize(folder, plain, **words).folds == ()
    kl, before = (
        nearplane.evaluate(out, tokens, against=folder, activations=True).computed.kl for out in (folded, plain)
    )
    assert kl < 0.8 * before
    if family == "qwen3_moe":
        return  # transformers does not round the inputs of experts
    theirs = AutoModelForCausalLM.from_pretrained(folded)
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
        assert torch.equal(nearplane.load(folded, activations=True).eval()(tokens).logits, expected)


def test_a_record_whose_scales_would_change_the_network_is_found_out(
    model: Path, tokens: Tensor, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    record = nearplane.quantize(model, out, **WORDS, calibration=tokens)
    first, *others = record.folds
    forgery.sign(out, replace(record, folds=(replace(first, weights=first.weights[:2]), *others)))
    found = nearplane.verify(out, against=model, calibration=tokens)
    assert (first.norm, "the scales that the record folds from it change the network") in {
        (each.where, each.what) for each in found.faults
    }
    forgery.sign(out, replace(record, folds=tuple(others)))
    assert f"{first.norm}.weight" in {
        each.where for each in nearplane.verify(out, against=model, calibration=tokens).faults
    }
    forgery.sign(out, replace(record, folds=(replace(first, norm="model.nowhere"), *others)))
    with pytest.raises(nearplane.ModelError, match=r"has no model\.nowhere with the weights of the record"):
        nearplane.verify(out, against=model)


@pytest.mark.nightly
def test_tuning_trains_the_folded_network(model: Path, tokens: Tensor, tmp_path: Path) -> None:
    out, tuned = tmp_path / "out", tmp_path / "tuned"
    # a text on which tuning gains, so that something else than the start is written
    text = torch.randint(VOCABULARY, (60, 40), generator=torch.Generator().manual_seed(5))
    folds = nearplane.quantize(model, out, **WORDS, calibration=text[:12]).folds
    record = nearplane.tune(out, tuned, against=model, calibration=text)
    assert record.folds == folds == read_record(tuned).folds
    assert record.tuning.held_out < record.tuning.start
    assert nearplane.verify(tuned, against=model, calibration=text).faults == ()


@pytest.mark.nightly
def test_a_mix_is_chosen_in_the_folded_network(
    model: Path, tokens: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "nearplane"):
        record = nearplane.quantize(model, tmp_path / "out", mix="nvfp4,fp8", bits_per_weight=6, calibration=tokens)
    assert sum("channel scales of 4 norms" in each for each in caplog.messages) == 1
    formats = {layer.name: layer.format for layer in record.layers}
    assert {each.norm for each in record.folds} == {
        norm
        for number in range(2)
        for norm, read in (("input_layernorm", "self_attn.q_proj"), ("post_attention_layernorm", "mlp.up_proj"))
        for block in [f"model.layers.{number}"]
        if formats[f"{block}.{read}"] == "nvfp4"
        for norm in [f"{block}.{norm}"]
    }

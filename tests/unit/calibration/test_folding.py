"""Channel scales folded from norms into weights: the network stays the same to the bit, or is left as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from families import DEEPSEEK, FAMILIES, config_of, random_model
from nearplane.calibration.activations import skeleton
from nearplane.calibration.folding import changing, fold, powers_of
from nearplane.calibration.windows import Windows
from nearplane.models.model import Model, open_model
from nearplane.number_formats import FP4_NV, INT8_TOKEN, InputRounding
from nearplane.record.fold import Fold
from nearplane.system.device import Device

CPU = Device(torch.device("cpu"))
FOLDED = {
    "llama": ["input_layernorm", "post_attention_layernorm"],
    "qwen3": ["input_layernorm", "post_attention_layernorm"],
    "gpt2": ["ln_1", "ln_2"],  # biases of norms, matrices stored as (in, out)
    "opt": ["final_layer_norm", "self_attn_layer_norm"],
    "gpt_neox": ["input_layernorm", "post_attention_layernorm"],  # both norms read the block's input
    "mixtral": ["input_layernorm", "post_attention_layernorm"],  # a router and experts read one norm
    "qwen3_moe": ["input_layernorm", "post_attention_layernorm"],
    "deepseek_v3": ["input_layernorm", "kv_a_layernorm", "post_attention_layernorm", "q_a_layernorm"],
    "gemma2": ["input_layernorm", "pre_feedforward_layernorm"],  # norms multiply by 1 + their weights
}


@pytest.fixture
def uneven(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a model whose norms have channels of very different size."""

    def made(family: str) -> Path:
        config = config_of(family, **(DEEPSEEK if family == "deepseek_v3" else FAMILIES[family]))
        random_model(config).float().save_pretrained(tmp_path)
        file, generator = tmp_path / "model.safetensors", torch.Generator().manual_seed(1)
        tensors = load_file(file)
        for name, each in tensors.items():
            if each.dim() == 1 and ("norm.weight" in name or "ln_" in name):
                tensors[name] = each * torch.randint(-4, 5, each.shape, generator=generator).float().exp2()
        save_file(tensors, file, {"format": "pt"})
        return tmp_path

    return made


def all_rounded(_: str) -> InputRounding:
    return FP4_NV


def outputs(model: Model, tokens: Tensor) -> Tensor:
    """Return the hidden states behind the last block."""
    stream = skeleton(model, [tokens], device="cpu", dtype=torch.float32)
    for block in model.blocks:
        with block.on("cpu", torch.float32, original=False):
            stream.advance(block)
    return stream.quantized[0]


@pytest.mark.parametrize("family", FOLDED)
def test_a_network_with_folded_scales_is_the_same_to_the_bit(
    family: str, uneven: Callable[[str], Path], tokens: Tensor
) -> None:
    model = open_model(str(uneven(family)))
    names = model.reader.names()
    plain, before = model.reader.read(names), outputs(model, tokens)
    windows = Windows(seqlen=tokens.shape[1], fitted=tokens)
    fold(model, windows, CPU, all_rounded)
    assert sorted({each.norm.rpartition(".")[2] for each in model.folds}) == FOLDED[family]
    assert all(any(each.powers) for each in model.folds)
    if family == "gemma2":
        assert all(each.offset == 1 for each in model.folds)
        torch.testing.assert_close(outputs(model, tokens), before, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(outputs(model, tokens), before)
    assert changing(model, windows, CPU) == []
    read = model.reader.read(names)
    changed = {name for name in names if not torch.equal(read[name], plain[name])}
    assert len(changed) >= 2 * len(model.folds)
    model.fold(())
    assert all(torch.equal(each, plain[name]) for name, each in model.reader.read(names).items())


def test_scales_even_out_what_is_rounded(uneven: Callable[[str], Path], tokens: Tensor) -> None:
    """Half of the range, in octaves, stays in the inputs; the other half moves to the weights."""
    model = open_model(str(uneven("llama")))

    def spread() -> float:
        seen: list[Tensor] = []
        stream = skeleton(model, [tokens], device="cpu", dtype=torch.float32)
        with model.blocks[0].on("cpu", torch.float32, original=False) as block:
            (layer, *_) = block.quantized_layers()
            with layer.before(lambda _, x: seen.append(x)):
                stream.advance(block)
        return float(seen[0].flatten(0, 1).square().mean(0).log2().std())

    before = spread()
    fold(model, Windows(seqlen=tokens.shape[1], fitted=tokens), CPU, all_rounded)
    assert spread() == pytest.approx(before / 2, rel=0.25)


@pytest.mark.parametrize("how", [None, INT8_TOKEN])
def test_nothing_is_folded_where_inputs_are_not_rounded_to_four_bits(
    how: InputRounding | None, uneven: Callable[[str], Path], tokens: Tensor
) -> None:
    model = open_model(str(uneven("llama")))
    fold(model, Windows(seqlen=tokens.shape[1], fitted=tokens), CPU, lambda _: how)
    assert model.folds == ()


def test_only_norms_before_rounded_inputs_are_folded(uneven: Callable[[str], Path], tokens: Tensor) -> None:
    model = open_model(str(uneven("llama")))
    rounded = "model.layers.1.mlp.up_proj"
    fold(model, Windows(seqlen=tokens.shape[1], fitted=tokens), CPU, lambda name: FP4_NV if name == rounded else None)
    (only,) = model.folds
    assert only.norm == "model.layers.1.post_attention_layernorm"
    assert only.weights == ("model.layers.1.mlp.gate_proj.weight", rounded + ".weight")


def test_a_fold_that_leaves_out_a_weight_changes_the_network_and_is_named(
    uneven: Callable[[str], Path], tokens: Tensor
) -> None:
    model = open_model(str(uneven("llama")))
    windows = Windows(seqlen=tokens.shape[1], fitted=tokens)
    fold(model, windows, CPU, all_rounded)
    first, *others = model.folds
    model.fold([Fold(norm=first.norm, weights=first.weights[:1], exponents=first.exponents), *others])
    assert changing(model, windows, CPU) == [first.norm]
    elsewhere = Fold(norm="model.norm", weights=(), exponents="N" * len(first.exponents))
    crossing = Fold(norm=first.norm, weights=("model.layers.1.mlp.up_proj.weight",), exponents=first.exponents)
    for wrong in (elsewhere, crossing):
        model.fold([wrong])
        assert changing(model, windows, CPU) == [wrong.norm]


def test_what_is_written_as_it_is_must_be_exact_in_its_dtype(uneven: Callable[[str], Path], tokens: Tensor) -> None:
    folder = uneven("llama")
    file = folder / "model.safetensors"
    tensors = {name: each.half() for name, each in load_file(file).items()}
    for block in range(2):
        tensors[f"model.layers.{block}.self_attn.q_proj.weight"][0] = 6e-8  # the smallest number of float16
    save_file(tensors, file, {"format": "pt"})
    model = open_model(str(folder), ignore=["layers.0.self_attn.q_proj"])
    before = outputs(model, tokens)
    fold(model, Windows(seqlen=tokens.shape[1], fitted=tokens), CPU, all_rounded)
    assert torch.equal(outputs(model, tokens), before)
    norms = {each.norm for each in model.folds}
    assert "model.layers.0.input_layernorm" not in norms
    assert "model.layers.1.input_layernorm" in norms
    (read,) = model.reader.read(["model.layers.1.self_attn.q_proj.weight"]).values()
    assert read.dtype == torch.float32


def test_channels_that_are_always_0_have_no_scale() -> None:
    assert powers_of(torch.tensor([1.0, 2.0**8, 0.0, 2.0**16])) == [2, 0, 0, -2]
    assert powers_of(torch.zeros(2)) == [0, 0]
    assert powers_of(torch.tensor([1e-300, 1e300], dtype=torch.float64)) == [12, -12]

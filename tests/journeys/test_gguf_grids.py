"""Whole runs on llama.cpp's grids: the types of layers, embeddings and head in the file, and what the record says of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

import nearplane
from families import LLAMA, TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane import RecipeError, verify
from nearplane.demo import CALIBRATION
from nearplane.formats.gguf.gguf_header import FILE
from nearplane.loading.dense_network import dense_network
from nearplane.number_formats import TYPES
from nearplane.record.record_file import read_record
from nearplane.record.summary import summary

TINY = LLAMA | dict(num_hidden_layers=2, hidden_size=256, intermediate_size=288, head_dim=64, num_attention_heads=4)
TINY |= dict(num_key_value_heads=2, attention_bias=False, vocab_size=TEXT_VOCABULARY)
NARROW = dict(hidden_size=64, intermediate_size=96, head_dim=16)  # for types whose blocks hold 32 weights
TOKENS = dict(samples=5, seqlen=64)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(CALIBRATION.read_text()[:12000])
    return str(path)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    def folder_of(dtype: torch.dtype = torch.float32, **changes: Any) -> str:
        folder = tmp_path_factory.mktemp("models") / "model"
        random_model(config_of("llama", **(TINY | changes))).to(dtype).save_pretrained(folder)
        add_tokenizer(folder)
        return str(folder)

    return folder_of


@pytest.fixture(scope="module")
def mixed(model_of: Callable[..., str], text: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A checkpoint of q4_k_m with tied embeddings, whose down projections 256 does not divide, and the original."""
    out, model = tmp_path_factory.mktemp("out") / "mixed", model_of(tie_word_embeddings=True)
    nearplane.quantize(model, out, grid="q4_k_m", calibration=text, **TOKENS)
    return out, model


def types_of(out: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out / FILE).tensors}


def test_a_mix_has_llama_cpps_types_in_file_and_record(mixed: tuple[Path, str]) -> None:
    """Of two blocks both get more bits; rows of 288 get blocks of 32."""
    out, _ = mixed
    found = types_of(out)
    for block in ("blk.0", "blk.1"):
        own = {name.split(".")[2]: kind for name, kind in found.items() if name.startswith(block)}
        more = block == "blk.1"  # (0 - 2 // 8) % 3 is not 2, and 0 is not below 2 // 8
        assert own["attn_v"] == ("Q6_K" if more else "Q4_K")
        assert own["ffn_down"] == ("Q8_0" if more else "Q5_0")
        assert {own[name] for name in ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up")} == {"Q4_K"}
        assert own["attn_norm"] == "F32"
    assert found["token_embd.weight"] == "Q6_K"
    told = {layer.name: layer.format for layer in read_record(out).layers}
    assert told["model.embed_tokens"] == "q6_k"
    assert told["model.layers.1.mlp.down_proj"] == "q8_0"
    assert read_record(out).recipe.layers == ()  # what was asked for, not what became of it


def test_its_losses_are_measured_again(mixed: tuple[Path, str]) -> None:
    out, model = mixed
    found = verify(out, against=model)
    assert found.faults == ()
    assert found.measured


def test_transformers_reads_what_we_read(mixed: tuple[Path, str]) -> None:
    out, _ = mixed
    ours = dense_network(out).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(out, gguf_file=FILE, dtype=torch.float32).state_dict()
    assert ours.keys() == theirs.keys()
    for key, values in ours.items():
        assert torch.equal(values, theirs[key]), key


@pytest.mark.parametrize(
    ("words", "token_embd", "output", "down"),
    [
        pytest.param({"grid": "q3_k"}, "Q3_K", "Q6_K", "Q4_0", marks=pytest.mark.nightly),
        ({"grid": "iq4_xs"}, "IQ4_XS", "Q6_K", "IQ4_NL"),  # 256 does not divide the inputs of down
        pytest.param({"grid": "iq4_nl"}, "IQ4_NL", "Q6_K", "IQ4_NL", marks=pytest.mark.nightly),
        ({"grid": "mxfp4", "format": "gguf"}, "MXFP4", "Q8_0", "MXFP4"),  # 256 does not divide those of the head
        ({"grid": "q8_0", "embeddings": "q4_1", "solver": "round-to-nearest"}, "Q4_1", "Q4_1", "Q8_0"),
        pytest.param(
            {"grid": "q4_0", "embeddings": "bf16", "solver": "round-to-nearest"},
            "BF16",
            "BF16",
            "Q4_0",
            marks=pytest.mark.nightly,
        ),
        ({"grid": "q5_k", "layers": {"down_proj": {"grid": "q4_1"}}, "embeddings": "f32"}, "F32", "F32", "Q4_1"),
    ],
    ids=str,
)
def test_embeddings_head_and_single_layers_have_the_types_that_are_asked_for(
    words: dict[str, Any],
    token_embd: str,
    output: str,
    down: str,
    model_of: Callable[..., str],
    text: str,
    tmp_path: Path,
) -> None:
    dtype = torch.bfloat16 if words.get("embeddings") == "bf16" else torch.float32
    narrow = NARROW if words["grid"] in ("mxfp4", "q8_0", "q4_0") else {}
    model = model_of(dtype, tie_word_embeddings=False, num_hidden_layers=1, **narrow)
    tokens = {} if "solver" in words else TOKENS | {"calibration": text}
    nearplane.quantize(model, tmp_path / "out", **words, **tokens)
    found = types_of(tmp_path / "out")
    assert (found["token_embd.weight"], found["output.weight"], found["blk.0.ffn_down.weight"]) == (
        token_embd,
        output,
        down,
    )
    assert verify(tmp_path / "out").faults == ()


def test_mxfp4_has_the_values_of_compressed_tensors_and_transformers_reads_them(
    model_of: Callable[..., str], text: str, tmp_path: Path
) -> None:
    """Of the same codes."""
    model, ours = model_of(tie_word_embeddings=False, num_hidden_layers=1, **NARROW), tmp_path / "ours"
    nearplane.quantize(model, ours, grid="mxfp4", format="gguf", embeddings="f32", calibration=text, **TOKENS)
    nearplane.quantize(model, tmp_path / "theirs", grid="mxfp4", calibration=text, **TOKENS)
    assert read_record(tmp_path / "theirs").recipe.format == "compressed-tensors"
    ours, theirs = dense_network(ours).state_dict(), dense_network(tmp_path / "theirs").state_dict()
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", gguf_file=FILE, dtype=torch.float32).state_dict()
    assert ours.keys() == theirs.keys() == read.keys()
    for key, values in ours.items():
        assert torch.equal(values, theirs[key]), key
        assert torch.equal(values, read[key]), key


@pytest.mark.nightly
def test_types_are_chosen_for_a_budget(model_of: Callable[..., str], text: str, tmp_path: Path) -> None:
    """Bits per weight of blocks are at most what was asked for, single layers have the type that they are given."""
    model, out = model_of(tie_word_embeddings=True, num_hidden_layers=1), tmp_path / "out"
    nearplane.quantize(model, out, grid=4.5, layers={"0.*q_proj": {"grid": "q8_0"}}, calibration=text, **TOKENS)
    record = read_record(out)
    free = [
        layer for layer in record.layers if "layers." in layer.name and not layer.name.endswith("0.self_attn.q_proj")
    ]
    weights = sum(layer.out_features * layer.in_features for layer in free)
    assert 4.2 < sum(8 * layer.bytes for layer in free) / weights <= 4.5
    assert len({layer.format for layer in free}) > 1
    told = {layer.name: layer.format for layer in record.layers}
    assert (told["model.layers.0.self_attn.q_proj"], told["model.embed_tokens"]) == ("q8_0", "q6_k")
    assert verify(out).faults == ()


def test_types_are_chosen_for_a_size(model_of: Callable[..., str], text: str, tmp_path: Path) -> None:
    """The whole folder is at most that and close to it; embeddings get the largest type within the bits that layers get."""
    model, out = model_of(tie_word_embeddings=False, num_hidden_layers=1), tmp_path / "out"
    layers = {"0.*q_proj": {"grid": "q2_k"}}
    record = nearplane.quantize(model, out, size="700KB", format="gguf", layers=layers, calibration=text, **TOKENS)
    assert record.folder == sum(path.stat().st_size for path in out.iterdir())
    assert 0.95 * 700_000 < record.folder <= 700_000
    told = {layer.name: layer.format for layer in record.layers}
    assert told["model.layers.0.self_attn.q_proj"] == "q2_k"
    free = [
        layer for layer in record.layers if "layers." in layer.name and not layer.name.endswith("0.self_attn.q_proj")
    ]
    bits = sum(8 * layer.bytes for layer in free) / sum(layer.out_features * layer.in_features for layer in free)
    assert TYPES[told["model.embed_tokens"]].rate <= bits
    assert len({layer.format for layer in free}) > 1
    assert any("--size 700KB: " in line and "% of that" in line for line in summary(record, out))
    assert verify(out).faults == ()


@pytest.mark.parametrize("size", ["300KB", "300MB"])
def test_a_size_that_types_do_not_have_is_refused(
    size: str, model_of: Callable[..., str], text: str, tmp_path: Path
) -> None:
    """It says which sizes there are; nothing is left."""
    with pytest.raises(RecipeError, match=rf"--size {size} is .* Use [\d,]+ to [\d,]+ bytes \(q\w+ to q\w+\)"):
        nearplane.quantize(model_of(), tmp_path / "out", size=size, format="gguf", calibration=text, **TOKENS)
    assert not list(tmp_path.iterdir())


def test_widths_that_no_blocks_divide_are_refused_before_work_starts(
    model_of: Callable[..., str], text: str, tmp_path: Path
) -> None:
    model = model_of(intermediate_size=300)
    with pytest.raises(RecipeError, match=r"mlp\.down_proj has 300 inputs, not a multiple of the block size 32"):
        nearplane.quantize(model, tmp_path / "out", grid="q4_k", calibration=text, **TOKENS)
    assert not (tmp_path / "out").exists()

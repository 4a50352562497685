"""One solve for several runtimes: a checkpoint is exported, and other programs read the same network from every format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import nearplane
from checkpoints import save_part_of_the_demo
from families import DEEPSEEK, TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane.cli.app import app
from nearplane.demo import CALIBRATION
from nearplane.errors import FormatError, RecipeError
from nearplane.formats.find_record import find_record
from nearplane.formats.gguf.gguf_header import FILE
from nearplane.loading.dense_network import dense_network
from nearplane.record.record_file import read_record
from nearplane.system.safetensors_files import ShardReader
from plain_formats import decoded

WORDS: dict[str, Any] = dict(calibration=str(CALIBRATION), samples=8, seqlen=64)
TOKENS = torch.arange(24)[None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_part_of_the_demo(tmp_path_factory.mktemp("model") / "model", blocks=1)


def logits(network: Any) -> Tensor:
    with torch.no_grad():
        read: Tensor = network(TOKENS).logits
    return read


def by_transformers(folder: Path, **options: Any) -> Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options))


def by_numpy(folder: Path) -> Tensor:
    """Return the logits of what an independent reader decodes, in transformers' dense network."""
    network = AutoModelForCausalLM.from_pretrained(folder.parent / "model", dtype=torch.float32)
    weights = {name: torch.from_numpy(each.floats()) for name, each in decoded(folder).items()}
    network.load_state_dict(weights, strict=False)
    assert network.state_dict().keys() - weights.keys() <= {"lm_head.weight"}  # tied to the embeddings
    return logits(network)


def test_compressed_tensors_moves_to_gptq_and_gguf(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Logits are equal in every program, and the record goes along: losses can be measured again from the new files."""
    (tmp_path / "model").symlink_to(model)
    nearplane.quantize(model, tmp_path / "out", bits=4, group_size=32, **WORDS)
    expected = by_transformers(tmp_path / "out")
    for format in ("gptq", "gguf"):
        app(["export", str(tmp_path / "out"), str(tmp_path / format), "--format", format], result_action="return_value")
        assert f"weights moved to {format} unchanged" in capsys.readouterr().out
    assert torch.equal(by_numpy(tmp_path / "gptq"), expected)
    assert torch.equal(by_transformers(tmp_path / "gguf", gguf_file=FILE), expected)
    bare = copytree(tmp_path / "out", tmp_path / "bare")
    (bare / "nearplane.json").unlink()  # as from llm-compressor
    nearplane.export(bare, tmp_path / "again", format="gguf")
    assert torch.equal(by_transformers(tmp_path / "again", gguf_file=FILE), expected)
    with pytest.raises(FormatError, match="has no run record in its key"):
        find_record(tmp_path / "again")
    losses = [layer.loss for layer in read_record(tmp_path / "out").layers]
    for format, title in (("gptq", "int4-g32"), ("gguf", "int4-g32")):
        found = nearplane.verify(tmp_path / format, against=model, calibration=CALIBRATION)
        assert (found.measured, found.faults) == (True, ())
        assert [layer.loss for layer in found.record.layers] == losses
        assert (found.record.recipe.format, found.record.layers[0].format) == (format, title)
        app(["inspect", str(tmp_path / format)], result_action="return_value")
        app(["report", str(tmp_path / format), str(tmp_path / f"{format}.html")], result_action="return_value")


NIGHTLY: Mapping[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "asymmetric": (dict(bits=4, group_size=64, symmetric=False, format="gptq_v2"), ("awq",)),
    "awq": (dict(bits=4, group_size=128, symmetric=False, format="awq"), ("gptq_v2",)),
    "rows of zeros": (
        dict(bits=4, group_size=None, symmetric=False, format="gptq_v2", ignore=["down_proj"]),
        ("awq", "gguf"),
    ),
    "rows of 8": (dict(bits=8, group_size=None), ("gptq", "gptq_v2", "gguf")),
    "5 bits": (dict(bits=5, group_size=64), ("gguf",)),
    "gptq of 3": (dict(bits=3, group_size=32, format="gptq"), ("compressed-tensors", "gptq_v2")),
    "widths": (dict(bits=4, group_size=32, layers={"down_proj": {"bits": 8}}), ("gptq", "gguf")),
    "mxfp4": (dict(grid="mxfp4"), ("gguf",)),
    "tuned": (dict(bits=4, group_size=32, tune="network"), ("gptq", "gguf")),
}


@pytest.mark.nightly
@pytest.mark.parametrize("case", NIGHTLY)
def test_what_moves_is_the_same_network_with_a_true_record(case: str, model: Path, tmp_path: Path) -> None:
    options, formats = NIGHTLY[case]
    (tmp_path / "model").symlink_to(model)
    nearplane.quantize(model, tmp_path / "out", **WORDS | options)
    expected = logits(dense_network(tmp_path / "out"))
    for format in formats:
        nearplane.export(tmp_path / "out", tmp_path / format, format=format)
        if format == "gguf":
            read = by_transformers(tmp_path / format, gguf_file=FILE)
        elif case == "widths":  # one config for all layers is what the independent reader reads of GPTQ
            read = logits(dense_network(tmp_path / format))
        else:
            read = by_numpy(tmp_path / format)
        assert torch.equal(read, expected)
        found = nearplane.verify(tmp_path / format, against=model, calibration=CALIBRATION)
        assert (found.measured, found.faults) == (True, ())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "format", "target"),
    [
        ("gpt2", "gptq", "gptq_v2"),  # stores (in, out)
        ("gpt2", "gptq", "gguf"),
        ("gemma3_text", "compressed-tensors", "gguf"),  # its norms are stored less 1
        ("llama", "compressed-tensors", "gguf"),  # rows of q and k are interleaved
        ("qwen3_moe", "compressed-tensors", "gguf"),  # experts
        ("mixtral", "compressed-tensors", "gguf"),
        ("qwen3_moe", "compressed-tensors", "gptq"),
    ],
)
def test_families_move(family: str, format: str, target: str, tmp_path: Path) -> None:
    needs: dict[str, dict[str, Any]] = {  # of llama.cpp
        "llama": {"attention_bias": False},
        "gemma3_text": {"query_pre_attn_scalar": 8},
        "qwen3_moe": {"moe_intermediate_size": 32, "norm_topk_prob": True},
        "mixtral": {},
    }
    source = tmp_path / "model"
    config = config_of(family, vocab_size=TEXT_VOCABULARY, **needs.get(family, {}))
    random_model(config).to(torch.bfloat16).save_pretrained(source)
    add_tokenizer(source)
    words = WORDS | dict(bits=4, group_size=32, format=format, solver="round-to-nearest")
    nearplane.quantize(source, tmp_path / "out", **words)
    nearplane.export(tmp_path / "out", tmp_path / "new", format=target)
    expected = dense_network(tmp_path / "out").state_dict()
    for name, values in dense_network(tmp_path / "new").state_dict().items():
        assert torch.equal(values, expected[name]), name
    assert nearplane.verify(tmp_path / "new", against=source, calibration=CALIBRATION).faults == ()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 3}, "q_proj is entropy-coded, and no grid holds such codes"),
        ({"grid": "nvfp4"}, "q_proj: gptq_v2 does not store nvfp4"),
        ({"grid": "q4_k", "ignore": ["down_proj"], "embeddings": "bf16"}, "int4-g32-asym does not hold its values"),
        ({"grid": "q4_0"}, r"model\.embed_tokens is a Embedding; GPTQ stores Linear and Conv1D layers only"),
    ],
)
def test_what_has_no_integers_of_the_other_format_stays(
    options: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    nearplane.quantize(model, tmp_path / "out", **WORDS | options)
    with pytest.raises(RecipeError, match=message):
        nearplane.export(tmp_path / "out", tmp_path / "new", format="gptq_v2")
    assert not [*tmp_path.glob("new*")]


@pytest.mark.nightly
def test_float32_that_a_gguf_rounds_is_said(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A matrix that is left in float32 becomes float16, as in every GGUF; quantized layers are equal."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    network.model.layers[0].mlp.down_proj.weight.data *= 1.1
    network.save_pretrained(tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    words = WORDS | dict(bits=4, group_size=32, format="gptq", ignore=[r"layers\.0\.mlp\.down_proj"])
    nearplane.quantize(tmp_path / "model", tmp_path / "out", **words)
    nearplane.export(tmp_path / "out", tmp_path / "new", format="gguf")
    name = "model.layers.0.mlp.down_proj.weight"
    assert (
        f"1 tensors that are not quantized are rounded, as in all files of this format; the first is {name}"
        in caplog.text
    )
    old, new = dense_network(tmp_path / "out").state_dict(), dense_network(tmp_path / "new").state_dict()
    assert [each for each in old if not torch.equal(old[each], new[each])] == [name]
    assert torch.equal(new[name], load_file(tmp_path / "model" / "model.safetensors")[name].half().float())


def test_tensors_that_are_not_quantized_keep_their_dtype(tmp_path: Path) -> None:
    """A router's bias is in float32 in a network of bfloat16: rounded, it would cost as much as quantization does."""
    source, name = random_model(config_of("deepseek_v3", **DEEPSEEK)).bfloat16(), "e_score_correction_bias"
    bias = next(each for key, each in source.state_dict().items() if name in key)
    source.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    key = next(each for each in weights if name in each)
    weights[key] = 6.8 + torch.rand(bias.shape, generator=torch.Generator().manual_seed(0))
    save_file(weights, file, {"format": "pt"})
    add_tokenizer(tmp_path / "model")
    nearplane.quantize(tmp_path / "model", tmp_path / "out", bits=4, group_size=32, solver="round-to-nearest")
    nearplane.export(tmp_path / "out", tmp_path / "kept")
    nearplane.export(tmp_path / "out", tmp_path / "short", dtype="float16")
    readers = [ShardReader(tmp_path / each) for each in ("kept", "short")]
    kept, short = (reader.read(reader.names()) for reader in readers)
    assert torch.equal(kept[key], weights[key])
    assert {each.dtype for each in kept.values()} == {torch.bfloat16, torch.float32}
    assert {each.dtype for each in short.values()} == {torch.float16}
    configs = [json.loads((tmp_path / each / "config.json").read_text())["dtype"] for each in ("kept", "short")]
    assert configs == ["bfloat16", "float16"]
    loaded = dense_network(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.state_dict()[key], weights[key])

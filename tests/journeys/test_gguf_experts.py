"""Experts in a GGUF: those of a block are one tensor in the file, and have names of their own for whoever reads it with us."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import nearplane
from families import LLAMA, MOE, TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from killing import contents, stopped_behind
from nearplane import FormatError, ModelError, RecipeError
from nearplane.demo import CALIBRATION
from nearplane.formats.gguf.gguf_header import FILE, SUMS, TENSORS
from nearplane.formats.gguf.gguf_reader import GGUFReader
from nearplane.formats.gguf.mixes import fitting
from nearplane.loading.dense_network import dense_network
from nightly import daily

EXPERTS = LLAMA | MOE | dict(num_hidden_layers=1, moe_intermediate_size=32, tie_word_embeddings=False)
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS | dict(norm_topk_prob=True),
    "qwen2_moe": EXPERTS | dict(shared_expert_intermediate_size=64),
    "olmoe": EXPERTS | dict(num_key_value_heads=4),
    "mixtral": EXPERTS,
}
READ = ("qwen3_moe", "qwen2_moe")  # types with experts that transformers reads from a GGUF
TEXT: dict[str, Any] = dict(calibration=str(CALIBRATION), samples=8, seqlen=32)
WORDS: dict[str, Any] = TEXT | dict(format="gguf", bits=4, group_size=32)


@pytest.fixture(scope="module")
def source_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function from a type to the folder of a tiny random model with the demo's tokenizer."""

    def folder_of(kind: str, **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("models") / "model"
        config = config_of(kind, **(SHAPES[kind] | {"vocab_size": TEXT_VOCABULARY} | changes))
        random_model(config).float().save_pretrained(folder)
        add_tokenizer(folder)
        return folder

    return folder_of


@pytest.mark.parametrize("kind", daily(SHAPES, ["qwen2_moe"]))
def test_experts_are_one_tensor_of_a_block_and_every_loss_is_measured_again(
    kind: str, source_of: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = source_of(kind), tmp_path / "out"
    record = nearplane.quantize(source, out, **WORDS)
    assert len([layer for layer in record.layers if ".experts." in layer.name]) == 4 * 3
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(out / FILE).tensors}
    for part in ("gate", "up", "down"):
        stacked = tensors[f"blk.0.ffn_{part}_exps.weight"]
        width = 64 if kind in ("olmoe", "mixtral") else 32
        shape = (4, 32, width) if part == "down" else (4, width, 32)
        assert (stacked.tensor_type.name, *stacked.shape[::-1]) == ("Q4_0", *shape)
    assert tensors["blk.0.ffn_gate_inp.weight"].tensor_type.name == "F32"
    found = nearplane.verify(out, against=source, calibration=str(CALIBRATION))
    assert (found.faults, found.measured) == ((), True)
    if kind in READ:
        config = AutoConfig.from_pretrained(source)
        theirs = AutoModelForCausalLM.from_pretrained(out, gguf_file=FILE, dtype=torch.float32, config=config)
        ours = dense_network(out).state_dict()
        assert ours.keys() == theirs.state_dict().keys()
        for name, values in theirs.state_dict().items():
            assert torch.equal(values, ours[name]), name


def test_a_mix_has_one_type_for_all_experts_of_a_block(source_of: Callable[..., Path], tmp_path: Path) -> None:
    """And so has what is chosen by measuring. Where there are 8, attention has more bits."""
    source = source_of("qwen3_moe", num_experts=8, num_local_experts=8)
    nearplane.quantize(source, tmp_path / "mix", grid="q4_k_m", **TEXT)
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "mix" / FILE).tensors}
    assert {types[f"blk.0.{part}.weight"] for part in ("attn_k", "attn_v")} == {"Q8_0"}
    assert types["blk.0.attn_output.weight"] == fitting("q5_k", 32).name.upper()
    record = nearplane.quantize(source, tmp_path / "size", grid=4.8, **TEXT)
    kinds = {layer.format for layer in record.layers if ".experts." in layer.name and "down_proj" not in layer.name}
    assert kinds <= {"q4_0", "q5_0", "q5_1", "q8_0"}
    assert nearplane.verify(tmp_path / "size").faults == ()


@pytest.mark.nightly
def test_a_run_that_was_stopped_goes_on(
    source_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of("qwen3_moe", num_hidden_layers=2)
    monkeypatch.setattr("nearplane.formats.journal_pages.MAX_JOURNAL_SHARE", float("inf"))
    stopped_behind(1, source, tmp_path / "out", monkeypatch, **WORDS)
    nearplane.quantize(source, tmp_path / "out", **WORDS)
    nearplane.quantize(source, tmp_path / "whole", **WORDS)
    assert contents(tmp_path / "out")[FILE] == contents(tmp_path / "whole")[FILE]


@pytest.mark.parametrize(
    ("kind", "changes", "how", "says"),
    [
        ("qwen3_moe", dict(norm_topk_prob=False), {}, "norm_topk_prob in config.json is False"),
        ("qwen3_moe", dict(mlp_only_layers=[0]), {}, r"mlp_only_layers in config.json is \[0\]"),
        ("qwen2_moe", dict(norm_topk_prob=True), {}, "norm_topk_prob in config.json is True"),
        ("olmoe", dict(clip_qkv=1.0), {}, "clip_qkv in config.json is 1.0"),
        (
            "qwen3_moe",
            {},
            {"layers": {r"experts\.2\.": {"bits": 8}}},
            r"experts\.\d\.\w+_proj\.weight would have the type Q\d_0, but in another expert Q\d_0",
        ),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    kind: str, changes: dict[str, Any], how: dict[str, Any], says: str, source_of: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=says):
        nearplane.quantize(source_of(kind, **changes), tmp_path / "out", **WORDS, **how)
    assert not any(path.name.startswith("out") for path in tmp_path.iterdir())


def test_a_tensor_of_experts_whose_hashes_do_not_fit_is_refused(source_of: Callable[..., Path], tmp_path: Path) -> None:
    """One expert's data is damaged: it is named. The star is taken out of a name: refused when the file is opened."""
    out = tmp_path / "out"
    nearplane.quantize(source_of("qwen3_moe"), out, **(WORDS | {"solver": "round-to-nearest"}))
    whole = (out / FILE).read_bytes()
    reader = GGUFReader(out)
    name = "model.layers.0.mlp.experts.3.up_proj.weight_q4_0"
    place = reader._infos[name].begin
    (out / FILE).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(FormatError, match=rf"{re.escape(name)} is damaged: its SHA-256"):
        [*reader.read([name])]
    reader.read([name.replace("experts.3", "experts.2")])
    star = b"model.layers.0.mlp.experts.*.up_proj.weight"
    (out / FILE).write_bytes(whole.replace(star, star.replace(b"*", b"1")))
    with pytest.raises(ModelError, match="its metadata have the SHA-256"):
        GGUFReader(out)


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "blk.0.ffn_gate_inp_shexp.weight"])
def test_no_other_tensor_is_of_experts(name: str, tmp_path: Path) -> None:
    """What is turned or reshaped on its way is never stacked: a star in its name is refused, not tripped over."""
    writer = gguf.GGUFWriter(tmp_path / FILE, "llama")
    writer.add_head_count(4)
    writer.add_array(TENSORS, ["m.*.q.weight"])
    writer.add_array(SUMS, [8 * 64 * "0"])
    writer.add_tensor(name, np.zeros((8, 16, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"which do not fit m\.\*\.q\.weight\."):
        GGUFReader(tmp_path)


def test_experts_that_a_checkpoint_holds_together_are_refused(tmp_path: Path) -> None:
    config = config_of("qwen3_moe", **(SHAPES["qwen3_moe"] | {"vocab_size": TEXT_VOCABULARY}))
    random_model(config).float().save_pretrained(tmp_path / "model", save_original_format=False)
    add_tokenizer(tmp_path / "model")
    with pytest.raises(
        RecipeError, match=r"experts\.\w+ contains all experts of a block, but a GGUF needs separate matrices"
    ):
        nearplane.quantize(tmp_path / "model", tmp_path / "out", **WORDS)

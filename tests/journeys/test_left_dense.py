"""What stays dense is named where readers look for it: experts, routers, and parts that transformers does not build."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import nearplane
from families import config_of, random_model
from model_types import save_type
from nearplane.models.ignored import merged_experts, unquantized_patterns
from nearplane.models.model import open_model
from nearplane.models.structure import unbuilt_parts
from nearplane.record.summary import summary
from nearplane.system.safetensors_files import ShardReader

MTP = "model.layers.3"  # one more than the network has


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a family to the folder of a tiny model; "mtp" is a Llama with a layer that is not built."""
    made: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family in made:
            return made[family]
        folder = made[family] = tmp_path_factory.mktemp(family) / "model"
        random_model(config_of("llama" if family == "mtp" else family)).to(torch.bfloat16).save_pretrained(folder)
        if family == "mtp":
            tensors = load_file(folder / "model.safetensors")
            block = {n: t for n, t in tensors.items() if n.startswith("model.layers.2.")}
            tensors |= {n.replace("model.layers.2", MTP): t.clone() for n, t in block.items()}
            tensors |= {f"{MTP}.eh_proj.weight": torch.ones(32, 64), "mtp.head.weight": torch.ones(8, 8)}
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    return folder_of


def quantized(source: Path, out: Path, **how: Any) -> tuple[dict[str, Any], nearplane.record.record.RunRecord]:
    """Round a model to nearest; return what config.json says of it, and the record."""
    record = nearplane.quantize(source, out, solver="round-to-nearest", device="cpu", **how)
    return json.loads((out / "config.json").read_text())["quantization_config"], record


@pytest.mark.parametrize("format", ["compressed-tensors", "gptq_v2"])
def test_layers_that_transformers_does_not_build_are_copied_named_and_said(
    source: Callable[[str], Path], tmp_path: Path, format: str
) -> None:
    """Other readers build them (multi-token prediction), and would take them for quantized."""
    folder = source("mtp")
    config, record = quantized(folder, tmp_path / "out", bits=4, group_size=16, format=format)
    patterns = [rf"^{part}(\..*)?$" for part in (r"model\.layers\.3", "mtp")]
    if format == "gptq_v2":
        assert [f"-:{pattern}" for pattern in patterns] == list(config["dynamic"])
    else:
        assert [f"re:{pattern}" for pattern in patterns] == config["ignore"][-2:]
    before, after = ShardReader(folder), ShardReader(tmp_path / "out")
    for name in (f"{MTP}.self_attn.q_proj.weight", f"{MTP}.eh_proj.weight", "mtp.head.weight"):
        assert torch.equal(before.read([name])[name], after.read([name])[name])
    assert record.skipped == (
        (MTP, "transformers does not build it, 8 matrices"), ("mtp", "transformers does not build it, 1 matrix"),
    )  # fmt: skip
    assert f"not quantized: {MTP} (transformers does not build it, 8 matrices)" in list(summary(record, tmp_path))


def test_a_part_is_as_large_as_it_can_be() -> None:
    used = ["model.layers.0.mlp.weight", "model.norm.weight", "head.weight"]
    unused = [
        "model.layers.0.extra.weight",
        "model.layers.1.a.weight",
        "model.layers.1.b.c.weight",
        "tower.x.weight",
        "y",
    ]
    assert unbuilt_parts(unused, used) == {"model.layers.0.extra": 1, "model.layers.1": 2, "tower": 1, "y": 1}


def test_experts_are_named_in_the_network_and_in_the_file(source: Callable[[str], Path]) -> None:
    """The names of mixtral's are not the same in both."""
    whole = open_model(str(source("mixtral")))
    assert not any("experts" in name for name in unquantized_patterns(whole, whole.layers))
    assert merged_experts(whole, whole.layers) == []
    model = open_model(str(source("mixtral")), ignore=[r"mlp\.experts"])
    names = unquantized_patterns(model, model.layers)
    assert "lm_head" in names
    assert r"re:^model\.layers\.0\.mlp\.experts(\..*)?$" in names
    assert r"re:^model\.layers\.0\.block_sparse_moe\.experts(\..*)?$" in names
    assert merged_experts(model, model.layers) == [f"model.layers.{index}.mlp.experts" for index in range(3)]
    dense = open_model(str(source("llama")))
    assert (unquantized_patterns(dense, dense.layers), merged_experts(dense, dense.layers)) == (["lm_head"], [])


def test_ignored_layers_of_every_kind_are_named(tmp_path: Path) -> None:
    """Readers of GPTQ replace Conv1D too."""
    random_model(config_of("gpt2")).to(torch.float16).save_pretrained(tmp_path / "model")
    config, _ = quantized(
        tmp_path / "model", tmp_path / "out", bits=4, group_size=32, format="gptq_v2", ignore=["c_proj"]
    )
    assert len(config["dynamic"]) == 6
    assert sorted(config["modules_in_block_to_quantize"][0]) == [
        f"transformer.h.{index}.{name}" for index in range(3) for name in ("attn.c_attn", "mlp.c_fc")
    ]


def test_parts_outside_the_blocks_are_said(tmp_path: Path) -> None:
    """Of a multimodal model: its vision tower and what leads from there to the blocks."""
    small = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = config_of(
        "gemma3", text_config=dict(config_of("gemma3_text").to_dict(), sliding_window=6),
        vision_config=small | dict(image_size=28, patch_size=14), mm_tokens_per_image=4,
    )  # fmt: skip
    random_model(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    record = quantized(tmp_path / "model", tmp_path / "out", bits=4, group_size=16)[1]
    assert record.skipped == (
        ("model.vision_tower", "outside the stack of blocks, 10 matrices"),
    )  # fmt: skip
    assert all(layer.name.startswith("model.language_model.layers.") for layer in record.layers)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text"])
def test_narrow_gates_of_linear_attention_stay_as_they_are(tmp_path: Path, kind: str) -> None:
    folder = save_type(tmp_path / "model", kind, torch.bfloat16, hidden_size=256, num_attention_heads=4)
    config, record = quantized(folder, tmp_path / "out", bits=4, group_size=16)
    ends = dict(qwen3_next={"ba": 8}, qwen3_5_text={"b": 4, "a": 4})[kind]
    gates = {f"model.layers.0.linear_attn.in_proj_{end}": outputs for end, outputs in ends.items()}
    said = dict(record.skipped)
    assert {name: said[name] for name in gates} == {
        name: f"{outputs} outputs of 256 inputs: a gate" for name, outputs in gates.items()
    }
    assert gates.keys() <= set(config["ignore"])
    before, after = ShardReader(folder), ShardReader(tmp_path / "out")
    for name in gates:
        assert torch.equal(
            before.read([f"{name}.weight"])[f"{name}.weight"], after.read([f"{name}.weight"])[f"{name}.weight"]
        )
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(20)[None]
    assert torch.isfinite(read(ids).logits).all()
    ours = nearplane.load(tmp_path / "out", device="cpu", packed=False)
    torch.testing.assert_close(read(ids).logits, ours(ids).logits)

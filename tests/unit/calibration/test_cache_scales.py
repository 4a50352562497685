"""Scales of a key-value cache: measured in the network with the weights that are written, stored for vLLM, applied by evaluate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import nearplane
from checkpoints import save_part_of_the_demo
from families import DEEPSEEK, LLAMA, config_of, random_model
from nearplane.calibration import one_forward
from nearplane.calibration.cache_scales import LARGEST, Passing, rounded, scales_by_layer
from nearplane.calibration.windows import calibration_windows
from nearplane.demo import CALIBRATION
from nearplane.errors import FormatError, RecipeError
from nearplane.models.model import open_model
from nearplane.planning.request import resolved
from nearplane.recipe.recipe import Recipe
from nearplane.record.record_file import read_record
from nearplane.system.device import Device
from nearplane.system.progress import silent

FAST: dict[str, Any] = {
    "calibration": str(CALIBRATION),
    "samples": 16,
    "seqlen": 64,
    "device": "cpu",
    "bits": 4,
    "group_size": 32,
}
TOKENS = torch.randint(3, 700, (4, 48), generator=torch.Generator().manual_seed(0))


HYBRID = LLAMA | dict(
    layer_types=["linear_attention", "full_attention"], num_hidden_layers=2, linear_key_head_dim=8, linear_value_head_dim=8,
    linear_num_key_heads=2, linear_num_value_heads=2, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
    shared_expert_intermediate_size=16,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_part_of_the_demo(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def with_scales(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("outs") / "scales"
    nearplane.quantize(model, out, kv_cache="fp8", **FAST)
    return out


def test_numbers_come_back_as_the_nearest_of_e4m3_and_large_ones_are_cut() -> None:
    x = torch.tensor([0.0, 1.0, 1.06, 1.07, 500.0, -1000.0]).view(1, 1, -1, 1)
    assert rounded(x, torch.ones(1)).flatten().tolist() == [0.0, 1.0, 1.0, 1.125, LARGEST, -LARGEST]
    assert rounded(x, torch.full((1,), 4.0)).flatten().tolist()[-2:] == [512.0, -1024.0]
    by_head = rounded(torch.full((1, 2, 1, 1), 1000.0), torch.tensor([1.0, 4.0]))
    assert by_head.flatten().tolist() == [LARGEST, 1024.0]


def test_scales_are_the_largest_magnitudes_of_the_written_network(with_scales: Path, model: Path) -> None:
    """On the calibration windows: here on the text again, with keys and values of the loaded checkpoint."""
    record = read_record(with_scales)
    stored = load_file(with_scales / "model.safetensors")
    assert record.cache_scales.keys() == {f"model.layers.{n}.self_attn" for n in range(2)}
    for name, (keys, values) in record.cache_scales.items():
        assert float(stored[f"{name}.k_scale"]) == pytest.approx(keys, rel=1e-7)
        assert float(stored[f"{name}.v_scale"]) == pytest.approx(values, rel=1e-7)
    scheme = json.loads((with_scales / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert (scheme["num_bits"], scheme["type"], scheme["strategy"], scheme["symmetric"]) == (8, "float", "tensor", True)
    network = nearplane.load(with_scales, dtype="float32", packed=False)
    peaks: dict[int, tuple[float, float]] = {}

    def look(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = peaks.get(layer, (0.0, 0.0))
        peaks[layer] = max(before[0], float(keys.abs().max())), max(before[1], float(values.abs().max()))
        return keys, values

    opened = open_model(str(model))
    plan = resolved(opened, Recipe.from_spellings(**{k: v for k, v in FAST.items() if k != "device"}))
    windows = calibration_windows(opened, plan.recipe, None, Device.named("cpu"), silent)
    with torch.no_grad():
        network(windows.fitted, cache=Passing(look))
    for layer, (keys, values) in peaks.items():
        expected = record.cache_scales[f"model.layers.{layer}.self_attn"]
        assert (keys / LARGEST, values / LARGEST) == pytest.approx(
            expected, rel=1e-3
        )  # blocks one by one, or all at once


def test_weights_are_the_same_as_without(with_scales: Path, model: Path, tmp_path: Path) -> None:
    nearplane.quantize(model, tmp_path / "plain", **FAST)
    plain, scaled = (load_file(each / "model.safetensors") for each in (tmp_path / "plain", with_scales))
    assert all(torch.equal(tensor, scaled[name]) for name, tensor in plain.items())
    assert {name.rpartition(".")[2] for name in scaled.keys() - plain.keys()} == {"k_scale", "v_scale"}


def test_evaluate_measures_with_rounded_keys_and_values(with_scales: Path, model: Path) -> None:
    """Whole networks and blocks one by one say the same; the scales are worth something."""
    found = nearplane.evaluate(with_scales, TOKENS, against=str(model), kv_cache="fp8")
    assert found.computed is not None
    assert found.computed.rounded == ("cache",)
    assert found.computed.kl > found.kl
    assert "with keys and values in fp8" in str(found)
    network = nearplane.load(with_scales, dtype="float32", packed=False)
    alone = nearplane.evaluate(network, TOKENS, against=str(model), kv_cache="fp8")  # an object has no scales: 1.0
    assert alone.computed.kl != found.computed.kl


def test_other_programs_and_exports_leave_the_scales_out(with_scales: Path, tmp_path: Path) -> None:
    ours = nearplane.load(with_scales, dtype="float32")(TOKENS).logits
    theirs = AutoModelForCausalLM.from_pretrained(with_scales, dtype="float32")(TOKENS).logits
    assert torch.allclose(ours, theirs, atol=1e-4)
    nearplane.export(with_scales, tmp_path / "dense", dtype="float32")
    assert not any(name.endswith("_scale") for name in load_file(tmp_path / "dense" / "model.safetensors"))


def test_verify_repeats_the_scales_and_finds_a_changed_one(with_scales: Path, model: Path, tmp_path: Path) -> None:
    assert nearplane.verify(with_scales, against=str(model)).faults == ()
    shutil.copytree(with_scales, tmp_path / "changed")
    file = tmp_path / "changed" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.v_scale"] *= 2
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((tmp_path / "changed" / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"]["dynamic"] = True
    (tmp_path / "changed" / "config.json").write_text(json.dumps(config))
    faults = [(each.where, each.what) for each in nearplane.verify(tmp_path / "changed").faults]
    assert any(where.endswith("1.self_attn.v_scale") and "in the files, and" in what for where, what in faults)
    assert ("config.json", "its kv_cache_scheme is not that of --kv-cache fp8, which is in the record") in faults


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        ({"k": torch.ones(1)}, r"v_scale is missing"),
        ({"v": torch.ones(1)}, r"k_scale is missing"),
        ({"k": torch.zeros(1), "v": torch.ones(1)}, r"k_scale is \[0\.0\], expected a positive number"),
        ({"k": torch.ones(1), "v": torch.tensor([float("nan")])}, r"v_scale is \[nan\]"),
        ({"k": torch.ones(3), "v": torch.ones(1)}, r"k_scale is \[1\.0, 1\.0, 1\.0\]"),
    ],
)
def test_scales_that_cannot_be_are_refused(scales: dict[str, torch.Tensor], said: str, with_scales: Path) -> None:
    network = nearplane.load(with_scales, dtype="float32", packed=False)
    with pytest.raises(FormatError, match=said):
        scales_by_layer(network, {f"model.layers.0.self_attn.{name}_scale": each for name, each in scales.items()})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "gptq"}, "gptq has no place for its scales"),
        ({"solver": "round-to-nearest"}, "needs calibration"),
        ({"rate": 3.0, "bits": None, "group_size": None}, "nearplane has no place for its scales"),
    ],
)
def test_a_cache_without_place_or_text_is_refused(
    options: dict[str, Any], said: str, model: Path, tmp_path: Path
) -> None:
    asked = {name: value for name, value in (FAST | options).items() if value is not None}
    with pytest.raises(RecipeError, match=said):
        nearplane.quantize(model, tmp_path / "out", kv_cache="fp8", **asked)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("gpt2", {}, "has no module self_attn, where"),
        ("deepseek_v3", {"kv_lora_rank": 32}, "caches the inputs of its keys and values"),
        ("qwen3_next", HYBRID, "has layers of type linear_attention, which keep other states"),
        ("minimax", HYBRID, "has layers of type linear_attention, which keep other states"),
        ("falcon_h1", LLAMA, "has layers of type hybrid, which keep other states"),
    ],
)
def test_networks_whose_scales_vllm_does_not_look_for_are_refused(
    family: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """By evaluate, too, which else would foretell what no server computes."""
    config = config_of(family, **(DEEPSEEK | changes if family == "deepseek_v3" else changes))
    network = random_model(config)
    network.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    with pytest.raises(RecipeError, match=said):
        nearplane.quantize(
            tmp_path / "model", tmp_path / "out", bits=4, group_size=None, kv_cache="fp8", calibration=TOKENS % 90
        )
    with pytest.raises(RecipeError, match=said):
        nearplane.evaluate(network, TOKENS % 90, kv_cache="fp8")


def test_checkpoints_with_scales_are_not_tuned_and_moved_without_them(
    with_scales: Path, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match="which tuning does not measure again"):
        nearplane.tune(with_scales, tmp_path / "tuned", against=str(model), samples=60, steps=40)
    nearplane.export(with_scales, tmp_path / "gptq", format="gptq")
    record = read_record(tmp_path / "gptq")
    assert (record.recipe.kv_cache, record.cache_scales) == ("none", {})
    assert nearplane.verify(tmp_path / "gptq", against=str(model)).faults == ()


def test_looking_at_keys_frees_as_much_of_a_paused_pass(model: Path, tmp_path: Path) -> None:
    """What is computed on the side is no result of a pass; else no memory is freed where numbers of results differ."""
    counted: dict[str, list[bool]] = {}
    usual = one_forward.BlockForward._paused
    for name in ("none", "fp8"):
        seen = counted.setdefault(name, [])

        def paused(self: Any, forward: Any, stage: int, seen: list[bool] = seen) -> Any:
            result = usual(self, forward, stage)
            seen.append(forward.results.count == self._look.entered[self._look.groups[stage][0].name][0].results)
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one_forward.BlockForward, "_paused", paused)
            nearplane.quantize(model, tmp_path / name, kv_cache=name, **FAST)
    assert counted["none"] == counted["fp8"]
    assert any(counted["fp8"])

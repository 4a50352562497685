"""Models with experts from end to end: every expert quantized on what it sees, and read back by plain transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import nearplane
from model_types import save_type
from nearplane.errors import RecipeError
from nearplane.evaluation import predictions as predictions
from nearplane.formats.stored import Stored
from nearplane.models.experts import parameter_of
from nearplane.models.layers import Layer
from nearplane.models.model import open_model
from nearplane.record.record import RunRecord
from nearplane.record.record_file import read_record
from nearplane.system.device import Device
from nearplane.system.safetensors_files import ShardReader
from nightly import daily

WINDOWS = torch.randint(3, 96, (24, 32), generator=torch.Generator().manual_seed(1))
PACKED = ("qwen3_moe", "llama4_text", "mixtral", "qwen2_moe", "olmoe", "deepseek_v3")  # that transformers reads packed
CODED = ("gpt_oss", "mixtral", "granitemoe", "llama4_text", "qwen3_moe", "qwen2_moe", "olmoe", "deepseek_v3")
ONE_BLOCK = ("qwen3_moe", "gpt_oss", "mixtral")  # whose blocks are alike
ROUNDED = dict(solver="round-to-nearest", device="cpu")


def quantized(kind: str, place: Path, **how: Any) -> RunRecord:
    """Quantize a tiny random model of a type from `place / "model"` into `place / "out"`."""
    if not (place / "model").exists():
        save_type(place / "model", kind)
    return nearplane.quantize(place / "model", place / "out", calibration=WINDOWS, **{"device": "cpu", **how})


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(WINDOWS[:2, :16], use_cache=False).logits


def dense(place: Path) -> Tensor:
    """Return the logits of the decoded weights, as plain transformers computes them."""
    nearplane.export(place / "out", place / "dense", dtype="float32")
    return logits(AutoModelForCausalLM.from_pretrained(place / "dense", dtype=torch.float32))


def experts(record: RunRecord) -> list[Any]:
    return [layer for layer in record.layers if ".experts." in layer.name]


def check(place: Path) -> None:
    """Measure every loss again."""
    again = nearplane.verify(place / "out", against=place / "model", calibration=WINDOWS, device="cpu")
    assert not again.faults
    assert again.measured


@pytest.mark.parametrize("kind", daily(PACKED, PACKED[:1]))
def test_plain_transformers_computes_with_the_experts_that_were_solved(kind: str, tmp_path: Path) -> None:
    save_type(tmp_path / "model", kind, **({"num_hidden_layers": 1} if kind in ONE_BLOCK else {}))
    record = quantized(kind, tmp_path, bits=4, group_size=16)
    found = experts(record)
    assert len({layer.name for layer in found}) == len(found) >= 12
    assert all(0 < layer.tokens < record.tokens for layer in found)
    assert all(0 < layer.alike <= 1 and layer.blended >= 0 for layer in found)
    assert any(layer.correction > 0 for layer in found)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(logits(plain), dense(tmp_path), rtol=0, atol=1e-5)
    check(tmp_path)


@pytest.mark.parametrize("kind", daily(CODED, CODED[:1]))
def test_coded_experts_are_read_back_with_equal_logits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of files that hold every expert's matrices apart, and of those that hold all in one tensor."""
    save_type(tmp_path / "model", kind, **({"num_hidden_layers": 1} if kind in ONE_BLOCK else {}))
    record = quantized(kind, tmp_path, rate=3.0, allocate="uniform")
    assert record.rate == pytest.approx(3.0, rel=0.02)
    expected = dense(tmp_path)
    for packed in (True, False):
        torch.testing.assert_close(logits(nearplane.load(tmp_path / "out", packed=packed)), expected, rtol=0, atol=2e-5)
    monkeypatch.setattr(predictions, "MAX_MEMORY_SHARE", 0.0)
    network = predictions.opened(predictions.Outline.of(tmp_path / "out"), Device(torch.device("cpu")))
    assert isinstance(network, predictions.Streamed)
    with network.predicting(WINDOWS[:2, :16], 2) as predicted, torch.no_grad():
        torch.testing.assert_close(predicted(0)(0, 16), expected, rtol=0, atol=2e-5)
    if kind != "mixtral":
        check(tmp_path)


@pytest.mark.parametrize("kind", daily((*CODED, "aria_text", "granitemoehybrid"), ("granitemoe",)))
def test_dense_exports_have_the_tensors_that_transformers_saves(kind: str, tmp_path: Path) -> None:
    """Names too: other programs, as mlx_lm, know experts of Granite by those of its files alone."""
    quantized(kind, tmp_path, rate=4, allocate="uniform", **ROUNDED)
    dense(tmp_path)
    saved, exported = (ShardReader(tmp_path / each).infos for each in ("model", "dense"))
    assert {name: info.shape for name, info in exported.items()} == {name: info.shape for name, info in saved.items()}


@pytest.mark.parametrize("kind", ["gpt_oss", "granitemoe"])
def test_packed_experts_that_transformers_does_not_read_are_refused_with_ways_that_work(
    kind: str, tmp_path: Path
) -> None:
    with pytest.raises(
        RecipeError, match=r"experts\.0\.gate_proj: transformers would not load .*, --rate 4, or"
    ) as refused:
        quantized(kind, tmp_path, bits=4, group_size=16, **ROUNDED)
    offered = re.findall(r"'([^']+)'", str(refused.value))
    assert len(offered) == 1
    record = quantized(kind, tmp_path, bits=4, group_size=16, ignore=offered, **ROUNDED)
    assert not experts(record)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(logits(plain), dense(tmp_path), rtol=0, atol=1e-5)


def test_gptq_is_refused_with_a_format_that_works_where_its_program_does_not_read_experts(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"experts\.0\.w1 is one of several experts .* --runtime vllm or nearplane"):
        quantized("mixtral", tmp_path, bits=4, group_size=16, format="gptq", **ROUNDED)
    record = quantized("mixtral", tmp_path, bits=4, group_size=16, format="gptq", ignore=["experts"], **ROUNDED)
    assert not experts(record)


def test_experts_in_gptq_have_names_of_their_own_and_are_read_back(tmp_path: Path) -> None:
    record = quantized("qwen3_moe", tmp_path, bits=4, group_size=16, format="gptq", **ROUNDED)
    assert experts(record)
    names = Stored(tmp_path / "out").names()
    assert {"model.layers.1.mlp.experts.3.down_proj", "model.layers.0.mlp.experts.0.gate_proj"} <= {*names}
    assert not nearplane.verify(tmp_path / "out").faults
    loaded = nearplane.load(tmp_path / "out", dtype="float32", device="cpu")
    torch.testing.assert_close(logits(loaded), dense(tmp_path), rtol=0, atol=1e-5)


@pytest.mark.nightly
def test_widths_by_slope_are_one_for_all_experts(tmp_path: Path) -> None:
    """transformers decodes the experts of all blocks alike; they are named by a pattern."""
    record = quantized("qwen3_moe", tmp_path, bits=3.5, group_size=16, polish=0, rounds=0)
    assert len({layer.format for layer in experts(record)}) == 1 < len({layer.format for layer in record.layers})
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    named = [target for group in groups.values() for target in group["targets"] if "experts" in target]
    assert named == [
        rf"re:^model\.layers\.[0-9]+\.mlp\.experts\.[0-9]+\.{part}_proj$" for part in ("gate", "up", "down")
    ]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(logits(plain), dense(tmp_path), rtol=0, atol=1e-5)


def test_experts_with_grids_of_their_own_are_refused(tmp_path: Path) -> None:
    layers = {"down_proj": {"bits": 8}}
    with pytest.raises(RecipeError, match=r"down_proj has the number format int8-g16, .*gate_proj has int4-g16"):
        quantized("qwen3_moe", tmp_path, bits=4, group_size=16, layers=layers, **ROUNDED)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "llama4_text"])
def test_a_parameter_is_put_together_of_its_experts(kind: str, tmp_path: Path) -> None:
    """Of slices that are (in, out), with gate and up in turns, too."""
    save_type(tmp_path / "model", kind)
    block = open_model(str(tmp_path / "model")).blocks[0]
    with block.on(torch.device("cpu"), torch.float32, original=False):
        stacks: dict[str, list[Layer]] = {}
        for layer in block.quantized_layers():
            stacks.setdefault(layer.parameter, []).append(layer)
        assert sum(layers[0].routed for layers in stacks.values()) == 2
        for layers in stacks.values():
            assert torch.equal(parameter_of(layers, [layer.read() for layer in layers]), layers[0].weight)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param("qwen3_moe", dict(bits=2, group_size=16), id="qwen3_moe, 2 bits"),
        pytest.param("gpt_oss", dict(rate=2.0, allocate="uniform"), id="gpt_oss, rate 2", marks=pytest.mark.nightly),
    ],
)
def test_experts_are_tuned(kind: str, how: dict[str, Any], tmp_path: Path) -> None:
    """Steps and codes of some, and the predictions of the file are those that were trained."""
    windows = torch.randint(3, 96, (64, 32), generator=torch.Generator().manual_seed(2))
    save_type(tmp_path / "model", kind, num_hidden_layers=1)
    nearplane.quantize(tmp_path / "model", tmp_path / "solved", calibration=windows, device="cpu", **how)
    record = nearplane.tune(
        tmp_path / "solved", tmp_path / "out", against=tmp_path / "model", calibration=windows, device="cpu"
    )
    assert record.tuning is not None
    assert record.tuning.held_out < record.tuning.curve[0].held_out
    solved = {layer.name: layer.checksum for layer in read_record(tmp_path / "solved").layers}
    assert any(solved[layer.name] != layer.checksum for layer in experts(record))
    again = nearplane.verify(tmp_path / "out", against=tmp_path / "model", calibration=windows, device="cpu")
    assert (again.faults, again.measured) == ((), True)

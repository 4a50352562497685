"""Runs for one program: what it alone loads is written, read, verified and moved, and says so; what it does not load is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import nearplane
from checkpoints import save_part_of_the_demo
from families import LLAMA, MOE, config_of, random_model
from nearplane.demo import CALIBRATION
from nearplane.errors import RecipeError
from nearplane.formats.stored import Stored, read_matrices
from nearplane.models.model import open_model
from nearplane.planning.plan import usable_widths
from nearplane.planning.request import check_request, resolved
from nearplane.recipe.recipe import Recipe
from nearplane.record.record_file import read_record
from nearplane.record.summary import summary

FAST = {"calibration": str(CALIBRATION), "samples": 16, "seqlen": 64, "device": "cpu"}
TOKENS = torch.arange(3, 51)[None]
ROWS = torch.randint(3, 90, (16, 48), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a part of the demo's model."""
    return save_part_of_the_demo(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def asymmetric(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with zero points in compressed-tensors."""
    out = tmp_path_factory.mktemp("outs") / "asymmetric"
    nearplane.quantize(model, out, bits=3, group_size=32, symmetric=False, runtime="vllm", **FAST)
    return out


def test_zero_points_are_written_for_vllm_read_by_us_and_verified(asymmetric: Path, model: Path) -> None:
    """transformers stops with an error, as the summary and the card say."""
    config = json.loads((asymmetric / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["symmetric"] is False
    loaded = nearplane.load(asymmetric, dtype="float32")
    dense = nearplane.load(asymmetric, dtype="float32", packed=False)
    assert torch.allclose(loaded(TOKENS).logits, dense(TOKENS).logits, atol=1e-4)
    assert nearplane.verify(asymmetric, against=str(model)).faults == ()
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(asymmetric)
    lines = list(summary(read_record(asymmetric), asymmetric))
    assert any(line.startswith("made for vllm: transformers 5.24.0 does not load int3-g") for line in lines)
    assert f"vllm serve {asymmetric}" in lines[-1]
    assert "from_pretrained" not in lines[-1]
    card = (asymmetric / "README.md").read_text()
    assert "Made for vllm: transformers 5.24.0 does not load int3-g" in card


def test_the_codes_move_between_formats_that_hold_them(asymmetric: Path, tmp_path: Path) -> None:
    """To gptq_v2 and back, with a record that says for whom the files are."""
    nearplane.export(asymmetric, tmp_path / "gptq", format="gptq_v2")
    assert read_record(tmp_path / "gptq").recipe.runtime is None
    with pytest.raises(RecipeError, match="-asym from compressed-tensors"):
        nearplane.export(tmp_path / "gptq", tmp_path / "back", format="compressed-tensors")
    nearplane.export(tmp_path / "gptq", tmp_path / "back", format="compressed-tensors", runtime="nearplane")
    assert read_record(tmp_path / "back").recipe.runtime == "nearplane"
    first, again = (dict(read_matrices(folder)) for folder in (asymmetric, tmp_path / "back"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name].decode(), again[name].decode()) for name in first)


def test_tuning_keeps_the_runtime(asymmetric: Path, model: Path, tmp_path: Path) -> None:
    nearplane.tune(asymmetric, tmp_path / "tuned", against=str(model), samples=60, steps=40)
    assert read_record(tmp_path / "tuned").recipe.runtime == "vllm"
    assert nearplane.verify(tmp_path / "tuned", against=str(model)).faults == ()


def test_layers_that_a_server_fuses_are_alike_or_refused(model: Path, tmp_path: Path) -> None:
    """Without a runtime it is a warning."""
    with pytest.raises(RecipeError, match=r"have different grids or inputs\. vLLM and SGLang fuse these"):
        nearplane.quantize(model, tmp_path / "out", bits=4, runtime="vllm", layers={"q_proj": {"bits": 8}}, **FAST)
    assert not (tmp_path / "out").exists()


def test_widths_that_are_chosen_by_measuring_are_those_of_the_runtime(model: Path) -> None:
    """A fraction of bits needs only widths that the format has on both sides of it."""
    opened = open_model(str(model))
    for runtime, expected in ((None, [2, 3, 4, 8]), ("vllm", [4, 8])):
        recipe = Recipe.from_spellings(bits=4.5, group_size=32, format="gptq", runtime=runtime)
        plan = resolved(opened, recipe)
        check_request(opened, plan)
        assert usable_widths(opened, plan.recipe) == expected


def test_experts_have_zero_points_for_vllm_and_none_in_gptq_for_transformers(tmp_path: Path) -> None:
    config = config_of("mixtral", **LLAMA | MOE | dict(tie_word_embeddings=False))
    random_model(config).to(torch.bfloat16).save_pretrained(tmp_path / "experts")
    rounded = dict(bits=4, group_size=32, solver="round-to-nearest")
    nearplane.quantize(tmp_path / "experts", tmp_path / "out", symmetric=False, runtime="vllm", **rounded)
    network = nearplane.load(tmp_path / "out", dtype="float32", packed=False)
    assert torch.isfinite(network(TOKENS % 90).logits).all()
    with pytest.raises(RecipeError, match=r"does not load experts in int4-g.* from gptq"):
        nearplane.quantize(tmp_path / "experts", tmp_path / "no", format="gptq", runtime="transformers", **rounded)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small model with experts."""
    folder = tmp_path_factory.mktemp("models") / "experts"
    config = config_of("mixtral", **LLAMA | MOE | dict(tie_word_embeddings=False))
    random_model(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


MIXED = {
    "grid": "nvfp4",
    "activations": "fp4",
    "runtime": "vllm",
    "layers": {"self_attn": {"grid": "fp8", "activations": "fp8"}},
}


@pytest.fixture(scope="module")
def mixed(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with experts in NVFP4 and attention in FP8, both with rounded inputs."""
    out = tmp_path_factory.mktemp("outs") / "mixed"
    nearplane.quantize(mixture, out, calibration=ROWS, **MIXED)
    return out


def test_experts_in_nvfp4_beside_attention_in_fp8_are_written_for_vllm(mixed: Path) -> None:
    """Each kind of layer rounds its inputs in its own way, of which config, record, summary and card say the same."""
    groups = json.loads((mixed / "config.json").read_text())["quantization_config"]["config_groups"].values()
    by_format = {group["format"]: group for group in groups}
    assert by_format.keys() == {"nvfp4-pack-quantized", "float-quantized"}
    assert {name: group["input_activations"]["num_bits"] for name, group in by_format.items()} == {
        "nvfp4-pack-quantized": 4, "float-quantized": 8
    }  # fmt: skip
    assert all(name.startswith("model.layers.") for name in by_format["float-quantized"]["targets"])
    record = read_record(mixed)
    assert record.recipe.inputs_of("model.layers.0.self_attn.q_proj").name == "fp8"
    assert record.recipe.inputs_of("model.layers.0.mlp.experts.0.w1").name == "fp4"
    text = "\n".join(summary(record, mixed))
    assert "runtimes round the inputs of those in fp8 to fp8 and of those in nvfp4 to fp4" in text
    assert "made for vllm: transformers 5.24.0 does not load experts in nvfp4" in text
    assert (
        "of those in fp8 are rounded to fp8 and of those in nvfp4 are rounded to fp4"
        in (mixed / "README.md").read_text()
    )


def test_the_network_rounds_as_each_layer_says_and_verify_finds_what_was_changed(
    mixed: Path, mixture: Path, tmp_path: Path
) -> None:
    alone, computed = (nearplane.load(mixed, dtype="float32", activations=rounds) for rounds in (False, True))
    assert not torch.equal(alone(TOKENS % 90).logits, computed(TOKENS % 90).logits)
    assert nearplane.verify(mixed, against=str(mixture), calibration=ROWS).faults == ()
    shutil.copytree(mixed, tmp_path / "changed")
    path = tmp_path / "changed" / "config.json"
    config = json.loads(path.read_text())
    for group in config["quantization_config"]["config_groups"].values():
        if group["format"] == "float-quantized":
            group["input_activations"] = None
    path.write_text(json.dumps(config))
    faults = nearplane.verify(tmp_path / "changed").faults
    assert any(
        each.what == "its inputs are not rounded in config.json, and rounded to fp8 in the record" for each in faults
    )


def test_experts_whose_grids_differ_between_blocks_have_patterns_of_a_block(mixture: Path, tmp_path: Path) -> None:
    """vLLM takes a grid for every block, transformers one for all."""
    options = dict(bits=4, group_size=32, solver="round-to-nearest", layers={r"layers\.1\..*experts": {"bits": 8}})
    with pytest.raises(RecipeError, match="one grid for the experts of all blocks"):
        nearplane.quantize(mixture, tmp_path / "no", **options)
    nearplane.quantize(mixture, tmp_path / "out", runtime="vllm", **options)
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    eight = next(group for group in groups.values() if group["weights"]["num_bits"] == 8)
    assert r"re:^model\.layers\.1\.block_sparse_moe\.experts\.[0-9]+\.w2$" in eight["targets"]
    assert nearplane.verify(tmp_path / "out").faults == ()


def test_layers_with_the_same_input_round_it_alike(model: Path, tmp_path: Path) -> None:
    layers = {"q_proj": {"activations": "none"}}
    with pytest.raises(RecipeError, match=r"q_proj and .* have the same input, which programs would round for one"):
        nearplane.quantize(model, tmp_path / "out", grid="fp8", activations="fp8", layers=layers, **FAST)
    assert not (tmp_path / "out").exists()


def test_a_layer_that_is_left_out_in_one_block_alone_needs_no_rounding(model: Path, tmp_path: Path) -> None:
    options = dict(grid="fp8", activations="fp8", ignore=[r"layers\.1\.mlp\.down_proj"])
    record = nearplane.quantize(model, tmp_path / "out", **options, **FAST)
    assert len(record.layers) == 13


def test_experts_are_known_without_calibration(mixture: Path, tmp_path: Path) -> None:
    """vLLM is not named where it would refuse them, and the summary says for whom files are."""
    nearest = dict(solver="round-to-nearest", ignore=["self_attn"])
    nearplane.quantize(mixture, tmp_path / "fp8", grid="fp8", **nearest)
    assert not any("vllm serve" in line for line in summary(read_record(tmp_path / "fp8"), tmp_path / "fp8"))
    nearplane.quantize(mixture, tmp_path / "fp4", grid="nvfp4", runtime="vllm", **nearest)
    assert any(
        "made for vllm: transformers" in line for line in summary(read_record(tmp_path / "fp4"), tmp_path / "fp4")
    )


def test_rounded_inputs_of_some_layers_are_not_lost_in_an_export(model: Path, tmp_path: Path) -> None:
    """Refused as where all layers round them."""
    layers = {"mlp": {"activations": "int8"}}
    nearplane.quantize(model, tmp_path / "out", grid="int8", layers=layers, **FAST)
    with pytest.raises(RecipeError, match="gptq does not store int8-row with int8 inputs"):
        nearplane.export(tmp_path / "out", tmp_path / "moved", format="gptq")


@pytest.mark.parametrize(
    ("options", "rounded"),
    [
        (dict(bits=4, layers={"self_attn": {"grid": "fp8", "activations": "fp8"}}), {"self_attn"}),
        (dict(grid="fp8", activations="fp8", layers={"self_attn": {"activations": "none"}}), {"mlp"}),
        (
            dict(grid="fp8", activations="fp8", layers={"self_attn": {"activations": None}}),
            {"mlp"},
        ),  # as commands say it
        (dict(grid="nvfp4", layers={".": {"grid": "fp8", "activations": "fp8"}}), {"self_attn", "mlp"}),  # all layers
    ],
)
def test_each_layer_is_stored_as_its_pattern_says_and_verified(
    options: dict[str, Any], rounded: set[str], model: Path, tmp_path: Path
) -> None:
    nearplane.quantize(model, tmp_path / "out", **options, **FAST)
    stored = Stored(tmp_path / "out")
    found = {name.split(".")[3] for name in stored.names() if stored.inputs(name) is not None}
    assert found == rounded
    assert nearplane.verify(tmp_path / "out", against=str(model)).faults == ()

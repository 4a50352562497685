"""What would not load is refused before a run begins, by transformers' own loader or by rule, with what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nearplane
from checkpoints import random_matrix
from model_types import save_type
from nearplane.errors import RecipeError
from nearplane.formats.layer_format import EXPERTS_WITH, WEIGHTS, GridFormat, config_text
from nearplane.formats.table import FORMATS
from nearplane.models.model import Model, open_model
from nearplane.number_formats import integers
from nearplane.planning.rehearsal import check_loads, faults
from nearplane.planning.request import quantization_config, resolved
from nearplane.recipe.recipe import Recipe

WINDOWS = torch.randint(3, 96, (8, 32), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a type to the folder of a tiny model."""
    made: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_type(tmp_path_factory.mktemp(kind) / "model", kind, torch.bfloat16)
        return made[kind]

    return folder_of


def rounded(source: Path, out: Path, **how: Any) -> nearplane.record.record.RunRecord:
    return nearplane.quantize(source, out, solver="round-to-nearest", group_size=16, device="cpu", **how)


def blamed(model: Model, format: str) -> set[str]:
    """Return the places that would not load."""
    plan = resolved(model, Recipe.from_spellings(bits=4, group_size=16, format=format))
    found = faults(model, plan, partial(quantization_config, model, plan), model.layers)
    return {fault.place for fault in found}


@pytest.mark.parametrize("format", ["compressed-tensors", "gptq", "gptq_v2"])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 16), (3, None)])
def test_tensors_without_contents_are_those_that_are_written(format: str, bits: int, group_size: int | None) -> None:
    layout = FORMATS[format].layers
    assert isinstance(layout, GridFormat)
    matrix = random_matrix(32, 64, bits=bits, group_size=group_size, symmetric=True)
    real: dict[str, Tensor] = layout.pack("a", matrix, torch.float16)
    empty: dict[str, Tensor] = layout.empty("a", (32, 64), integers(bits, group_size), torch.float16)
    assert [(n, t.shape, t.dtype) for n, t in empty.items()] == [(n, t.shape, t.dtype) for n, t in real.items()]


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("llama", set()),
        ("deepseek_v3", set()),
        ("gpt_bigcode", {f"transformer.h.{i}.{part}.c_proj" for i in range(2) for part in ("attn", "mlp")}),
        ("mamba2", {f"backbone.layers.{i}.mixer.out_proj" for i in range(2)}),
        ("llama4_text", {f"model.layers.{i}.feed_forward.experts.{e}.{part}_proj" for i in range(2) for e in range(4)
                         for part in ("gate", "up", "down")}),
    ],
)  # fmt: skip
def test_what_compressed_tensors_does_not_load_is_blamed(
    source: Callable[[str], Path], kind: str, places: set[str]
) -> None:
    """Experts of llama4 become layers in the reader, and where they stay as they are the file holds them in one tensor."""
    model = open_model(str(source(kind)), ignore=["experts"] if kind == "llama4_text" else [])
    assert blamed(model, "compressed-tensors") - {p.rpartition(".")[0] for p in places} == places


@pytest.mark.parametrize("way", ["targets", "ignore", "experts"])
def test_a_config_that_says_something_else_is_found_out(source: Callable[[str], Path], way: str) -> None:
    """What is not named, what is named too much, dense experts without their group."""
    ignore = ["experts"] if way == "experts" else []
    model = open_model(str(source("qwen3_moe")), ignore=ignore)
    plan = resolved(model, Recipe.from_spellings(bits=4, group_size=16, ignore=ignore))

    def configure(layers: Any) -> dict[str, Any]:
        config = json.loads(json.dumps(quantization_config(model, plan, layers)))
        if way == "targets":
            config["config_groups"]["group_0"]["targets"] = [r"re:.*self_attn\.[qkv]_proj$"]
        elif way == "ignore":
            config["ignore"].remove("lm_head")
        else:
            del config["config_groups"]["group_1"]
        return config

    places = {fault.place for fault in faults(model, plan, configure, model.layers)}
    expected = {
        "targets": "model.layers.0.self_attn.o_proj",
        "ignore": "lm_head",
        "experts": "model.layers.0.mlp.experts",
    }
    assert expected[way] in places


def test_a_refusal_names_a_layer_and_what_to_do(source: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as refused:
        rounded(source("gpt_bigcode"), tmp_path / "out", bits=4)
    said = str(refused.value)
    assert said.startswith(
        "transformer.h.0.attn.c_proj: transformers would not load this gpt_bigcode from compressed-tensors"
    )
    assert said.endswith("if vLLM has this type of model: they read the files by themselves.")
    assert not any(tmp_path.iterdir())
    patterns = re.findall("'([^']*)'", said)
    assert patterns == [r"attn\.c_proj$", r"mlp\.c_proj$"]
    assert len(rounded(source("gpt_bigcode"), tmp_path / "less", bits=4, ignore=patterns).layers) == 4
    assert len(rounded(source("gpt_bigcode"), tmp_path / "gptq", bits=4, format="gptq").layers) == 8


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("qwen3_moe", None),
        ("qwen2_moe", None),
        ("qwen3_next", r"linear_attn\.in_proj_ba would not load: .* --ignore 'linear_attn\\\.in_proj_ba\$'\.$"),
        (
            "mixtral",
            r"GPTQModel reads the experts of mixtral from GPTQ\. Use --runtime vllm or nearplane, .* --ignore 'experts'",
        ),
    ],
)
def test_experts_in_gptq_are_for_the_types_that_gptqmodel_reads(
    source: Callable[[str], Path], kind: str, says: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Where transformers has no modules for them; it stops at what config.json says, before it reads anything."""
    model = open_model(str(source(kind)))
    plan = resolved(model, Recipe.from_spellings(bits=4, group_size=16, format="gptq"))

    def check() -> None:
        check_loads(model, plan, partial(quantization_config, model, plan))

    if says is not None:
        with pytest.raises(RecipeError, match=says):
            check()
        return
    check()
    assert "GPTQModel reads them" in caplog.text
    assert json.loads(config_text(model.folder, quantization_config(model, plan), {}))[WEIGHTS] == EXPERTS_WITH
    plain = quantization_config(model, plan, [layer for layer in model.layers if not layer.routed])
    assert WEIGHTS not in json.loads(config_text(model.folder, plain, {}))


def test_where_no_layer_is_to_blame_none_is_to_be_left_out(source: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"needs .*experts.*\. Use another --format, --rate 4, or --runtime nearplane, or"
    ):
        rounded(source("llama4_text"), tmp_path / "out", bits=4, ignore=["experts"])
    with pytest.raises(RecipeError, match=r"packed\. .* --rate 4, or --runtime nearplane, or --runtime vllm if"):
        rounded(source("rwkv"), tmp_path / "out", bits=4)


def test_a_weight_that_is_put_together_has_no_name_to_be_written_under(
    source: Callable[[str], Path], tmp_path: Path
) -> None:
    """All of them are named at once; what is left then loads from GPTQ, and transformers refuses compressed-tensors."""
    with pytest.raises(
        RecipeError, match=r"q_proj cannot be written: .*--ignore 'self_attn\\.q_proj\$' 'self_attn"
    ) as refused:
        rounded(source("hrm_text"), tmp_path / "out", bits=4, format="gptq")
    patterns = re.findall("'([^']*)'", str(refused.value))
    with pytest.raises(RecipeError, match=r"source keys=.*, --rate 4, or --runtime nearplane"):
        rounded(source("hrm_text"), tmp_path / "out", bits=4, ignore=patterns)
    assert not any(tmp_path.iterdir())
    assert len(rounded(source("hrm_text"), tmp_path / "out", bits=4, format="gptq", ignore=patterns).layers) == 4


def test_nothing_is_said_by_the_loaders(source: Callable[[str], Path], capfd: pytest.CaptureFixture[str]) -> None:
    model = open_model(str(source("llama4_text")), ignore=["experts"])
    capfd.readouterr()
    assert blamed(model, "compressed-tensors")
    assert capfd.readouterr() == ("", "")


def test_optimum_is_told_where_blocks_are_that_it_does_not_find(source: Callable[[str], Path], tmp_path: Path) -> None:
    recipe = Recipe.from_spellings(bits=4, group_size=16, format="gptq")
    mamba, llama = (open_model(str(source(family))) for family in ("mamba2", "llama"))
    assert quantization_config(mamba, resolved(mamba, recipe))["block_name_to_quantize"] == "backbone.layers"
    assert "block_name_to_quantize" not in quantization_config(llama, resolved(llama, recipe))

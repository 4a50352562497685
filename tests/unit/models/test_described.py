"""A model opened by its config.json alone: the same tensors and layers as with its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from families import config_of, random_model
from model_types import save_type
from nearplane.errors import ModelError
from nearplane.models import config_checks
from nearplane.models.described import open_described
from nearplane.models.model import open_model

TYPES = ["llama", "gpt2", "deepseek_v3", "qwen3_next", "falcon"]


def by_its_config(folder: Path, place: Path) -> Any:
    """Return the model of a folder, opened where there is nothing but its config.json."""
    place.mkdir()
    shutil.copyfile(folder / "config.json", place / "config.json")
    return open_described(str(place))


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2", "qwen3_moe", "mixtral"])
def test_layers_and_tensors_are_those_of_the_files(family: str, tmp_path: Path) -> None:
    random_model(config_of(family)).bfloat16().save_pretrained(tmp_path / "whole")
    whole, described = open_model(str(tmp_path / "whole")), by_its_config(tmp_path / "whole", tmp_path / "config")
    infos = [{name: info[:3] for name, info in model.reader.infos.items()} for model in (whole, described)]
    assert infos[0] == infos[1]
    assert [(layer.name, layer.shape, layer.kind) for layer in whole.layers] == [
        (layer.name, layer.shape, layer.kind) for layer in described.layers
    ]
    assert described.dtype == torch.bfloat16
    assert whole.tied == described.tied == (family in ("qwen3", "gemma2", "gpt2"))
    assert [layer.written(described.weights) for layer in described.layers] == [
        layer.written(whole.weights) for layer in whole.layers
    ]


@pytest.mark.parametrize("kind", TYPES)
def test_other_types_have_the_tensors_that_transformers_saves(kind: str, tmp_path: Path) -> None:
    save_type(tmp_path / "whole", kind)
    whole, described = open_model(str(tmp_path / "whole")), by_its_config(tmp_path / "whole", tmp_path / "config")
    assert {name: info[:3] for name, info in whole.reader.infos.items()} == {
        name: info[:3] for name, info in described.reader.infos.items()
    }


def test_a_local_folder_is_described_by_its_weights(tmp_path: Path) -> None:
    """`suggest` counted 32 bits for weights that are stored in 16, as config.json said."""
    random_model(config_of("llama")).bfloat16().save_pretrained(tmp_path / "whole")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    assert open_described(str(tmp_path / "whole")).dtype == torch.bfloat16
    assert by_its_config(tmp_path / "whole", tmp_path / "config").dtype == torch.float32


def test_its_weights_cannot_be_read(tmp_path: Path) -> None:
    config_of("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"by its config.json alone, so that lm_head.weight cannot be read"):
        open_described(str(tmp_path)).reader.read(["lm_head.weight"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers is 1,000,000,000, but at most 100,000 are expected"),
        ({"num_hidden_layers": 90_000}, r"config.json describes too many layers. Fetch config.json again"),
        ({"quantization_config": {"quant_method": "awq"}}, r"is already quantized with awq"),
        ({"model_type": "nothing_like_it"}, r"transformers cannot build a language model from .*config.json"),
    ],
)
def test_a_config_that_cannot_be_is_refused(
    change: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_checks, "CALLS", (5_000, 20))  # a tenth: the real ones take seconds
    config_of("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=said):
        open_described(str(tmp_path))

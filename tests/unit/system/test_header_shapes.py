"""Matrices of a model from the headers of its files: all of them, or none where the names are not those of usual families."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from families import config_of, random_model
from nearplane.models.model import open_model
from nearplane.system.header_shapes import matrices_in


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_matrices_are_those_of_the_network(tmp_path: Path, family: str) -> None:
    random_model(config_of(family)).save_pretrained(tmp_path)
    expected = {f"{layer.name}.weight": layer.shape for layer in open_model(str(tmp_path)).layers}
    assert matrices_in(tmp_path) == expected
    save_file({"model.layers.0.mlp.down_proj.weight": torch.zeros(3, 5)}, tmp_path / "another.safetensors")
    assert matrices_in(tmp_path) == expected  # a file that is not read


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "qwen3_moe", "bert"])
def test_other_families_have_none(tmp_path: Path, family: str) -> None:
    random_model(config_of(family)).save_pretrained(tmp_path)
    assert matrices_in(tmp_path) == {}


def test_quantized_models_and_what_cannot_be_read_have_none(tmp_path: Path) -> None:
    assert matrices_in(tmp_path) == {}
    random_model(config_of("llama")).save_pretrained(tmp_path)
    assert matrices_in(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("quantization_config", "quantization"):
        (tmp_path / "config.json").write_text(json.dumps(config | {name: {"bits": 4}}))
        assert matrices_in(tmp_path) == {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    index = tmp_path / "model.safetensors.index.json"
    for content in ({}, {"weight_map": 1}, {"weight_map": {"a": "missing.safetensors"}}, {"weight_map": {"a": "pipe"}}):
        index.write_text(json.dumps(content))
        assert matrices_in(tmp_path) == {}
        if not (tmp_path / "pipe").exists():
            os.mkfifo(tmp_path / "pipe")
    index.unlink()
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    assert matrices_in(tmp_path) == {}
    save_file({"model.layers.0.mlp.down_proj.weight": torch.zeros(())}, tmp_path / "model.safetensors")
    assert matrices_in(tmp_path) == {}

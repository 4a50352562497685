"""The control of the published models: noise of one step's width, on the weights of blocks alone."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

TOOL = Path(__file__).parents[2] / "tools" / "published_models.py"


def test_noise_moves_each_weight_of_a_block_by_at_most_half_the_step_of_its_group(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    spec = importlib.util.spec_from_file_location("published_models", TOOL)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "published_models", module)  # dataclasses look there
    spec.loader.exec_module(module)
    codes = torch.arange(64).reshape(1, 64).repeat(8, 1) % 16  # every group has all of its 16 values
    steps = torch.arange(1, 9)[:, None] / 8
    weights = {"model.layers.0.mlp.up_proj.weight": codes * steps - 1, "model.embed_tokens.weight": torch.ones(4, 32)}
    (tmp_path / "source").mkdir()
    save_file(weights, tmp_path / "source" / "model.safetensors")
    module.add_noise(tmp_path / "source", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    moved = (found["model.layers.0.mlp.up_proj.weight"] - weights["model.layers.0.mlp.up_proj.weight"]) / steps
    assert 0.45 < float(moved.abs().max()) <= 0.5 + 1e-6
    assert float(moved.std()) == pytest.approx(12**-0.5, rel=0.1)
    assert torch.equal(found["model.embed_tokens.weight"], weights["model.embed_tokens.weight"])

"""Layers whose inputs are rounded: found in the network of a checkpoint, also where transformers gives them other names."""

from __future__ import annotations

from pathlib import Path

import torch

import nearplane
from model_types import save_type
from nearplane.loading.rounded_layers import rounded_layers


def test_layers_are_found_where_files_have_other_names_than_the_network(tmp_path: Path) -> None:
    """Files of Mixtral say block_sparse_moe where the network says mlp."""
    save_type(tmp_path / "model", "mixtral", torch.bfloat16)
    options = {"grid": "fp8", "activations": "fp8", "solver": "round-to-nearest"}
    record = nearplane.quantize(tmp_path / "model", tmp_path / "out", **options)
    assert any("block_sparse_moe" in str(layer.stored) for layer in record.layers)
    layers = rounded_layers(nearplane.load(tmp_path / "out"), tmp_path / "out")
    assert {layer.name for layer in layers} == {layer.name for layer in record.layers}

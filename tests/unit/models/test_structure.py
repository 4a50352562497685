"""Where the blocks of a model lie, and which of its matrices are handled."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from families import FAMILIES, config_of
from nearplane.errors import ModelError
from nearplane.models.structure import find_blocks, find_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_every_family_are_found(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(family))
    names = {"gpt2": "transformer.h", "opt": "model.decoder.layers", "gpt_neox": "gpt_neox.layers"}
    name, blocks = find_blocks(model)
    assert name == names.get(family, "model.layers")
    assert len(blocks) == 3


def test_without_marked_blocks_the_heaviest_list_whose_members_all_hold_a_layer_is_taken() -> None:
    model = nn.Module()
    model.small = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    model.large = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(2))
    model.larger = nn.ModuleList([nn.Linear(99, 99), nn.Embedding(99, 99)])
    assert find_blocks(model)[0] == "large"


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear has no list of modules"):
        find_blocks(nn.Linear(2, 2))


def test_matrices_that_are_not_handled_are_named_with_their_type() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("mixtral"))
    layers, skipped = find_layers(model.model.layers[0], "model.layers.0")
    assert [layer.name.split(".")[-1] for layer in layers] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert {name.split(".")[-1]: reason.split()[0] for name, reason in skipped} == {
        "gate": "MixtralTopKRouter",
        "experts": "MixtralExperts",
    }

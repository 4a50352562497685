"""Stages of a block: which layers read one input, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bare_blocks import both
from families import config_of, random_model
from nearplane.calibration.activations import Stream, skeleton
from nearplane.calibration.rows import Additions, Results
from nearplane.calibration.stages import first_look, stages
from nearplane.errors import CalibrationError
from nearplane.models.model import Model, open_model

Saved = Callable[[str], Path]


STAGES = {
    "llama": ["q_proj k_proj v_proj", "o_proj+", "gate_proj up_proj", "down_proj+"],
    "mistral": ["q_proj k_proj v_proj", "o_proj+", "gate_proj up_proj", "down_proj+"],
    "qwen3": ["q_proj k_proj v_proj", "o_proj+", "gate_proj up_proj", "down_proj+"],
    "gemma2": ["q_proj k_proj v_proj", "o_proj", "gate_proj up_proj", "down_proj"],  # a norm before the addition
    "gpt2": ["c_attn", "c_proj+", "c_fc", "c_proj+"],
    "opt": ["q_proj k_proj v_proj", "out_proj+", "fc1", "fc2+"],
    "gpt_neox": ["query_key_value", "dense+", "dense_h_to_4h", "dense_4h_to_h+"],
    "mixtral": ["q_proj k_proj v_proj", "o_proj+", "w1 w3 w1 w3 w1 w3 w1 w3", "w2 w2 w2 w2"],
}


def at(model: Model, tokens: Tensor, dtype: torch.dtype = torch.float64) -> Stream:
    return both(skeleton(model, tokens.split(2), device="cpu", dtype=dtype))


@pytest.mark.parametrize("family", STAGES)
def test_layers_are_grouped_by_shared_input_in_the_order_they_run(family: str, saved: Saved, tokens: Tensor) -> None:
    """A plus marks layers whose output is added to a residual stream as it is."""
    model = open_model(str(saved(family)))
    stream = at(model, tokens, torch.float32)
    with model.blocks[0].on("cpu", torch.float32) as block:
        groups = stages(block, stream)
    found = [" ".join(layer.name.split(".")[-1] + "+" * layer.adds for layer in group) for group in groups]
    assert found == STAGES[family]


def test_layers_that_never_run_are_named(tokens: Tensor, tmp_path: Path) -> None:
    """Mamba multiplies by the weight of dt_proj without calling it."""
    config = config_of("mamba", hidden_size=16, num_hidden_layers=1, vocab_size=96, state_size=4)
    random_model(config).save_pretrained(tmp_path)
    model = open_model(str(tmp_path))
    stream = at(model, tokens)
    with (
        model.blocks[0].on("cpu", torch.float64) as block,
        pytest.raises(CalibrationError, match=r"No token reached backbone\.layers\.0\.mixer\.dt_proj"),
    ):
        stages(block, stream)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "opt"])
def test_a_pass_that_waits_needs_its_input_and_the_residual_stream(family: str, saved: Saved, tokens: Tensor) -> None:
    """Not q, k and v, which attention has used, and not the block's input once attention was added to it."""
    model = open_model(str(saved(family)))
    stream = at(model, tokens)
    with model.blocks[0].on("cpu", torch.float64) as block:
        look = first_look(block, stream)
    rows = stream.quantized[0].numel() // stream.quantized[0].shape[-1]
    for first, *_ in look.groups:
        entered = look.entered[first.name][0]
        assert entered.needed == rows * 8 * (first.shape[1] + stream.quantized[0].shape[-1]), first.name
    waiting = look.entered[look.groups[1][0].name][0]
    assert waiting.alive > waiting.needed
    assert waiting.idle


def test_what_is_dropped_is_nan_and_takes_no_memory(tokens: Tensor) -> None:
    hidden = tokens.double()
    results = Results(hidden)
    with Additions(results=results):
        product = hidden * 2
        view = product.view(-1)
    assert results.own() == {0, 1}
    results.drop([0, 1])
    assert product.isnan().all()
    assert view.isnan().all()
    assert product.untyped_storage().nbytes() == hidden.element_size()

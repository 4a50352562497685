"""What a network expects of a checkpoint: which weights are transposed, and the shapes of all."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from families import config_of
from nearplane.loading.dense_network import stored_transposed, weight_shapes


def test_transposed_weights_are_named_with_and_without_the_base_prefix() -> None:
    with torch.device("meta"):
        gpt2 = AutoModelForCausalLM.from_config(config_of("gpt2"))
        llama = AutoModelForCausalLM.from_config(config_of("llama"))
    assert {"transformer.h.0.attn.c_attn.weight", "h.2.mlp.c_proj.weight"} <= stored_transposed(gpt2)
    assert len(stored_transposed(gpt2)) == 2 * 3 * 4
    assert stored_transposed(llama) == set()


def test_shapes_are_those_of_matrices_however_they_are_stored() -> None:
    with torch.device("meta"):
        shapes = weight_shapes(AutoModelForCausalLM.from_config(config_of("gpt2")))
    assert shapes["transformer.h.0.attn.c_attn.weight"] == shapes["h.0.attn.c_attn.weight"] == (96, 32)
    assert shapes["lm_head.weight"] == shapes["wte.weight"] == (96, 32)  # tied, and known by both names
    assert shapes["transformer.ln_f.weight"] == (32,)

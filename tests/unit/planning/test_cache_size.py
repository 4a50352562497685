"""The cache of keys and values by shapes is that which transformers fills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from model_types import tiny_config
from nearplane.models.described import open_described
from nearplane.planning.cache_size import cache_bytes

TOKENS, WINDOW = 24, 6
SLIDING = ["sliding_attention", "full_attention"]
LINEAR = 4 * 4 * 16 * 16 + 2 * 4 * (
    2 * 4 * 16 + 4 * 16
)  # of 4 heads: state of 16 x 16 in 32 bits, convolution over 4 tokens


def described(kind: str, folder: Path, **changes: Any) -> tuple[Any, Any]:
    """Return a model by its config alone, and the network with random weights."""
    config = tiny_config(kind, **changes)
    network = AutoModelForCausalLM.from_config(config).eval()
    config.architectures = [type(network).__name__]
    config.save_pretrained(folder)
    return open_described(str(folder)), network


@torch.no_grad()
def filled(network: Any) -> list[int]:
    """Return the number of keys and values that every block has after some tokens."""
    out = network(input_ids=torch.randint(3, 90, (1, TOKENS)), use_cache=True)
    kept = [(vars(layer).get("keys"), vars(layer).get("values")) for layer in out.past_key_values.layers]
    return [sum(each.numel() for each in pair if each is not None) for pair in kept]


@pytest.mark.parametrize(
    "kind",
    ["llama", "gpt2", "gpt_bigcode", "falcon", "deepseek_v3", "longcat_flash"]
    + [
        pytest.param(kind, marks=pytest.mark.nightly)
        for kind in ("bloom", "phi3", "gptj", "opt", "mpt", "gpt_neox", "dbrx")
    ],
)
def test_keys_and_values_of_all_tokens_are_counted(kind: str, tmp_path: Path) -> None:
    """Of grouped queries, of one head for all queries, and of latent attention, where a token has one vector for all heads."""
    model, network = described(kind, tmp_path)
    assert cache_bytes(model, TOKENS) == 2 * sum(filled(network)) == 2 * cache_bytes(model, TOKENS, 1)
    assert cache_bytes(model, 2 * TOKENS) == 4 * sum(filled(network))


@pytest.mark.parametrize(
    ("kind", "changes", "windows"),
    [("mistral", {}, 2), ("gemma2", {"layer_types": SLIDING}, 1), ("gemma2", {"layer_types": SLIDING[::-1]}, 1)],
)
def test_a_sliding_window_keeps_its_own_tokens(
    kind: str, changes: dict[str, Any], windows: int, tmp_path: Path
) -> None:
    """transformers keeps one less: the token that is about to come."""
    model, network = described(kind, tmp_path, sliding_window=WINDOW, **changes)
    numbers = filled(network)
    one = max(numbers) // TOKENS if windows == 1 else numbers[0] // (WINDOW - 1)
    assert cache_bytes(model, TOKENS) == 2 * (sum(numbers) + windows * one)
    assert cache_bytes(model, 10 * TOKENS) == 2 * (sum(numbers) + windows * one + (2 - windows) * 9 * TOKENS * one)


def test_a_state_is_of_constant_size(tmp_path: Path) -> None:
    model, network = described("qwen3_next", tmp_path)
    keys = 2 * sum(filled(network))  # of the other block
    assert cache_bytes(model, TOKENS) == LINEAR + keys
    assert cache_bytes(model, 2 * TOKENS) == LINEAR + 2 * keys


def test_layers_that_use_the_keys_of_others_keep_none(tmp_path: Path) -> None:
    model, network = described("llama", tmp_path)
    model.config.num_kv_shared_layers = 1
    assert cache_bytes(model, TOKENS) == 2 * filled(network)[0]


@pytest.mark.parametrize("kind", ["bamba", "falcon_h1", "hrm_text", "deepseek_v32", "lfm3"])
def test_what_cannot_be_told_is_not_known(kind: str, tmp_path: Path) -> None:
    """States of other kinds, beside attention or instead of it; blocks that run several times; an index of keys."""
    assert cache_bytes(described(kind, tmp_path)[0], TOKENS) is None

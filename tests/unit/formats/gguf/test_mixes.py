"""Mixes of llama.cpp's types, as its own quantizer assigned them."""

from __future__ import annotations

from collections import Counter

import pytest

from nearplane.formats.gguf.mixes import MIXES, role_of, type_of
from nearplane.number_formats import TYPES

WIDE = 256
LAYERS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)


def network(count: int, shared: int = 1) -> dict[str, int]:
    """Return what a config.json says of so many blocks, with queries that share a key and value head."""
    return {"num_hidden_layers": count, "num_attention_heads": shared, "num_key_value_heads": 1}


def types(mix: str, count: int, columns: int = WIDE, shared: int = 1) -> Counter[str]:
    """How many layers of a Llama have which type."""
    names = [(index, f"model.layers.{index}.{name}") for index in range(count) for name in (*LAYERS, "mlp.down_proj")]
    return Counter(type_of(mix, role_of(name), index, columns, network(count, shared)).name for index, name in names)


@pytest.mark.parametrize(
    ("mix", "expected"),
    [
        ("q2_k_m", {"q2_k": 20, "q3_k": 15}),
        ("q3_k_m", {"q3_k": 20, "q4_k": 13, "q5_k": 2}),
        ("q4_k_m", {"q4_k": 31, "q6_k": 4}),
        ("q5_k_m", {"q5_k": 31, "q6_k": 4}),
    ],
)
def test_five_blocks_get_what_llama_cpp_gave_them(mix: str, expected: dict[str, int]) -> None:
    assert types(mix, 5, shared=2) == expected


def test_of_32_blocks_half_have_more_bits_in_v_and_down() -> None:
    """The first and last four, and every third between."""
    assert types("q4_k_m", 32) == {"q4_k": 32 * 7 - 2 * 16, "q6_k": 2 * 16}
    more = [index for index in range(32) if type_of("q4_k_m", "ffn_down", index, WIDE, network(32)).name == "q6_k"]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]


def test_keys_and_values_that_many_queries_share_get_more() -> None:
    assert type_of("q2_k_m", "attn_v", 0, WIDE, network(32, 4)).name == "q4_k"
    assert type_of("q4_k_m", "attn_v", 11, WIDE, network(80, 8)).name == "q5_k"  # of Llama 70B
    assert type_of("q3_k_m", "attn_v", 11, WIDE, network(80, 8)).name == "q5_k"


def test_rows_that_256_does_not_divide_get_blocks_of_32() -> None:
    assert types("q4_k_m", 5, 32) == {"q5_0": 31, "q8_0": 4}
    fallbacks = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0", "iq4_xs": "iq4_nl"}
    assert {name: type_of(name, "other", 0, 96, network(5)).name for name in fallbacks} == fallbacks
    assert type_of("q4_0", "other", 0, 96, network(5)).name == "q4_0"


@pytest.mark.parametrize("mix", MIXES)
def test_the_head_has_six_bits_and_embeddings_the_type_of_most(mix: str) -> None:
    assert type_of(mix, "head", 0, WIDE, network(5)).name == type_of(mix, "tied", 0, WIDE, network(5)).name == "q6_k"
    assert type_of(mix, "head", 0, 96, network(5)).name == "q8_0"
    assert type_of(mix, "embeddings", 0, WIDE, network(5)).name == mix.removesuffix("_m")
    assert type_of("q4_0", "tied", 0, WIDE, network(5)).name == "q6_k"
    assert type_of("q8_0", "tied", 0, WIDE, network(5)).name == "q8_0"


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.layers.0.self_attn.v_proj", "attn_v"),
        ("model.layers.0.self_attn.qkv_proj", "attn_v"),
        ("transformer.h.0.attn.c_attn", "attn_v"),
        ("transformer.h.0.attn.c_proj", "attn_output"),
        ("transformer.h.0.mlp.c_proj", "ffn_down"),
        ("model.layers.0.mlp.down_proj", "ffn_down"),
        ("model.layers.0.mlp.gate_up_proj", "other"),
    ],
)
def test_layers_are_told_apart_by_their_names(name: str, role: str) -> None:
    assert role_of(name) == role


def test_rates_count_steps_and_all() -> None:
    assert {name: kind.rate for name, kind in TYPES.items()} == {
        "q4_0": 4.5, "q4_1": 5.0, "iq4_nl": 4.5, "iq4_xs": 4.25, "mxfp4": 4.25, "q5_0": 5.5, "q5_1": 6.0, "q8_0": 8.5,
        "q2_k": 2.625, "q3_k": 3.4375, "q4_k": 4.5, "q5_k": 5.5, "q6_k": 6.5625,
    }  # fmt: skip

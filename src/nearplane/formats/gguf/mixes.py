"""Mixes of llama.cpp: the block type of every tensor, as data and rules. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nearplane.number_formats import TYPES, BlockType

MIXES = ("q2_k_m", "q3_k_m", "q4_k_m", "q5_k_m")  # llama.cpp's names are Q2_K, Q3_K_M, Q4_K_M, Q5_K_M
ROLES = {  # roles of layers in mixes by the last part of their name; see `role_of`
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "qkv_proj": "attn_v",  # llama.cpp treats it like attn_v
    "c_attn": "attn_v",
    "o_proj": "attn_output",
    "attn.c_proj": "attn_output",
    "down_proj": "ffn_down",
    "w2": "ffn_down",  # in Mixtral's experts
    "mlp.c_proj": "ffn_down",
}


def experts_of(config: Mapping[str, Any]) -> int:
    """Return the number of experts per block in a config.json."""
    return config.get("num_experts") or config.get("num_local_experts") or 0


def blocks_of(config: Mapping[str, Any]) -> int:
    """Return the number of blocks in a config.json."""
    return config.get("num_hidden_layers") or config.get("n_layer") or 1


def role_of(name: str) -> str:
    """Return the role of a layer in mixes: attn_k, attn_v, attn_output, ffn_down or other.

    Args:
        name: Name of the layer in transformers.
    """
    return next((role for end, role in ROLES.items() if f".{name}".endswith(f".{end}")), "other")


def fitting(name: str, columns: int) -> BlockType:
    """Return a block type, or its fallback if rows of so many columns are no whole number of blocks."""
    kind = TYPES[name]
    return kind if columns % kind.columns == 0 or kind.fallback is None else TYPES[kind.fallback]


def type_of(mix: str, role: str, index: int, columns: int, config: Mapping[str, Any]) -> BlockType:
    """Return the block type that llama.cpp gives a tensor.

    Args:
        mix: A block type for all layers, or one of `MIXES`.
        role: Role of the layer, see `role_of`; "head", "tied" (a head tied to the input embeddings) or "embeddings".
        index: Number of the layer's block in the network.
        columns: Number of inputs, or width of the embeddings; see `fitting`.
        config: config.json of the network, as transformers completes it.

    `llama_tensor_get_type` of llama.cpp, as llama-cpp-python 0.3.36 has it.
    """
    if role in ("head", "tied"):
        return fitting("q8_0" if mix == "q8_0" else "q6_k", columns)
    return fitting(mix if mix in TYPES else _mixed(mix, role, index, config), columns)


def _mixed(mix: str, role: str, index: int, config: Mapping[str, Any]) -> str:
    """Return the name of the block type in a mix, without the fallback for widths.

    In blocks with 8 experts attention is small compared to them, and gets more bits.
    """
    heads, count, experts = config.get("num_attention_heads") or 1, blocks_of(config), experts_of(config)
    shared = heads // (config.get("num_key_value_heads") or heads)  # query heads per key and value head
    usual = mix.removesuffix("_m")
    if experts == 8 and role in ("attn_k", "attn_v", "attn_output"):
        return "q5_k" if role == "attn_output" else "q8_0"
    more = index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2
    upper = "q6_k" if more else usual  # in mixes of q4_k and q5_k
    match role:
        case "attn_v":
            low = {"q2_k": "q4_k" if shared >= 4 else "q3_k", "q3_k": "q5_k" if index < 2 else "q4_k"}
            chosen = low.get(usual, upper)
            large = count == 80 and shared > 1  # Llama 70B
            return "q5_k" if large and chosen in ("q3_k", "q4_k") else chosen
        case "ffn_down":
            return {"q2_k": "q3_k", "q3_k": "q5_k" if index < count // 16 else "q4_k"}.get(usual, upper)
        case "attn_output":
            return {"q2_k": "q3_k", "q3_k": "q4_k"}.get(usual, usual)
        case _:
            return usual

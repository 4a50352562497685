"""Which type of blocks llama.cpp gives every tensor: its mixes, as data and rules. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nearplane.lattice.number_formats import TYPES, BlockType

MIXES = ("q2_k_m", "q3_k_m", "q4_k_m", "q5_k_m")  # in llama.cpp Q2_K, Q3_K_M, Q4_K_M, Q5_K_M
ROLES = {  # of layers in a block by the last part of their name, as far as mixes tell them apart; see `role_of`
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "qkv_proj": "attn_v",  # llama.cpp takes one for the other
    "c_attn": "attn_v",
    "o_proj": "attn_output",
    "attn.c_proj": "attn_output",
    "down_proj": "ffn_down",
    "w2": "ffn_down",  # of Mixtral's experts
    "mlp.c_proj": "ffn_down",
}


def experts_of(config: Mapping[str, Any]) -> int:
    """Return how many experts a config.json gives every block."""
    return config.get("num_experts") or config.get("num_local_experts") or 0


def blocks_of(config: Mapping[str, Any]) -> int:
    """Return how many blocks a network has by its config.json."""
    return config.get("num_hidden_layers") or config.get("n_layer") or 1


def role_of(name: str) -> str:
    """Return what a layer of a block is to mixes: attn_k, attn_v, attn_output, ffn_down, or another.

    Args:
        name: of the layer as transformers names it.
    """
    return next((role for end, role in ROLES.items() if f".{name}".endswith(f".{end}")), "other")


def fitting(name: str, columns: int) -> BlockType:
    """Return a type, or where its blocks do not divide so many columns the one that takes its place."""
    kind = TYPES[name]
    return kind if columns % kind.columns == 0 or kind.fallback is None else TYPES[kind.fallback]


def type_of(mix: str, role: str, index: int, columns: int, config: Mapping[str, Any]) -> BlockType:
    """Return the type of blocks that llama.cpp gives a tensor.

    Args:
        mix: a type, which all tensors of blocks have, or one of `MIXES`.
        role: see `role_of`; "head" for output embeddings, "tied" for those that are the input's too, else "embeddings".
        index: of its block of the network.
        columns: inputs, or width of embeddings; see `fitting`.
        config: config.json of the network, as transformers completes it.

    `llama_tensor_get_type` of llama.cpp, as llama-cpp-python 0.3.36 has it.
    """
    if role in ("head", "tied"):
        return fitting("q8_0" if mix == "q8_0" else "q6_k", columns)
    return fitting(mix if mix in TYPES else _mixed(mix, role, index, config), columns)


def _mixed(mix: str, role: str, index: int, config: Mapping[str, Any]) -> str:
    """Return the name of the type in a mix, before widths are looked at.

    Where a block has 8 experts, attention is small beside them, and gets more bits.
    """
    heads, count, experts = config.get("num_attention_heads") or 1, blocks_of(config), experts_of(config)
    shared = heads // (config.get("num_key_value_heads") or heads)  # queries that share a key and value head
    usual = mix.removesuffix("_m")
    if experts == 8 and role in ("attn_k", "attn_v", "attn_output"):
        return "q5_k" if role == "attn_output" else "q8_0"
    more = index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2
    upper = "q6_k" if more else usual  # of q4_k and q5_k
    match role:
        case "attn_v":
            low = {"q2_k": "q4_k" if shared >= 4 else "q3_k", "q3_k": "q5_k" if index < 2 else "q4_k"}
            own = low.get(usual, upper)
            large = count == 80 and shared > 1  # Llama 70B
            return "q5_k" if large and own in ("q3_k", "q4_k") else own
        case "ffn_down":
            return {"q2_k": "q3_k", "q3_k": "q5_k" if index < count // 16 else "q4_k"}.get(usual, upper)
        case "attn_output":
            return {"q2_k": "q3_k", "q3_k": "q4_k"}.get(usual, usual)
        case _:
            return usual

"""Bytes of the keys and values of earlier tokens that a runtime keeps for a context of some length, from shapes alone.

Read off the layers of a block: keys and values of all heads that have their own (`k_proj`, `v_proj`, or one matrix for
queries, keys and values), of latent attention one vector per token, of a sliding window at most its tokens, and of linear
attention a state of constant size. Numbers have 16 bits, which is the default of runtimes, or 8; states have 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from nearplane.models.kinds import has_head, has_two_stacks, shared_layers, towers
from nearplane.models.model import Block, Model

NUMBER, STATE_NUMBER = 2, 4  # bytes of a key or value, and of a number in a state
DEFAULT_CONTEXT = 8192  # tokens, or a model's maximum length if that is shorter
ATTENTION = (
    None,
    "full_attention",
    "attention",
    "sliding_attention",
    "chunked_attention",
)  # types of blocks by configs
JOINT = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv")  # matrices of queries, keys and values together
OUTPUTS = (
    "o_proj",
    "dense",
    "c_proj",
    "out_proj",
)  # matrices behind the attention, with one input per number of queries
LATENT, KEYS = "kv_a_proj_with_mqa", "k_proj"
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}  # field by type of block


def cache_bytes(model: Model, context: int, number: int = NUMBER) -> int | None:
    """Return the bytes of the cache of one sequence of `context` tokens; None if a block is of an unknown kind.

    Args:
        model: The model; its shapes suffice.
        context: Number of tokens.
        number: Bytes of a key or value.
    """
    if not has_head(model.network):
        return 0
    if has_two_stacks(model.network) or _attends_outside(model):
        return None
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or [None] * len(model.blocks)
    shared = shared_layers(config) or 0  # the last ones use the keys of earlier ones
    own = list(zip(model.blocks, kinds, strict=True))[: len(model.blocks) - shared]
    sizes = [_of_block(block, kind, config, context, number) for block, kind in own]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _attends_outside(model: Model) -> bool:
    """Return whether the language model has attention outside its list of blocks, as networks that run blocks in turns."""
    inside = tuple(f"{name}." for name in (*model.stacks, *towers(model.network)))
    return any(name.endswith(f".{KEYS}") and not name.startswith(inside) for name, _ in model.network.named_modules())


def _of_block(block: Block, kind: str | None, config: Any, context: int, number: int) -> int | None:
    if kind == "linear_attention":
        return _linear_state(config)
    stateful = any(isinstance(module, nn.Conv1d) for module in block.empty.modules())  # beside or instead of attention
    if kind not in ATTENTION or stateful or hasattr(config, "index_head_dim"):
        return None
    numbers = _per_token(block)
    return None if numbers is None else number * numbers * min(context, _window(kind, config) or context)


def _window(kind: str | None, config: Any) -> int | None:
    """Return the number of tokens that the attention of a block looks back; None: all."""
    if kind is None and getattr(config, "use_sliding_window", True):
        kind = "sliding_attention"
    window: int | None = getattr(config, WINDOWS.get(str(kind), ""), None)
    return window


def _per_token(block: Block) -> int | None:
    """Return the numbers that the attention of a block keeps of one token; None if its matrices have unknown names."""
    modules: dict[str, dict[str, tuple[int, int]]] = {}  # (out, in) by module and matrix
    for layer in block.layers:
        module, _, name = layer.name.rpartition(".")
        modules.setdefault(module, {})[name] = layer.shape
    found = [numbers for shapes in modules.values() if (numbers := _of_attention(shapes)) is not None]
    return sum(found) if found else None


def _of_attention(shapes: Mapping[str, tuple[int, int]]) -> int | None:
    """Return the numbers that an attention with these matrices keeps of one token; None if it is none."""
    if LATENT in shapes:
        return shapes[LATENT][0]
    if KEYS in shapes and "v_proj" in shapes:
        return shapes[KEYS][0] + shapes["v_proj"][0]
    joint, behind = _first(shapes, JOINT), _first(shapes, OUTPUTS)
    return None if joint is None or behind is None else joint[0] - behind[1]


def _first(shapes: Mapping[str, tuple[int, int]], names: tuple[str, ...]) -> tuple[int, int] | None:
    return next((shapes[name] for name in names if name in shapes), None)


def _linear_state(config: Any) -> int | None:
    """Return the bytes of the state of a gated delta rule, as in Qwen3-Next and Qwen3.5; None for another kind."""
    fields = (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
    if not all(hasattr(config, field) for field in fields):
        return None
    keys, values, key, value, kernel = (int(getattr(config, field)) for field in fields)
    return STATE_NUMBER * values * key * value + NUMBER * kernel * (2 * keys * key + values * value)

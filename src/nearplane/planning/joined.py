"""Layers that must have one number format, because programs load them as one, or as what they are stored in."""

from __future__ import annotations

import re
from collections.abc import Mapping

from nearplane.formats.gptq import FUSED_NAMES
from nearplane.models.model import Model
from nearplane.recipe.recipe import Recipe

FUSED_BY_VLLM = {  # layers of one module that version 0.32 loads as one, besides those of `FUSED_NAMES`
    **dict.fromkeys(("c_fc_0", "c_fc_1"), "gate_up_proj"),
    **dict.fromkeys(("wq", "wk", "wv"), "merged_qkv"),
    **dict.fromkeys(("wq_a", "wkv"), "fused_wqa_wkv"),
    **dict.fromkeys(("key_proj", "value_proj"), "kv_proj"),
    **dict.fromkeys(("query", "key", "value"), "qkv_proj"),
    **dict.fromkeys(("w1", "w3"), "gate_up_proj"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),
    **dict.fromkeys(("in_proj_b", "in_proj_a"), "in_proj_ba"),
}
EXPERT = re.compile(r"(.*\bexperts)\.[0-9]+\.(.+)")


def joined_in(name: str) -> tuple[str, str, str] | None:
    """Return module, name and part of the layer that vLLM and SGLang make of a layer and others; None: it is one of its own."""
    path, _, last = name.rpartition(".")
    if (experts := EXPERT.match(name)) is not None:
        return experts[1], "experts", experts[2]  # one kernel takes all matrices of all experts
    whole = FUSED_NAMES.get(last) or FUSED_BY_VLLM.get(last)
    return None if whole is None else (path, whole, last)


def joined_layers(model: Model, recipe: Recipe, first: Mapping[str, str]) -> list[list[str]]:
    """Return sets of layers that must have one format.

    In GGUF and MLX, which hold matrices one by one, and with entropy-coded weights each layer is apart, and all experts of a side
    are together. Else layers of the same input are together, those that vLLM joins, and all experts of a block. Experts of the
    network are together where a reader takes one grid for all.

    Args:
        model, recipe: The model and its recipe.
        first: Name of the first layer with the same input, by name of each layer in a block.
    """
    keys: dict[str, str] = {}  # of each set by one of its keys; sets that share a key are one

    def root(key: str) -> str:
        while keys.setdefault(key, key) != key:
            key = keys[key]
        return key

    apart = recipe.files.every_tensor or recipe.scheme.entropy_coded
    names: dict[str, list[str]] = {}
    for block in model.blocks:
        layers = {layer.name: layer for layer in block.layers}
        for name, layer in layers.items():
            every = [layer.copies(model.weights)[0]]  # also of blocks that share their weights
            if layer.routed:
                in_block = first[name] if apart else f"{block.name}.experts"
                every.append("experts" if recipe.readers.one_grid_for_experts else in_block)
            elif not apart:
                joined = joined_in(name)
                every += [
                    layers[first[name]].copies(model.weights)[0],
                    *([] if joined is None else ["/".join(joined[:2])]),
                ]
            for other in every[1:]:
                keys[root(other)] = root(every[0])
            names.setdefault(every[0], []).append(name)
    sets: dict[str, list[str]] = {}
    for key, some in names.items():
        sets.setdefault(root(key), []).extend(some)
    return [*sets.values()]

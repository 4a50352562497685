"""Names and values of a checkpoint's tensors in a GGUF: llama.cpp's names, and rearranged rows and shapes.

This file deals with names and tensors; `architecture.py` interprets the config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearplane.errors import ModelError, RecipeError
from nearplane.formats.gguf.architecture import Config, architecture_of
from nearplane.formats.gguf.gguf_header import GLOBAL_SCALE, SCALE, STAR, TENSORS, Header
from nearplane.formats.gguf.mixes import blocks_of

UNUSED_NAMES = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")


ROTARY = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # made from the config
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PARTS = {  # names of modules in a block, by name in llama.cpp
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{each}": f"self_attn.{each}_proj" for each in ("q", "k", "v", "qkv")},
    **{f"attn_{each}_norm": f"self_attn.{each}_norm" for each in ("q", "k")},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{each}": f"mlp.{each}_proj" for each in ("gate", "up", "down")},
    **{f"ffn_{each}_exps": f"mlp.experts.{STAR}.{each}_proj" for each in ("gate", "up", "down")},
    **{f"ffn_{each}_shexp": f"mlp.shared_expert.{each}_proj" for each in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OTHER_PARTS = {  # where they differ, by architecture
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "llama": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        **{
            f"ffn_{each}_exps": f"block_sparse_moe.experts.{STAR}.{name}"
            for each, name in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
        },
    },
    "gpt2": {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
}
GPT2_ENDS = {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Conversion of a tensor between checkpoint and file.

    Args:
        heads: Number of heads whose two halves of rows are interleaved; 0: none.
        shift: Number that is added.
        transposed: Whether the checkpoint stores (in, out).
        row: Whether the checkpoint stores (1, in) and the file (in,).
        reciprocal: Whether the file stores the reciprocal.
    """

    heads: int = 0
    shift: float = 0.0
    transposed: bool = False
    row: bool = False
    reciprocal: bool = False

    def into(self, tensor: Tensor) -> Tensor:
        """Convert a tensor of the checkpoint to the form of the file."""
        if self.reciprocal:
            return tensor.reciprocal()
        if self.row:
            return tensor[0]
        if self.heads:
            tensor = _interleaved(tensor, self.heads, 2)
        if self.shift:
            tensor = tensor.to(torch.float32) + self.shift
        return tensor.T.contiguous() if self.transposed else tensor

    def back(self, tensor: Tensor) -> Tensor:
        """Convert a tensor of the file to the form of the checkpoint."""
        if self.reciprocal:
            return tensor.reciprocal().view(1)  # of an expert it is no vector in the file
        if self.row:
            return tensor[None]
        tensor = tensor.T.contiguous() if self.transposed else tensor
        if self.heads:
            tensor = _interleaved(tensor, self.heads, len(tensor) // self.heads // 2)
        return tensor - self.shift if self.shift else tensor


def _interleaved(tensor: Tensor, heads: int, parts: int) -> Tensor:
    """Interleave the rows of the `parts` of every head: first the first row of each part, then the second rows."""
    row_shape = tensor.shape[1:]
    return tensor.reshape(heads, parts, -1, *row_shape).transpose(1, 2).reshape(tensor.shape)


def rule_of(name: str, fields: Mapping[str, Any], *, dims: int) -> Rule:
    """Return the conversion of a tensor by its name in the file.

    Args:
        name: Name of the tensor in the file, like "blk.0.attn_q.weight".
        fields: Metadata of the file.
        dims: Number of dimensions; 1 for quantized blocks, which are always (out, in), so never transposed.
    """
    architecture = fields["general.architecture"]
    part = name.rsplit(".", 2)[-2]
    if is_scale(name):
        return Rule(reciprocal=True)
    if architecture == "llama" and part in ("attn_q", "attn_k"):
        heads = fields["llama.attention.head_count"]
        return Rule(heads=int(fields.get("llama.attention.head_count_kv", heads) if part == "attn_k" else heads))
    if architecture.startswith("gemma") and part.endswith("norm"):
        return Rule(shift=1.0)
    return reshaping(name, architecture, dims=dims)


def reshaping(name: str, architecture: str, *, dims: int) -> Rule:
    """Return the part of a tensor's conversion that changes its shape; see `rule_of`."""
    part = name.rsplit(".", 2)[-2]
    turned = architecture == "gpt2" and dims == 2 and part in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    return Rule(transposed=turned, row=part == "ffn_gate_inp_shexp")


def is_scale(name: str) -> bool:
    """Return whether a tensor of a file holds the global scale of a layer, or those of all experts of a block."""
    return name.endswith(f".{SCALE}")


def stacked_name(name: str) -> str:
    """Return the name of a tensor with a star for an expert's number, as all experts are one tensor in the file."""
    return re.sub(r"\.experts\.\d+\.", f".experts.{STAR}.", name)


def unused(name: str, config: Config) -> bool:
    """Return whether llama.cpp ignores a tensor of a checkpoint: masks, frequencies, a head tied to the embeddings."""
    return name.endswith(UNUSED_NAMES) or (name == "lm_head.weight" and bool(config.get("tie_word_embeddings", True)))


def llama_names(names: Iterable[str], config: Config) -> dict[str, str]:
    """Return llama.cpp's names of tensors by name in the checkpoint, without unused tensors.

    The matrices of all experts of a block have the same name, as they are one tensor, see `stacked_name`.

    Raises:
        RecipeError: llama.cpp has no name for a tensor.
    """
    import gguf

    architecture = architecture_of(config)
    number = {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}[architecture.name]
    table = gguf.get_tensor_name_map(number, blocks_of(config))
    new_names = {}
    for name in names:
        if unused(name, config):
            continue
        joint = stacked_name(name)
        new = table.get_name(joint.replace(f"experts.{STAR}", "experts"), try_suffixes=(".weight", ".bias"))
        if new is None and ".experts." in name and STAR not in joint:
            raise RecipeError(
                f"{name} contains all experts of a block, but a GGUF needs separate matrices for each expert. Save the model with "
                f"save_pretrained without save_original_format=False, or use another --format."
            )
        if new is None:
            raise RecipeError(
                f"{name}: llama.cpp has no such tensor in a {config['model_type']}. Use another --format, or remove it "
                f"from the checkpoint."
            )
        new_names[name] = new
    return new_names


def checkpoint_names(path: Path, header: Header) -> list[str]:
    """Return the names of a GGUF's tensors in a checkpoint, in file order; an empty name for rotary factors.

    Args:
        path: Path of the GGUF, for errors.
        header: Its header.

    Raises:
        ModelError: A tensor is unknown, or nearplane's list of names does not fit.
    """
    if header.own:
        return header.texts(path, TENSORS)
    architecture = str(header.fields.get("general.architecture"))
    parts = PARTS | OTHER_PARTS.get(architecture, {})
    ends, blocks = ENDS, "model.layers"
    if architecture == "gpt2":
        ends, blocks = ENDS | {part: f"transformer.{name}" for part, name in GPT2_ENDS.items()}, "transformer.h"
    names = []
    for info in header.tensors:
        stem, _, suffix = info.name.rpartition(".")
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        name = parts.get(match[2]) if match else ends.get(stem)
        if info.name in ROTARY:
            names.append("")
        elif name is None or suffix not in ("weight", "bias", SCALE):
            raise ModelError(f"{path}: nearplane knows no tensor {info.name} in a {architecture}. Use llama.cpp.")
        else:
            suffix = GLOBAL_SCALE if suffix == SCALE else suffix
            names.append(f"{blocks}.{match[1]}.{name}.{suffix}" if match else f"{name}.{suffix}")
    return names

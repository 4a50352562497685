"""Files as llama.cpp's converter writes them, without the converter: of Llama, and of DeepSeek's latent attention."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedModel

TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}


def write_gguf(path: Path, tensors: Mapping[str, Tensor], **fields: str | int) -> Path:
    """Write a GGUF of an architecture that nearplane does not know, with these tensors and further fields."""
    writer = gguf.GGUFWriter(path, "tiny")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_token_list(["a", "b", "ü"])
    for name, value in fields.items():
        writer.add_string(name, value) if isinstance(value, str) else writer.add_uint32(name, value)
    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType[TYPES[tensor.dtype]]
        raw = tensor.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(network: PreTrainedModel, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Return a network's tensors under llama.cpp's names, with rows of q and k as its rotary embeddings need them."""
    config = network.config
    stacks: dict[str, list[Tensor]] = {}
    tensors: dict[str, Tensor] = {}
    for name, values in network.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", stem)
        if ".experts." in name or name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            block = re.search(r"\d+", name)
            assert block is not None, name
            halves = (
                dict(zip(("gate", "up"), values.chunk(2, 1), strict=True)) if "gate_up" in name else {"down": values}
            )
            stacks |= {f"blk.{block[0]}.ffn_{part}_exps.weight": list(each) for part, each in halves.items()}
            continue
        new = f"blk.{match[1]}.{PARTS[match[2]]}" if match else ENDS[stem]
        if stem.endswith(("self_attn.q_proj", "self_attn.k_proj")):
            heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
        if stem.endswith("kv_b_proj"):
            both = values.view(config.num_attention_heads, -1, config.kv_lora_rank)
            k, v = both.split([config.qk_nope_head_dim, config.v_head_dim], 1)
            tensors |= {
                new.replace("kv_b", "k_b") + ".weight": k.mT.to(dtype),
                new.replace("kv_b", "v_b") + ".weight": v.to(dtype),
            }
            continue
        tensors[f"{new}.{suffix}"] = values.to(dtype if values.dim() > 1 and "gate_inp" not in new else torch.float32)
    return tensors | {name: torch.stack(each).to(dtype) for name, each in stacks.items()}

"""Tiny random models of many families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from nearplane.demo import MODEL

VOCABULARY = 96
TEXT_VOCABULARY = 768  # of models that get a tokenizer: what add_tokenizer leaves of the demo's
LLAMA = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=VOCABULARY,
    max_position_embeddings=64,
)
MOE = dict(moe_intermediate_size=16, num_experts=4, num_local_experts=4, num_experts_per_tok=2)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA | dict(attention_bias=True),
    "mistral": LLAMA | dict(sliding_window=6),
    "qwen3": LLAMA | dict(tie_word_embeddings=True),
    "gemma2": LLAMA | dict(sliding_window=6),
    "gemma3_text": LLAMA | dict(sliding_window=6),
    "gpt2": dict(n_embd=32, n_layer=3, n_head=4, n_positions=64, vocab_size=VOCABULARY),
    "opt": dict(
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        max_position_embeddings=64,
        vocab_size=VOCABULARY,
    ),
    "gpt_neox": {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "head_dim")},
    "qwen3_moe": LLAMA | MOE,
    "mixtral": LLAMA | MOE,
}
DEEPSEEK = LLAMA | dict(
    num_hidden_layers=2,
    num_key_value_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=4,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
)  # "deepseek_v3": attention of low rank, and a router with a bias that stays in float32
MOE_FAMILIES = ("qwen3_moe", "mixtral")  # their grouped products do not run in float64


def add_tokenizer(folder: Path) -> None:
    """Write the demo's tokenizer, cut to the bytes and its first merges: small models take a fraction of the time."""
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    model = tokenizer["model"]
    left_out = len(model["vocab"]) - TEXT_VOCABULARY
    model["vocab"] = {token: index for token, index in model["vocab"].items() if index < TEXT_VOCABULARY}
    model["merges"] = model["merges"][:-left_out]  # the last tokens are those of the last merges
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_bytes((MODEL / "tokenizer_config.json").read_bytes())


def config_of(family: str, **changes: Any) -> Any:
    """Return a small config; the special tokens are inside the small vocabulary."""
    small = FAMILIES.get(family, {}) | dict(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    return CONFIG_MAPPING[family](**(small | changes))


def random_model(config: Any, seed: int = 0) -> PreTrainedModel:
    """Return a random model in float64 whose every parameter matters: norms are not ones, biases not zero."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        center = 1.0 if "norm" in name or "ln_" in name else 0.0
        parameter.data = center + 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model

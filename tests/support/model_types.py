"""Tiny configs of causal language models of transformers, by their type."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCABULARY = 96
SIZES = {  # what fields of these names become, where a config has them
    64: "hidden_size n_embd d_model embedding_size word_embed_proj_dim lru_width mamba_d_ssm "
    "max_position_embeddings n_positions n_ctx max_seq_len",
    128: "intermediate_size ffn_dim ffn_hidden_size d_ff n_inner decoder_ffn_dim encoder_ffn_dim "
    "shared_intermediate_size dff",
    32: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size q_lora_rank "
    "kv_lora_rank qk_head_dim",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_key_value_heads "
    "num_experts_per_tok moe_topk moe_k top_k_experts",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_key_heads "
    "linear_num_value_heads mamba_n_heads",
    16: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim rotary_dim linear_key_head_dim "
    "linear_value_head_dim attention_window_size mamba_d_state mamba_chunk_size",
    1: "n_shared_experts n_group topk_group eos_token_id",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()} | dict(
    vocab_size=VOCABULARY, unpadded_vocab_size=VOCABULARY, pad_token_id=2, bos_token_id=0
)
LATENT = dict(head_dim=16, num_key_value_heads=4, first_k_dense_replace=1)
SHARING = dict(
    layer_types=["sliding_attention", "full_attention"] * 2, num_hidden_layers=4, hidden_size_per_layer_input=16,
    vocab_size_per_layer_input=VOCABULARY, num_kv_shared_layers=2, global_head_dim=32,
)  # fmt: skip
MIXED = dict(layer_types=["linear_attention", "full_attention"])
INDEXED = LATENT | dict(index_n_heads=4, index_head_dim=32, index_topk=8)
SLIDING = dict(swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16)
OWN: dict[str, dict[str, Any]] = {  # what some types need besides; None takes a field away
    "deepseek_v32": INDEXED,
    **dict.fromkeys(
        ("glm_moe_dsa", "hy_v4"), INDEXED | dict(num_hidden_layers=4, indexer_types=["full", "shared"] * 2)
    ),
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"), LATENT),
    **dict.fromkeys(("longcat_flash", "minicpm3", "youtu"), LATENT),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), MIXED),
    "bamba": dict(attn_layer_indices=[1]),
    "big_bird": dict(attention_type="original_full"),
    "mamba": dict(time_step_rank=16),
    "falcon_mamba": dict(time_step_rank=16),
    "cpmant": dict(dim_ff=128, dim_head=16),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8),
        ffn_config=dict(ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2),
    ),
    "deepseek_v4": dict(o_groups=2, o_lora_rank=32, head_dim=32, index_n_heads=4, index_head_dim=32),
    "falcon": dict(head_dim=None),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), SHARING),
    "gemma3n_text": dict(
        layer_types=["sliding_attention", "full_attention"] * 2, num_hidden_layers=4, hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCABULARY, num_kv_shared_layers=2, laurel_rank=16,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0], intermediate_size=[128] * 4,
    ),
    "kimi_linear": dict(
        head_dim=None, num_key_value_heads=4, linear_head_dim=16, linear_num_heads=4, linear_conv_kernel_dim=4,
        layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense", "sparse"],
    ),
    "bailing_hybrid": dict(
        head_dim=16, num_key_value_heads=4, layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse"], num_mtp_layers=0,
    ),
    "sarvam_mla": dict(num_key_value_heads=4),
    "qwen4_exp_text": dict(
        layer_types=["linear_attention", "full_attention"], hc_lowrank=16, ple_layer_ids=[], indexer_n_heads=2,
        indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=2,
    ),
    "dots3_note_text": dict(
        num_key_value_heads=4, index_n_heads=4, index_head_dim=32, index_topk=8, shared_experts_intermediate_size=32
    ),
    "inkling2_loop_text": SLIDING | dict(
        num_hidden_layers=3, loop_layer_index_start=1, loop_layer_index_end=2, loop_gate_rank=8, n_layers_per_attn_res_block=1
    ),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"]),
    **dict.fromkeys(("inkling_text", "inkling2_text"), SLIDING),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=16),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "lfm3": dict(layer_types=["conv", "full_attention"]),
    "mamba2": dict(num_heads=8, n_groups=2, state_size=16),
    "nemotron_h": dict(
        moe_shared_expert_intermediate_size=64, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=16
    ),
    "recurrent_gemma": dict(num_hidden_layers=3),
    "xlnet": dict(max_position_embeddings=None, d_inner=128),
    "xmod": dict(default_language="en_XX"),
    "zamba2": dict(layer_types=["mamba", "hybrid"], hybrid_layer_ids=[1]),
    "zaya": dict(num_experts_per_tok=1),
}  # fmt: skip
NIGHTLY = (
    "afmoe apertus apertus1p5_text arcee aria_text axk1 axk2 bailing_hybrid bamba bart beam bert bert-generation "
    "big_bird bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom camembert codegen cohere cohere2 "
    "cohere2_moe cpmant ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama "
    "doge dory dots1 dots3_note_text electra ernie ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon "
    "falcon_h1 falcon_mamba flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text "
    "glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj "
    "granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text "
    "hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_loop_text inkling2_text inkling_text "
    "internlm3 iquestcoder jais2 jamba jetmoe kimi_linear kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 llama "
    "llama4_text longcat_flash mamba mamba2 marian mbart megatron-bert mellum mimo_v2_flash minicpm3 minimax "
    "minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder moshi mpt mvp nanochat "
    "nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt pegasus persimmon phi phi3 phimoe "
    "plbart qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp_text "
    "recurrent_gemma rembert roberta roberta-prelayernorm roc_bert roformer rwkv sarvam_mla sarvam_moe seed_oss "
    "smollm3 solar_open stablelm starcoder2 trocr vaultgemma whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet "
    "xmod youtu zamba2 zaya "
)
TYPES = NIGHTLY.split()
FEW = ["gpt_bigcode"]  # of `make test`, whose other tests are of llama
SURVEYED = TYPES if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else FEW


def tiny_config(kind: str, **changes: Any) -> Any:
    """Return a config of a type with small sizes; `None` leaves a field at what it is by default."""
    made = CONFIG_MAPPING[kind]
    base = made()
    known = {*base.to_dict(), *base.attribute_map}
    fields = {name: size for name, size in SMALL.items() if name in known} | OWN.get(kind, {}) | changes
    return made(**{name: value for name, value in fields.items() if value is not None})


def save_type(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a random model of a type in which every parameter matters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes)).eval()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(folder)
    return folder

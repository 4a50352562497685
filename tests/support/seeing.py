"""Tiny random models that see images and continue text: a vision tower, a projector and a language model."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, PreTrainedModel

IMAGE, START, END = 90, 92, 93  # tokens
TEXT = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=96,
    max_position_embeddings=64,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
)
TOWER = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, image_size=28, patch_size=14
)  # more blocks than the language model has
MROPE = TEXT | dict(rope_parameters=dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=1e4))
PATCHES = dict(depth=4, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=14, out_hidden_size=32)
DEEP = PATCHES | dict(deepstack_visual_indexes=[0], num_position_embeddings=16)
SIGLIP = TOWER | dict(model_type="siglip_vision_model")
LINEAR = dict(
    layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=2,
    linear_key_head_dim=16, linear_value_head_dim=16,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
QWEN = dict(image_token_id=IMAGE, video_token_id=91, vision_start_token_id=START, vision_end_token_id=END)
SHARING = TEXT | dict(  # the last two blocks use the keys and values of the first two
    num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2, global_head_dim=16,
    hidden_size_per_layer_input=16, vocab_size_per_layer_input=96,
)  # fmt: skip
PLACES = dict(image_token_id=IMAGE, video_token_id=91, audio_token_id=94)
LATENT = TEXT | dict(
    num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1,
)  # fmt: skip
LLAVA = dict(
    text_config=TEXT | dict(model_type="llama"),
    vision_config=TOWER | dict(model_type="clip_vision_model", projection_dim=32),
    image_token_index=IMAGE,
)


def _with(kind: str, tower: dict[str, Any], **own: Any) -> dict[str, Any]:
    """Return the config of a language model of a type behind a tower."""
    return dict(text_config=TEXT | dict(model_type=kind), vision_config=tower, **own)


KINDS: dict[str, dict[str, Any]] = {
    "llava": LLAVA,
    "qwen2_vl": QWEN | dict(
        text_config=MROPE, vision_config=dict(depth=4, embed_dim=32, hidden_size=32, num_heads=2, patch_size=14)
    ),
    "gemma3": _with("gemma3_text", SIGLIP, mm_tokens_per_image=4, image_token_index=IMAGE),
    "qwen2_5_vl": QWEN | dict(
        text_config=MROPE, vision_config=PATCHES | dict(fullatt_block_indexes=[1], window_size=56)
    ),
    "qwen3_vl": QWEN | dict(text_config=MROPE, vision_config=DEEP),
    "qwen3_vl_moe": QWEN | dict(text_config=MROPE | EXPERTS, vision_config=DEEP),
    "gemma4": PLACES | dict(
        text_config=SHARING, audio_config=None,
        vision_config=dict(
            hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
            patch_size=14,
        ),
    ),
    "gemma4_unified": PLACES | dict(
        text_config=TEXT | dict(global_head_dim=16, layer_types=["sliding_attention", "full_attention"]),
        audio_config=None, vision_config=dict(mm_embed_dim=32, mm_posemb_size=16, output_proj_dims=32),
    ),
    "kimi_k25": dict(
        text_config=LATENT | dict(model_type="deepseek_v3"), image_token_id=IMAGE, video_token_id=91,
        vision_config=TOWER | dict(pos_emb_height=4, pos_emb_width=4), projection_hidden_size=32,
    ),
    "qwen3_5_moe": QWEN | dict(
        text_config=MROPE | LINEAR | EXPERTS | dict(shared_expert_intermediate_size=32), vision_config=DEEP
    ),
    "qwen3_5": QWEN | dict(text_config=MROPE | LINEAR, vision_config=DEEP),
    "glm4v": QWEN | dict(text_config=MROPE, vision_config=PATCHES | dict(image_size=28)),
    "llava_next": LLAVA | dict(image_grid_pinpoints=[[28, 28]]),
    "llava_onevision": _with("qwen2", SIGLIP, image_token_index=IMAGE, video_token_index=91),
    "vipllava": LLAVA | dict(vision_feature_layers=[-2, -3]),
    "mistral3": _with(
        "mistral", TOWER | dict(model_type="pixtral", head_dim=16), image_token_index=IMAGE, spatial_merge_size=2
    ),
    "paligemma": _with("gemma", SIGLIP | dict(projection_dim=32), image_token_index=IMAGE, projection_dim=32),
    "internvl": _with(
        "qwen2", TOWER | dict(model_type="internvl_vision", image_size=[28, 28], patch_size=[14, 14]), image_token_id=IMAGE
    ),
    "idefics3": _with("llama", TOWER | dict(model_type="idefics3_vision"), image_token_id=IMAGE),
    "smolvlm": _with("llama", TOWER | dict(model_type="smolvlm_vision"), image_token_id=IMAGE),
    "aya_vision": _with("cohere2", SIGLIP, image_token_index=IMAGE),
    "got_ocr2": _with(
        "qwen2",
        dict(hidden_size=32, output_channels=32, num_hidden_layers=4, num_attention_heads=2, image_size=32, patch_size=16,
             mlp_dim=64),
        image_token_index=IMAGE,
    ),
    "lfm2_vl": dict(
        text_config=TEXT | dict(model_type="lfm2", layer_types=["conv", "full_attention"]),
        vision_config=TOWER | dict(model_type="siglip2_vision_model"), image_token_id=IMAGE,
    ),
    "llama4": dict(
        text_config=TEXT | dict(intermediate_size_mlp=64, num_local_experts=2),
        vision_config=TOWER | dict(
            vision_output_dim=32, projector_input_dim=32, projector_output_dim=32, intermediate_size=128,
            pixel_shuffle_ratio=0.5,
        ),
        image_token_index=IMAGE,
    ),
    "mllama": dict(
        text_config=TEXT | dict(cross_attention_layers=[1], rope_scaling=dict(rope_type="default")),
        vision_config=TOWER | dict(
            num_global_layers=1, vision_output_dim=64, intermediate_layers_indices=[1], supported_aspect_ratios=[[1, 1]],
            max_num_tiles=1, attention_heads=2,
        ),
    ),
}  # fmt: skip
EARS = dict(intermediate_size=128, num_hidden_layers=4, num_attention_heads=2, num_mel_bins=8, max_source_positions=20)
HEARING: dict[str, dict[str, Any]] = {
    "qwen2_audio": dict(
        text_config=TEXT | dict(model_type="qwen2"),
        audio_config=dict(model_type="qwen2_audio_encoder", d_model=32, encoder_layers=4, encoder_attention_heads=2,
                          encoder_ffn_dim=64, num_mel_bins=8, max_source_positions=20),
        audio_token_index=IMAGE,
    ),
    "voxtral": dict(
        text_config=TEXT | dict(model_type="llama"),
        audio_config=EARS | dict(model_type="voxtral_encoder", hidden_size=32), audio_token_id=IMAGE,
    ),
}  # fmt: skip
WITH_IMAGES = ("llava", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # of which `seen` knows what they are given


def save_seeing(folder: Path, kind: str) -> Path:
    """Write a random model of a type in which every parameter matters."""
    torch.manual_seed(0)
    made = AutoModelForSeq2SeqLM if kind in HEARING else AutoModelForImageTextToText
    model = made.from_config(CONFIG_MAPPING[kind](**deepcopy((KINDS | HEARING)[kind]))).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def seen(kind: str) -> dict[str, Tensor]:
    """Return the tokens of a sentence around an image, and its pixel values, as the processor of a type makes them."""
    generator = torch.Generator().manual_seed(0)
    qwen = kind.startswith("qwen")
    around = ([5, START], [END, 7, 8]) if qwen else ([5, 6], [7, 8, 9])
    tokens = torch.tensor([around[0] + [IMAGE] * 4 + around[1]])
    kinds = (tokens == IMAGE).long()
    if qwen:
        patches = torch.randn(16, 3 * 2 * 14 * 14, generator=generator)
        grid = torch.tensor([[1, 4, 4]])
        return dict(input_ids=tokens, pixel_values=patches, image_grid_thw=grid, mm_token_type_ids=kinds)
    given = dict(input_ids=tokens, pixel_values=torch.randn(1, 3, 28, 28, generator=generator))
    return given | (dict(token_type_ids=kinds) if kind == "gemma3" else {})


@torch.no_grad()
def logits(model: PreTrainedModel, given: dict[str, Tensor]) -> Tensor:
    """Return what a model predicts."""
    return model.eval()(**given).logits

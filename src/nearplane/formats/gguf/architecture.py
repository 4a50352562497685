"""Architectures of llama.cpp: names, and metadata of a network's shape, for the model types that nearplane writes.

This file reads config.json as transformers completes it. It refuses networks that llama.cpp would not load, or would
compute differently than transformers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nearplane.errors import RecipeError
from nearplane.formats.gguf.mixes import experts_of

Config = Mapping[str, Any]
logger = logging.getLogger("nearplane")
# names of numbers in config.json, by key in the file without the architecture's name
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
GPT2_SIZES = dict(zip(SIZES, ("n_layer", "n_positions", "n_embd", "n_inner", "n_head"), strict=True))
EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The architecture of one model type in llama.cpp.

    Args:
        name: Name of the architecture in llama.cpp.
        tell: Function that adds its metadata to a `gguf.GGUFWriter`; it refuses options that llama.cpp lacks.
        fixed: Values that llama.cpp assumes, by field of config.json.
        square: Whether all heads together must be as wide as the hidden states.
        experts: Whether `tell` leaves the metadata of experts to the caller.
        untied: Whether a head that is not tied to the embeddings is allowed.
        scaled: Whether llama.cpp multiplies the products of MLPs, and of experts, with global scales.
    """

    name: str
    tell: Callable[[Any, Config], None]
    fixed: Mapping[str, Any]
    square: bool = False
    experts: bool = False
    untied: bool = True
    scaled: bool = False


def _llama(writer: Any, config: Config) -> None:
    """Add the metadata of Llama, Mistral and Mixtral."""
    _sizes(writer, config, window=config.get("sliding_window"))
    writer.add_rope_dimension_count(_head_size(config))
    _rope(writer, config, ("default", "linear", "llama3", "yarn"))


def _qwen(writer: Any, config: Config) -> None:
    """Add the metadata of Qwen2 and Qwen3, with experts or without."""
    _sizes(writer, config)
    if config.get("use_sliding_window") and config.get("sliding_window"):
        raise _refusal(config, "use_sliding_window", True, "false, as it has no window there")
    _rope(writer, config, ("default", "linear", "yarn"))


def _olmoe(writer: Any, config: Config) -> None:
    _sizes(writer, config)
    _refuse_others(config, {"num_key_value_heads": config["num_attention_heads"]})
    _experts(writer, config)
    _rope(writer, config, ("default", "linear", "yarn"))


def _experts(writer: Any, config: Config) -> None:
    """Add the number of experts per block, the number per token, and their widths."""
    _refuse_others(config, {"decoder_sparse_step": 1, "mlp_only_layers": []})
    numbers = {**config, "num_experts": experts_of(config)}
    _add(writer, numbers, {key: name for key, name in EXPERTS.items() if name in numbers})


def _gemma2(writer: Any, config: Config) -> None:
    _gemma(writer, config, every=2)
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"] or 0.0)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"] or 0.0)


def _gemma3(writer: Any, config: Config) -> None:
    _gemma(writer, config, every=6)
    if config.get("attn_logit_softcapping"):
        raise _refusal(config, "attn_logit_softcapping", config["attn_logit_softcapping"], "none")
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _gemma(writer: Any, config: Config, every: int) -> None:
    """Add the metadata that Gemma 2 and 3 share; of `every` blocks all but the last have an attention window."""
    _sizes(writer, config)
    kinds = config.get("layer_types") or []
    pattern = ["full_attention" if (index + 1) % every == 0 else "sliding_attention" for index in range(len(kinds))]
    if kinds != pattern:
        raise _refusal(config, "layer_types", f"{kinds[:every]}, ...", f"full_attention only in every {every}th")
    writer.add_sliding_window(config["sliding_window"])
    largest = {"gemma2": 46, "gemma3_text": 62}[config["model_type"]]  # blocks; this size scales queries differently
    size = _head_size(config)
    if config["num_hidden_layers"] == largest:
        size = config["hidden_size"] // config["num_attention_heads"]
    if config.get("query_pre_attn_scalar") != size:
        raise _refusal(config, "query_pre_attn_scalar", config.get("query_pre_attn_scalar"), str(size))
    _rope(writer, config, ("default", "linear"))


def _phi3(writer: Any, config: Config) -> None:
    _sizes(writer, config, window=config.get("sliding_window"))
    rope, positions = ropes(config)["full_attention"], config["max_position_embeddings"]
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(int(part * config["hidden_size"]) // config["num_attention_heads"])
    name = "original_max_position_embeddings"
    original = rope.get(name) or config.get(name) or positions
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_sliding_window(config.get("sliding_window") or 0)
    if _rope_type(rope) == "longrope":
        scale, factor = rope.get("factor") or positions / original, rope.get("attention_factor")
        if factor is None:
            factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        writer.add_rope_scaling_attn_factors(float(factor))
    _rope(writer, config, ("default", "longrope"))


def _gpt2(writer: Any, config: Config) -> None:
    _add(writer, {**config, "n_inner": config.get("n_inner") or 4 * config["n_embd"]}, GPT2_SIZES)
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


SILU = {"hidden_act": "silu"}
LLAMA = SILU | {"partial_rotary_factor": 1.0}
QWEN = SILU | {"attention_bias": False}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "use_bidirectional_attention": False}
GPT2 = {"activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
QWEN2_MOE, QWEN3_MOE = QWEN | {"norm_topk_prob": False}, QWEN | {"norm_topk_prob": True}
ARCHITECTURES = {  # by model_type of config.json
    "llama": Architecture(name="llama", tell=_llama, fixed=LLAMA, scaled=True),
    "mistral": Architecture(name="llama", tell=_llama, fixed=LLAMA, scaled=True),
    "qwen2": Architecture(name="qwen2", tell=_qwen, fixed=QWEN, square=True),
    "qwen3": Architecture(name="qwen3", tell=_qwen, fixed=QWEN, scaled=True),
    "gemma2": Architecture(name="gemma2", tell=_gemma2, fixed=GEMMA, untied=False),
    "gemma3_text": Architecture(name="gemma3", tell=_gemma3, fixed=GEMMA),
    "phi3": Architecture(name="phi3", tell=_phi3, fixed=SILU, square=True),
    "gpt2": Architecture(name="gpt2", tell=_gpt2, fixed=GPT2),
    "mixtral": Architecture(name="llama", tell=_llama, fixed=LLAMA, experts=True, scaled=True),
    "qwen3_moe": Architecture(name="qwen3moe", tell=_qwen, fixed=QWEN3_MOE, experts=True, scaled=True),
    "qwen2_moe": Architecture(name="qwen2moe", tell=_qwen, fixed=QWEN2_MOE, square=True, experts=True),
    "olmoe": Architecture(name="olmoe", tell=_olmoe, fixed=QWEN2_MOE | {"clip_qkv": None}, square=True),
}
YARN = {  # parameters of YaRN that llama.cpp assumes
    "attention_factor": None,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": None,
    "mscale_all_dim": None,
    "truncate": True,
}
GELU = {"gelu_new": {"gelu_pytorch_tanh"}, "gelu_pytorch_tanh": {"gelu_new"}}  # two names of one function


def architecture_of(config: Config) -> Architecture:
    """Return the architecture of a model type.

    Raises:
        RecipeError: nearplane writes no GGUF of this model type.
    """
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise RecipeError(
            f"model_type is {kind!r}; nearplane writes a GGUF of {', '.join(ARCHITECTURES)}. Use another --format, or "
            f"run nearplane export and then llama.cpp's converter."
        )
    return ARCHITECTURES[str(kind)]


def tell(writer: Any, config: Config) -> None:
    """Add the metadata of a network's shape.

    Args:
        writer: A `gguf.GGUFWriter`.
        config: config.json as transformers completes it.

    Raises:
        RecipeError: llama.cpp would compute the network differently.
    """
    architecture = architecture_of(config)
    if not architecture.untied and config.get("tie_word_embeddings") is False:
        raise _refusal(config, "tie_word_embeddings", False, "true, as it reads no separate head")
    _refuse_others(config, architecture.fixed)
    if architecture.square:
        _square(config)
    architecture.tell(writer, config)
    if architecture.experts:
        _experts(writer, config)
    writer.add_vocab_size(config["vocab_size"])


def rope_factors(config: Config) -> dict[str, Tensor]:
    """Return the factors of rotary frequencies by name: tensors that llama.cpp needs and no checkpoint has."""
    rope = ropes(config)["full_attention"]
    match _rope_type(rope):
        case "llama3":
            return {"rope_freqs.weight": llama3_factors(rope, _head_size(config))}
        case "longrope":
            return {
                f"rope_factors_{length}.weight": torch.tensor(rope[f"{length}_factor"], dtype=torch.float32)
                for length in ("long", "short")
            }
    return {}


def llama3_factors(rope: Config, size: int) -> Tensor:
    """Return (size / 2,) divisors of frequencies: 1 for short waves, `factor` for long ones, interpolated between."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    waves = 2 * math.pi * float(rope.get("rope_theta", 10000.0)) ** exponents
    factor, low, high = (float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = float(rope["original_max_position_embeddings"]) / waves
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _sizes(writer: Any, config: Config, window: int | None = None) -> None:
    """Add the sizes that all types but GPT-2 have under the same names.

    Args:
        window: Attention window that llama.cpp lacks, in tokens; it limits the context, as longer text would differ.
    """
    positions = config["max_position_embeddings"]
    if window is not None and window < positions:
        logger.warning(
            f"llama.cpp has no attention window for a {config['model_type']}: the context in the GGUF is limited to "
            f"the window, {window} tokens instead of {positions}."
        )
    _add(writer, {**config, "max_position_embeddings": min(window or positions, positions)}, SIZES)
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    writer.add_key_length(_head_size(config))
    writer.add_value_length(_head_size(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add(writer: Any, config: Config, names: Mapping[str, str]) -> None:
    """Add numbers of config.json; `names` are theirs by key in the file."""
    for key, name in names.items():
        writer.add_uint32(f"{writer.arch}.{key}", config[name])


def _head_size(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def ropes(config: Config) -> Mapping[str, Config]:
    """Return the rotary parameters of blocks with and without a window, as any version of transformers stores them."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "full_attention" in rope:
        return rope
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    local = config.get("rope_local_base_freq")
    return {"full_attention": rope} | ({} if local is None else {"sliding_attention": {"rope_theta": local}})


def _rope_type(rope: Config) -> str:
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    return "longrope" if kind == "su" else kind


def _rope(writer: Any, config: Config, known: tuple[str, ...]) -> None:
    """Add the rotary parameters, or refuse those that llama.cpp does not compute."""
    from gguf import RopeScalingType

    both = ropes(config)
    rope, window = both["full_attention"], both.get("sliding_attention")
    kind = _rope_type(rope)
    if kind not in known:
        raise _refusal(config, "rope_type", kind, " or ".join(known))
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    if window is not None:
        if _rope_type(window) != "default":
            raise _refusal(config, "rope_type of sliding_attention", _rope_type(window), "default")
        writer.add_rope_freq_base_swa(float(window["rope_theta"]))
    if kind not in ("default", "llama3"):
        writer.add_rope_scaling_type(RopeScalingType(kind))
    match kind:
        case "linear":
            writer.add_rope_scaling_factor(float(rope["factor"]))
        case "yarn":
            for name, usual in YARN.items():
                if (value := rope.get(name)) not in (None, usual):
                    raise _refusal(config, f"{name} of rope_parameters", value, "none" if usual is None else str(usual))
            positions, original = config["max_position_embeddings"], rope["original_max_position_embeddings"]
            writer.add_rope_scaling_factor(float(rope.get("factor") or positions / original))
            writer.add_rope_scaling_orig_ctx_len(original)


def _square(config: Config) -> None:
    """Refuse heads whose total width is not that of the hidden states."""
    size, heads = _head_size(config), config["num_attention_heads"]
    if size * heads != config["hidden_size"]:
        raise _refusal(config, "head_dim", size, str(config["hidden_size"] // heads))


def _refuse_others(config: Config, fixed: Mapping[str, Any]) -> None:
    """Refuse a network with another value than llama.cpp assumes for its type."""
    for name, value in fixed.items():
        actual = config.get(name)
        if actual is not None and actual != value and actual not in GELU.get(str(value), ()):
            raise _refusal(config, name, actual, str(value))


def _refusal(config: Config, name: str, actual: Any, expected: str) -> RecipeError:
    return RecipeError(
        f"{name} in config.json is {actual!r}; for a {config.get('model_type')} llama.cpp expects {expected}. Use "
        f"another --format."
    )

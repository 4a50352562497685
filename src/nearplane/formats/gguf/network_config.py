"""The config.json of a network, from the metadata of its GGUF: the inverse of `architecture.tell`. Needs no other package.

Metadata that this file does not know are refused, because they might describe another network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from nearplane.errors import ModelError
from nearplane.formats.gguf.architecture import ARCHITECTURES, EXPERTS, GPT2_SIZES, SIZES, llama3_factors, ropes
from nearplane.formats.gguf.gguf_header import NUMBER, Header, Info
from nearplane.formats.gguf.mixes import experts_of

Config = dict[str, Any]
DTYPES = {NUMBER["F32"]: "float32", NUMBER["F16"]: "float16", NUMBER["BF16"]: "bfloat16"}
IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
TOLERANCE = 1e-6  # relative; a GGUF stores numbers as float32
FREE = {"model_type", "dtype", "max_position_embeddings", "sliding_window", *IDS.values()}  # entries that may differ
DERIVED = {
    "head_dim",
    "num_key_value_heads",
    "n_inner",
    "attention_bias",
    "mlp_bias",
}  # config.json may leave them open


class _Metadata:
    """Entries of one architecture in a header; `rest` names those that were not taken."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path, self.tensors = path, {info.name: info for info in header.tensors}
        self.name = str(header.fields.get("general.architecture"))
        start = f"{self.name}."
        self.entries = {key.removeprefix(start): value for key, value in header.fields.items() if key.startswith(start)}
        self.rest = {*self.entries}
        self.ids = {new: value for old, new in IDS.items() if (value := header.fields.get(f"tokenizer.ggml.{old}"))}

    def take(self, key: str, default: Any = None) -> Any:
        """Return a number or text; `default` if it is missing, where it may be.

        Raises:
            ModelError: The entry is missing, or not a number or text.
        """
        value = self.entries.get(key, default)
        if value is None:
            raise self.error(f"{self.name}.{key} is missing, or not a single value")
        self.rest.discard(key)
        return value

    def has(self, name: str) -> bool:
        """Return whether a block has a tensor of this name."""
        return f"blk.0.{name}" in self.tensors

    def factors(self, name: str) -> list[float] | None:
        """Return the rotary factors in a tensor, or None if there are none.

        Raises:
            ModelError: The tensor is not in float32.
        """
        info: Info | None = self.tensors.get(name)
        if info is None:
            return None
        if info.type != NUMBER["F32"]:
            raise self.error(f"{name} has type {info.type}, expected float32")
        with self.path.open("rb") as file:
            file.seek(info.begin)
            return torch.frombuffer(bytearray(file.read(info.size)), dtype=torch.float32).tolist()

    def error(self, what: str) -> ModelError:
        """Return the error for metadata that nearplane does not read."""
        return ModelError(
            f"{self.path}: {what}. nearplane reads GGUF files of networks that it also writes. Use llama.cpp, or "
            f"fetch the file again."
        )


def config_of(path: Path, header: Header) -> Config:
    """Return the config.json of a network, without quantization_config.

    Args:
        path: Path of the GGUF.
        header: Its header.

    Raises:
        ModelError: nearplane does not write this architecture, or an entry is unknown, missing or contradicts a tensor.
    """
    entries = _Metadata(path, header)
    if entries.name not in BUILDERS:
        raise entries.error(f"its architecture is {entries.name!r}, expected one of {', '.join(BUILDERS)}")
    blocks = {name.split(".")[1] for name in entries.tensors if name.startswith("blk.")}
    embeddings, config = entries.tensors.get("token_embd.weight"), BUILDERS[entries.name](entries)
    if embeddings is None or entries.take("vocab_size", embeddings.shape[0]) != embeddings.shape[0]:
        raise entries.error("it has no token_embd.weight, or one whose rows are not vocab_size")
    if entries.take("block_count") != len(blocks):
        raise entries.error(f"block_count is {entries.take('block_count')}, but it has tensors of {len(blocks)} blocks")
    if entries.rest:
        raise entries.error(f"it has the entry {entries.name}.{min(entries.rest)}, which nearplane does not know")
    dense = [info.type for info in header.tensors if info.type in DTYPES and len(info.shape) > 1]
    return {
        **ARCHITECTURES[config["model_type"]].fixed,
        **config,
        "vocab_size": embeddings.shape[0],
        "tie_word_embeddings": "output.weight" not in entries.tensors,
        "dtype": DTYPES[max(dense, key=dense.count)] if dense else "float32",
        **entries.ids,
    }


def check_network(path: Path, header: Header, config: Mapping[str, Any]) -> None:
    """Refuse a GGUF whose metadata contradict the config.json beside it.

    Args:
        path: Path of the GGUF.
        header: Its header.
        config: config.json as transformers completes it.

    Raises:
        ModelError: An entry differs.
    """
    in_file, kind = config_of(path, header), ARCHITECTURES.get(str(config.get("model_type")))
    skipped = {*FREE, "rope_parameters", *(() if kind is None else kind.fixed)}
    skipped |= {name for name in DERIVED if config.get(name) is None}
    numbers = {"num_experts": experts_of(config), "num_local_experts": experts_of(config)}  # two names of one entry
    pairs = [
        (name, value, numbers.get(name, config.get(name))) for name, value in in_file.items() if name not in skipped
    ]
    if "rope_parameters" in in_file:
        rope, other = (ropes(each)["full_attention"] for each in (in_file, config))
        pairs += [(name, rope[name], other.get(name)) for name in ("rope_theta", "factor") if name in rope]
    pairs.append(("architecture", header.fields["general.architecture"], None if kind is None else kind.name))
    for name, value, expected in pairs:
        if value != expected and not (
            isinstance(value, int | float)
            and isinstance(expected, int | float)
            and math.isclose(value, expected, rel_tol=TOLERANCE)
        ):
            raise ModelError(
                f"{path}: {name} is {value!r} in its metadata, but {expected!r} in config.json. These files do not "
                f"belong together. Fetch the folder again."
            )


def _sizes(entries: _Metadata) -> Config:
    """Return the sizes that all architectures but GPT-2 have."""
    take = entries.take
    heads, hidden = take("attention.head_count"), take("embedding_length")
    size = take("attention.key_length", hidden // max(1, heads))
    if take("attention.value_length", size) != size:
        raise entries.error("attention.value_length differs from attention.key_length")
    return {name: take(key) for key, name in SIZES.items()} | {
        "num_key_value_heads": take("attention.head_count_kv", heads),
        "head_dim": size,
        "rms_norm_eps": take("attention.layer_norm_rms_epsilon"),
    }


def _rope(entries: _Metadata) -> Config:
    """Return the rotary parameters."""
    rope: Config = {"rope_type": "default", "rope_theta": entries.take("rope.freq_base", 10000.0)}
    kind = entries.take("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise entries.error(f"rope.scaling.type is {kind!r}, expected none, linear, yarn or longrope")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": entries.take("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = entries.take("rope.scaling.original_context_length")
    if (factors := entries.factors("rope_freqs.weight")) is not None:
        rope |= _llama3(entries, factors, rope["rope_theta"])
    return rope


def _llama3(entries: _Metadata, factors: list[float], theta: float) -> Config:
    """Return the parameters of Llama 3 that give these divisors of frequencies.

    1 / divisor is linear in the number of turns within the original context, from 1 turn to 4 in all models of Llama 3.
    """
    size, factor, low, high = 2 * len(factors), max(factors), 1.0, 4.0
    turns = [theta ** (-2 * i / size) / (2 * math.pi) for i in range(len(factors))]  # per token
    shares = [(1 / each - 1 / factor) / (1 - 1 / factor) if factor > 1 else 1.0 for each in factors]
    contexts = [(low + share * (high - low)) / turn for share, turn in zip(shares, turns, strict=True)]
    inner = [context for context, share in zip(contexts, shares, strict=True) if 1e-3 < share < 1 - 1e-3]
    edge = max((context for context, share in zip(contexts, shares, strict=True) if share >= 1 - 1e-3), default=1.0)
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    rope["original_max_position_embeddings"] = round(sorted(inner)[len(inner) // 2]) if inner else math.ceil(edge)
    if not torch.allclose(llama3_factors(rope | {"rope_theta": theta}, size), torch.tensor(factors), rtol=1e-3):
        raise entries.error("rope_freqs.weight has factors that are not those of Llama 3")
    return rope


def _llama(entries: _Metadata) -> Config:
    """Return the config of Llama, Mistral and Mixtral, which are one architecture."""
    config = _sizes(entries) | {"model_type": "llama", "attention_bias": entries.has("attn_q.bias")}
    config |= {"mlp_bias": entries.has("ffn_up.bias"), "rope_parameters": _rope(entries)}
    if entries.take("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise entries.error("rope.dimension_count differs from attention.key_length")
    if "expert_count" not in entries.entries:
        return config
    del config["attention_bias"], config["mlp_bias"]
    return config | {"model_type": "mixtral", "sliding_window": None, **_experts(entries, "num_local_experts")}


def _experts(entries: _Metadata, count: str = "num_experts") -> Config:
    """Return the numbers and widths of experts."""
    names = EXPERTS | {"expert_count": count}
    return {name: entries.take(key) for key, name in names.items() if key in entries.entries}


def _qwen(entries: _Metadata) -> Config:
    """Return the config of Qwen2, Qwen3 and OLMoE, with experts or without."""
    kind = {each.name: name for name, each in ARCHITECTURES.items()}[entries.name]
    return _sizes(entries) | {"model_type": kind, "rope_parameters": _rope(entries), **_experts(entries)}


def _gemma(entries: _Metadata) -> Config:
    """Return the config of Gemma 2 and 3, whose blocks have a window in turns."""
    config, rope = _sizes(entries), _rope(entries)
    two = entries.name == "gemma2"
    every, largest = (2, 46) if two else (6, 62)
    blocks = range(config["num_hidden_layers"])
    size = config["hidden_size"] // config["num_attention_heads"] if len(blocks) == largest else config["head_dim"]
    local = {"rope_type": "default", "rope_theta": entries.take("rope.freq_base_swa", 10000.0)}
    config |= {
        "model_type": "gemma2" if two else "gemma3_text",
        "sliding_window": entries.take("attention.sliding_window"),
        "layer_types": ["sliding_attention" if (i + 1) % every else "full_attention" for i in blocks],
        "query_pre_attn_scalar": size,
        "rope_parameters": rope if two else {"full_attention": rope, "sliding_attention": local},
        "final_logit_softcapping": entries.take("final_logit_softcapping", 0.0) or None,
    }
    return config | ({"attn_logit_softcapping": entries.take("attn_logit_softcapping", 0.0) or None} if two else {})


def _phi3(entries: _Metadata) -> Config:
    config, rope = _sizes(entries), _rope(entries)
    size = config.pop("head_dim")
    rope["partial_rotary_factor"] = entries.take("rope.dimension_count", size) / size
    original = entries.take("rope.scaling.original_context_length", config["max_position_embeddings"])
    short, long = (entries.factors(f"rope_factors_{length}.weight") for length in ("short", "long"))
    if short and long:
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        rope["attention_factor"] = entries.take("rope.scaling.attn_factor", 1.0)
        rope["original_max_position_embeddings"] = original
    config["sliding_window"] = entries.take("attention.sliding_window", 0) or None
    return config | {"model_type": "phi3", "rope_parameters": rope, "original_max_position_embeddings": original}


def _gpt2(entries: _Metadata) -> Config:
    config = {name: entries.take(key) for key, name in GPT2_SIZES.items()}
    return config | {"model_type": "gpt2", "layer_norm_epsilon": entries.take("attention.layer_norm_epsilon")}


BUILDERS: Mapping[str, Callable[[_Metadata], Config]] = {
    "llama": _llama,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "qwen3moe": _qwen,
    "qwen2moe": _qwen,
    "olmoe": _qwen,
}  # by name of the architecture in llama.cpp

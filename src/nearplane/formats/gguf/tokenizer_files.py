"""The tokenizer.json of a tokenizer, from the metadata of a GGUF: the inverse of `tokenizer.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from nearplane.errors import ModelError
from nearplane.formats.gguf.tokenizer import GPT2, PRE, SPACE, Kind

SPECIAL = {  # by name in tokenizer_config.json
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
ADDED = (Kind.CONTROL, Kind.USER_DEFINED)  # kinds of tokens that are found before text is split
SAME = {"default": "gpt-2", "llama3": "llama-bpe", "llama-v3": "llama-bpe"}  # names with one expression


def tokenizer_files(path: Path, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of tokenizer.json and tokenizer_config.json by file name; nothing without a tokenizer.

    Args:
        path: Path of the GGUF, for errors.
        fields: Metadata of the GGUF with all lists.

    Raises:
        ModelError: nearplane writes no tokenizer of this kind, or the metadata contradict each other.
    """
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    model, tokens, kinds = ggml.get("model", "none"), ggml.get("tokens"), ggml.get("token_type")
    if model == "none":
        return {}
    if not _texts(tokens) or not isinstance(kinds, list) or len(kinds) != len(tokens) or len({*tokens}) < len(tokens):
        raise _error(path, "it has no list of different tokens with their types")
    if not isinstance(model, str) or model not in BUILDERS:
        raise _error(path, f"its tokenizer is {str(model)[:40]!r}, expected {', '.join(BUILDERS)} or none")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == Kind.UNKNOWN), None)
    parts = BUILDERS[model](path, ggml, vocabulary)
    parts["model"] = {"type": "BPE", "vocab": vocabulary, "unk_token": unknown, **parts["model"]}
    special = {
        name: tokens[i] for name, key in SPECIAL.items() if isinstance(i := ggml.get(key), int) and 0 <= i < len(tokens)
    }
    added = [
        {"id": index, "content": token, "special": kind == Kind.CONTROL, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in ADDED or token in special.values()
    ]
    whole = {"version": "1.0", "added_tokens": added, "post_processor": _framing(ggml, special, vocabulary), **parts}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    if isinstance(template := fields.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    return {"tokenizer.json": json.dumps(whole), "tokenizer_config.json": json.dumps(config)}


def _of_bytes(path: Path, ggml: Mapping[str, Any], vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """Return the parts of a tokenizer over bytes."""
    name, merges = str(ggml.get("pre", "default")), ggml.get("merges")
    known = {pre: key for key, pre in PRE.items()}
    if SAME.get(name, name) not in known or not _texts(merges):
        raise _error(path, f"its pre-tokenizer is {name[:40]!r}, expected one of {', '.join(known)}, with merges")
    expressions, whole = known[SAME.get(name, name)]
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in expressions
        if expression != GPT2
    ]
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": GPT2 in expressions}
    return {
        "model": {"merges": [merge.split(" ", 1) for merge in merges or ()], "ignore_merges": whole},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, by_bytes]},
        "decoder": by_bytes,
    }


def _of_pieces(path: Path, ggml: Mapping[str, Any], vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """Return the parts of a tokenizer over pieces: of all pairs, the one whose token has the highest score is merged first."""
    scores, kinds = ggml.get("scores"), ggml["token_type"]
    if not isinstance(scores, list) or len(scores) != len(vocabulary):
        raise _error(path, "it has no scores of its tokens")
    merges = []
    for token, index in vocabulary.items():
        if kinds[index] == Kind.NORMAL:
            cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
            merges += [
                (-scores[index], index, pair) for pair in cuts if pair[0] in vocabulary and pair[1] in vocabulary
            ]
    space = [{"type": "Prepend", "prepend": SPACE}] if ggml.get("add_space_prefix", True) else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *({"type": "Strip", "content": " ", "start": 1, "stop": 0} for _ in space),
    ]
    return {
        "model": {"merges": [pair for *_, pair in sorted(merges)], "byte_fallback": True, "fuse_unk": True},
        "normalizer": {"type": "Sequence", "normalizers": [*space, replace]},
        "decoder": {"type": "Sequence", "decoders": back},
    }


def _of_characters(path: Path, ggml: Mapping[str, Any], vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """Return the parts of a tokenizer whose tokens are single characters.

    Raises:
        ModelError: Other tokens are longer, as in other tokenizers of this kind.
    """
    kinds = ggml["token_type"]
    if any(len(token) > 1 and kinds[index] == Kind.NORMAL for token, index in vocabulary.items()):
        raise _error(path, "its tokenizer is 't5' with tokens of several characters")
    steps = [({"Regex": " +"}, " "), ({"Regex": r"\A | \z"}, "")]
    squeeze = [{"type": "Replace", "pattern": pattern, "content": content} for pattern, content in steps]
    parts = _of_pieces(path, {**ggml, "scores": [0.0] * len(kinds), "token_type": [0] * len(kinds)}, vocabulary)
    parts["normalizer"]["normalizers"] = [*squeeze, *parts["normalizer"]["normalizers"]]
    parts["model"]["byte_fallback"] = False
    return parts


def _framing(
    ggml: Mapping[str, Any], special: Mapping[str, str], vocabulary: Mapping[str, int]
) -> dict[str, Any] | None:
    """Return the post-processor that adds special tokens at both ends of a text; None if there are none."""
    usual = ggml["model"] == "llama"  # llama.cpp's defaults
    starts = ggml.get("add_bos_token", usual) and "bos_token" in special
    ends = ggml.get("add_eos_token", False) and "eos_token" in special
    if not starts and not ends:
        return None
    first, last = ([special[name]] if used else [] for name, used in (("bos_token", starts), ("eos_token", ends)))

    def framed(*parts: str) -> list[dict[str, Any]]:
        marks = [{"SpecialToken": {"id": token, "type_id": 0}} for token in (*first, *last)]
        texts = [{"Sequence": {"id": part, "type_id": 0}} for part in parts]
        return [*marks[: len(first)], *texts, *marks[len(first) :]]

    used = {token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]} for token in (*first, *last)}
    return {"type": "TemplateProcessing", "single": framed("A"), "pair": framed("A", "B"), "special_tokens": used}


def _texts(values: object) -> TypeGuard[list[str]]:
    """Return whether a value is a list of texts."""
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _error(path: Path, what: str) -> ModelError:
    return ModelError(
        f"{path}: {what}. nearplane reads the tokenizers that it also writes. Pass the folder of the checkpoint, or use "
        f"llama.cpp."
    )


BUILDERS = {"gpt2": _of_bytes, "llama": _of_pieces, "t5": _of_characters}

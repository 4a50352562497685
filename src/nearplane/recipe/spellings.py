"""Translation of other tools' option names: GPTQModel, llm-compressor, auto-round and GPTQ. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any

from nearplane.errors import RecipeError
from nearplane.system.arguments import described


def translated_options(spellings: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return nearplane's names, which are `known`, and values for keywords in any supported spelling.

    Raises:
        RecipeError: A keyword is unknown, or contradicts another.
    """
    options: dict[str, Any] = {}
    for word, value in spellings.items():
        for name, meaning in _translated(word, value, known).items():
            if name in options and options[name] != meaning:
                raise RecipeError(
                    f"{word}={value!r} contradicts another keyword that already set {name}={options[name]!r}."
                )
            options[name] = meaning
    return options


def _translated(word: str, value: Any, known: Collection[str]) -> dict[str, Any]:
    """Return the fields and values that a keyword stands for: one of `known`, or another tool's name.

    Raises:
        RecipeError: The keyword is unknown, or its value is not supported.
    """
    meaning = SPELLINGS.get(word)
    if callable(meaning):
        try:
            return meaning(value)
        except (TypeError, AttributeError, RuntimeError) as error:  # a number or tensor in place of a list
            raise RecipeError(f"{word} is {described(value)}, which has the wrong type for this keyword.") from error
    name = meaning or word
    if name not in known:
        words = sorted({*known, *SPELLINGS} - {"two_sided"})  # which only records have
        similar = get_close_matches(word, words, n=3)
        offered = f"Did you mean {' or '.join(similar)}?" if similar else f"Expected one of {', '.join(words)}."
        raise RecipeError(f"{word} is not a keyword of quantize(). {offered}")
    return {name: value}


def _group_size(value: Any) -> dict[str, Any]:
    return {"group_size": None if value in (-1, 0, None, "none") else value}


ORDERS = {True: "activation", False: "natural", None: "natural"} | dict.fromkeys(
    ("static", "weight", "group", "dynamic"), "activation"
)


def _order(value: Any) -> dict[str, Any]:
    if value not in ORDERS:
        raise RecipeError(
            f"order {value!r} is not supported: expected one of {', '.join(map(repr, ORDERS))}, or use order=."
        )
    return {"order": ORDERS[value]}


def _static_groups(value: Any) -> dict[str, Any]:
    if not value:
        raise RecipeError("static_groups=False is not supported: steps are fitted before the sweep and again after it.")
    return {}


def _strategy(value: Any) -> dict[str, Any]:
    if value == "channel":
        return {"group_size": None}
    if value == "group":
        return {}
    raise RecipeError(f"strategy={value!r} is not supported: use 'group' with group_size, or 'channel'.")


PRESETS: Mapping[str, dict[str, Any]] = {  # of llm-compressor, beside W2A16 to W8A16
    "W8A8": {"grid": "int8", "activations": "int8"},
    "INT8": {"grid": "int8", "activations": "int8"},
    "FP8_DYNAMIC": {"grid": "fp8", "activations": "fp8"},
    "FP8_BLOCK": {"grid": "fp8-block", "activations": "fp8"},
    "NVFP4": {"grid": "nvfp4", "activations": "fp4"},
    "NVFP4A16": {"grid": "nvfp4"},
    "MXFP4": {"grid": "mxfp4", "activations": "fp4"},
    "MXFP4A16": {"grid": "mxfp4"},
    "MXFP8": {"grid": "mxfp8", "activations": "fp8"},
    "MXFP8A16": {"grid": "mxfp8"},
}


def _scheme(value: Any) -> dict[str, Any]:
    name = str(value).upper()
    if name in PRESETS:
        return PRESETS[name]
    if match := re.fullmatch(r"W([2-8])A16(_ASYM)?", name):
        return {"bits": int(match[1]), "symmetric": match[2] is None}
    if name == "FP8":
        raise RecipeError(
            f"scheme={value!r} is not supported: it has one step for a whole matrix, and one for all activations of a layer. Use "
            f"FP8_DYNAMIC, which has a step for every row and token."
        )
    raise RecipeError(
        f"scheme={value!r} is not supported: expected {', '.join(PRESETS)}, W2A16 to W8A16, or with zero points W2A16_ASYM to "
        f"W8A16_ASYM."
    )


def _observer(value: Any) -> dict[str, Any]:
    meanings = {"minmax": "minmax", "memoryless_minmax": "minmax", "mse": "mse", "memoryless_mse": "mse"}
    if value not in meanings:
        raise RecipeError(f"observer={value!r} is not supported: expected one of {', '.join(meanings)}.")
    return {"scale": meanings[value]}


def _ignored(value: Any) -> dict[str, Any]:
    """Translate llm-compressor's list of names, or of regular expressions with the prefix "re:"."""
    patterns = [value] if isinstance(value, str) else list(value or ())
    return {"ignore": tuple(p.removeprefix("re:") for p in patterns)}


def _dynamic(value: Any) -> dict[str, Any]:
    if any(not key.startswith("-:") for key in value):
        raise RecipeError("dynamic supports only '-:regex', which leaves layers unquantized. Use ignore=.")
    return {"ignore": tuple(key.removeprefix("-:") for key in value)}


SPELLINGS: Mapping[str, str | Callable[[Any], dict[str, Any]]] = {
    "w_bit": "bits",
    "wbits": "bits",
    "num_bits": "bits",
    "weight_bit_width": "bits",
    "scheme": _scheme,
    "group_size": _group_size,
    "groupsize": _group_size,
    "weight_group_size": _group_size,
    "strategy": _strategy,
    "sym": "symmetric",
    "desc_act": _order,
    "act_order": _order,
    "actorder": _order,
    "damp_percent": "damp",
    "dampening_frac": "damp",
    "percdamp": "damp",
    "static_groups": _static_groups,
    "mse": lambda value: {"scale": "mse" if value else "minmax"},
    "observer": _observer,
    "nsamples": "samples",
    "num_calibration_samples": "samples",
    "num_samples": "samples",
    "max_seq_length": "seqlen",
    "model_seqlen": "seqlen",
    "sequence_length": "seqlen",
    "bpw": "rate",
    "target_rate": "rate",
    "target_bpw": "rate",
    "dataset": "calibration",
    "calibration_dataset": "calibration",
    "ignore": _ignored,
    "ignore_layers": _ignored,
    "dynamic": _dynamic,
    "checkpoint_format": "format",
}

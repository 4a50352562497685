"""Layers that stay unquantized, as names and patterns for readers, and models that are not supported.

Readers treat every linear layer as quantized unless config.json lists it as ignored. They look names up in the network
that they build, or among the stored tensors; where the two differ, both are listed. Whole parts are patterns, "re:...".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from posixpath import commonpath

import transformers

from nearplane.errors import RecipeError
from nearplane.models.kinds import has_head
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.models.structure import NOT_HANDLED, dots
from nearplane.system.patterns import has_match

MAX_SUGGESTIONS = 3  # similar names that an error lists
# ends of the names of transformers classes that do not predict the next token
OTHER_HEADS = re.compile(r"For(?!CausalLM$|ConditionalGeneration$)[A-Z]\w+$")


def refuse_unmatched(model: Model, patterns: Sequence[str], option: str = "--ignore") -> None:
    """Refuse a pattern that matches no name: the option would silently have no effect.

    For --ignore, the names are those of all modules with weights and of stored tensors that the network does not use;
    for other options, those of the quantized layers.

    Args:
        model: The model with the names.
        patterns: Regular expressions, as in `find_layers`.
        option: Name of the option in the message.

    Raises:
        RecipeError: A pattern matches no name; the message lists similar names.
    """
    names = _names(model) if option == "--ignore" else [layer.name for layer in model.layers]
    for pattern in patterns:
        if any(has_match(pattern, name) for name in names):
            continue
        parts = dict.fromkeys(part for name in names for part in (*name.split("."), name))
        similar = get_close_matches(re.sub(r"[\\^$]", "", pattern), parts, n=MAX_SUGGESTIONS, cutoff=0.5)
        suggestions = f"Similar names: {', '.join(similar)}. " if similar else ""
        raise RecipeError(
            f"{option} {pattern} matches no layer of {model.folder}. {suggestions}Expected a regular expression that is "
            f"found in a full name such as {model.layers[0].name if model.layers else names[0]}."
        )


def _names(model: Model) -> list[str]:
    """Return the names of all modules and tensors with weights, in the order of the network."""
    modules = (name for name, module in model.network.named_modules() if [*module.parameters(recurse=False)])
    stored = (name.rpartition(".")[0] or name for name in model.reader.names())
    experts = (layer.name for layer in model.layers if layer.routed)
    return list(dict.fromkeys([*modules, *stored, *experts, *model.ignored]))


def pattern_of(block: str, layer: str) -> str:
    """Return a pattern for --ignore that matches a layer, and layers of any block that differ only in numbers.

    >>> pattern_of("model.layers.0", "model.layers.0.mlp.experts.3.up_proj")
    'mlp\\\\.experts\\\\.[0-9]+\\\\.up_proj$'
    """
    return rf"{re.sub(r'[0-9]+', '[0-9]+', re.escape(layer.removeprefix(f'{block}.')))}$"


def unquantized_patterns(model: Model, layers: Sequence[Layer]) -> list[str]:
    """Return names and patterns of everything unquantized that a reader might take for a linear layer.

    These are all modules that are or inherit from Linear, Conv1D and Conv2d, experts in one tensor or stored one by
    one, and stored parts that transformers does not build but other readers do.

    Args:
        model: The original model.
        layers: The quantized layers.
    """
    quantized = {layer.name for layer in layers}
    names = set(model.matrices()) - quantized
    stored_alone = (f"{name}.weight" for name in names if model.weights.stored_alone(f"{name}.weight"))
    names |= {model.weights.source_name(parameter).removesuffix(".weight") for parameter in stored_alone}
    left = {*model.ignored, *(name for name, _ in model.skipped)}
    parts = {*(model.stacked() & left), *model.unbuilt, *map(_stem, model.weights.merged().values())}
    written = quantized | {layer.written(model.weights) for layer in layers if layer.routed}
    prefixes = {name[:place] for name in written for place in dots(name)}
    return sorted(names) + [rf"re:^{re.escape(part)}(\..*)?$" for part in sorted(parts - prefixes - quantized)]


def merged_experts(model: Model, layers: Sequence[Layer]) -> list[str]:
    """Return the unquantized modules that transformers merges from tensors `*.weight`, one per expert.

    transformers' reader of compressed-tensors decodes these tensors before merging, and drops unpacked ones unless the
    scheme of the experts is one of eight-bit floats: "weights that ship no scale pass through untouched".
    """
    quantized = {layer.parameter for layer in layers}
    merged = {name: parts for name, parts in model.weights.merged().items() if name not in quantized}
    weights = {name.rpartition(".")[0] for name, parts in merged.items() if all(p.endswith(".weight") for p in parts)}
    return sorted(weights)


def _stem(names: Iterable[str]) -> str:
    """Return the innermost module that contains all names."""
    return commonpath(name.replace(".", "/") for name in names).replace("/", ".")


def refuse_unsupported(model: Model) -> None:
    """Refuse a model without layers to quantize, and a model made for another task than predicting tokens.

    Raises:
        RecipeError: The message names the architecture, and the type of module that is not supported.
    """
    kind = type(model.network).__name__
    if not has_head(model.network) and getattr(model.config, "is_encoder_decoder", False):
        raise RecipeError(
            f"The architecture {kind} is not supported: an encoder with a decoder needs its head, which determines "
            f"the decoder's input. Pass the model saved with its head, for conditional generation."
        )
    for architecture in getattr(model.config, "architectures", None) or ():
        if architecture != kind and OTHER_HEADS.search(architecture) and hasattr(transformers, architecture):
            raise RecipeError(
                f"The architecture {architecture} is not supported because it does not predict the next token (transformers "
                f"would build {kind} from it). Pass a causal language model, or an encoder saved without a head."
            )
    if model.layers:
        return
    if left := [(name, reason) for name, reason in model.skipped if reason.endswith(NOT_HANDLED)]:
        name, reason = left[0]
        raise RecipeError(
            f"The architecture {kind} is not supported: its matrices have the type {reason.split()[0]} (for example {name}); "
            f"nearplane handles Linear, Conv1D and Conv2d. Use another model, or another tool for this one."
        )
    raise RecipeError(
        f"Nothing to quantize: --ignore leaves out all {len(model.ignored)} matrices of {kind}. Use fewer patterns."
    )

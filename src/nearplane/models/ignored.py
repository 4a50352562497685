"""What of a model is not quantized: patterns of layers to leave as they are, and models of which nothing can be.

Readers quantize every linear layer that config.json does not name as left alone. They look names up in the network that they
build, or among the tensors of the file; where the two differ both are given. Whole parts are given as patterns, "re:...".
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

NEAR = 3  # names that an error offers
# of classes of transformers that continue no text
HEADS = re.compile(r"For(?!CausalLM$|ConditionalGeneration$)[A-Z]\w+$")


def refuse_unmatched(model: Model, patterns: Sequence[str], option: str = "--ignore") -> None:
    """Refuse a pattern that is found in no name: whoever gave it believes that something stays as it is, or is treated otherwise.

    Names are those of modules with weights of their own, quantized or not, and of tensors that the network does not build; for
    other options than --ignore those of layers that are quantized.

    Args:
        model: what they are to be found in.
        patterns: regular expressions, as `find_layers` takes them.
        option: that they were given with.

    Raises:
        RecipeError: names the pattern, and names that are like it.
    """
    names = _names(model) if option == "--ignore" else [layer.name for layer in model.layers]
    for pattern in patterns:
        if any(re.search(pattern, name) for name in names):
            continue
        parts = dict.fromkeys(part for name in names for part in (*name.split("."), name))
        near = get_close_matches(re.sub(r"[\\^$]", "", pattern), parts, n=NEAR, cutoff=0.5)
        offered = f"Names like it: {', '.join(near)}. " if near else ""
        raise RecipeError(
            f"{option} {pattern} is found in the name of no layer of {model.folder}. {offered}Expected a regular expression "
            f"that is found in a full name such as {model.layers[0].name if model.layers else names[0]}; or leave it out."
        )


def _names(model: Model) -> list[str]:
    """Return the names of all that has weights, in the order of the network."""
    modules = (name for name, module in model.network.named_modules() if [*module.parameters(recurse=False)])
    stored = (name.rpartition(".")[0] or name for name in model.reader.names())
    experts = (layer.name for layer in model.layers if layer.routed)
    return list(dict.fromkeys([*modules, *stored, *experts, *model.ignored]))


def pattern_of(block: str, layer: str) -> str:
    """Return a pattern for --ignore of a layer and of those that differ from it by numbers alone, in its block and others.

    >>> pattern_of("model.layers.0", "model.layers.0.mlp.experts.3.up_proj")
    'mlp\\\\.experts\\\\.[0-9]+\\\\.up_proj$'
    """
    return rf"{re.sub(r'[0-9]+', '[0-9]+', re.escape(layer.removeprefix(f'{block}.')))}$"


def left_dense(model: Model, layers: Sequence[Layer]) -> list[str]:
    """Return names and patterns of all that is not quantized and that a reader might take for a linear layer.

    That is every Linear, Conv1D and Conv2d and what inherits from them, experts in one tensor or stored one by one, and
    parts of the checkpoint that transformers does not build: other readers build them.

    Args:
        model: the original.
        layers: what is quantized.
    """
    quantized = {layer.name for layer in layers}
    names = set(model.matrices()) - quantized
    alone = (f"{name}.weight" for name in names if model.weights.stored_alone(f"{name}.weight"))
    names |= {model.weights.source_name(parameter).removesuffix(".weight") for parameter in alone}
    left = {*model.ignored, *(name for name, _ in model.skipped)}
    parts = {*(model.stacked() & left), *model.unbuilt, *map(_stem, model.weights.merged().values())}
    both = quantized | {layer.written(model.weights) for layer in layers if layer.routed}
    holding = {name[:place] for name in both for place in dots(name)}
    return sorted(names) + [rf"re:^{re.escape(part)}(\..*)?$" for part in sorted(parts - holding - quantized)]


def merged_experts(model: Model, layers: Sequence[Layer]) -> list[str]:
    """Return the names of modules left alone that transformers puts together from tensors `*.weight`, one for each expert.

    Its reader of compressed-tensors then decodes these tensors first, and drops those that are not packed unless the scheme of
    the experts is one of eight-bit floats: "weights that ship no scale pass through untouched".
    """
    quantized = {layer.parameter for layer in layers}
    merged = {name: parts for name, parts in model.weights.merged().items() if name not in quantized}
    weights = {name.rpartition(".")[0] for name, parts in merged.items() if all(p.endswith(".weight") for p in parts)}
    return sorted(weights)


def _stem(names: Iterable[str]) -> str:
    """Return the module that all names lie in."""
    return commonpath(name.replace(".", "/") for name in names).replace("/", ".")


def refuse_unsupported(model: Model) -> None:
    """Refuse a model with nothing to quantize, and one that was made for something else than to continue text.

    Raises:
        RecipeError: names the architecture, and the type of module that is not handled.
    """
    kind = type(model.network).__name__
    if not has_head(model.network) and getattr(model.config, "is_encoder_decoder", False):
        raise RecipeError(
            f"The architecture {kind} is not supported: it has an encoder and a decoder and no head, so it is not known what the "
            f"decoder is given. Pass it as it was saved with its head, for conditional generation."
        )
    for made in getattr(model.config, "architectures", None) or ():
        if made != kind and HEADS.search(made) and hasattr(transformers, made):
            raise RecipeError(
                f"The architecture {made} is not supported: it does not predict the next token, as nearplane expects of a model. "
                f"transformers would build {kind} of it. Pass a causal language model, or an encoder saved without a head."
            )
    if model.layers:
        return
    if left := [(name, reason) for name, reason in model.skipped if reason.endswith(NOT_HANDLED)]:
        name, reason = left[0]
        raise RecipeError(
            f"The architecture {kind} is not supported: its matrices are of the type {reason.split()[0]} (as {name}), which is not "
            f"handled; Linear, Conv1D and Conv2d are. Use another model, or another tool for this one."
        )
    raise RecipeError(
        f"Nothing to quantize: --ignore leaves out all {len(model.ignored)} matrices of {kind}. Leave out fewer."
    )

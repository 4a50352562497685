"""Patterns of layers to leave as they are, or to treat otherwise: which of them name nothing that a model has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

from nearplane.errors import RecipeError
from nearplane.models.model import Model

NEAR = 3  # names that an error offers


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
    modules = [
        name
        for name, module in model.network.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    stored = (name.rpartition(".")[0] or name for name in model.reader.names())
    experts = (layer.name for layer in model.layers if layer.routed)
    return list(dict.fromkeys([*modules, *stored, *experts, *model.ignored]))


def pattern_of(block: str, layer: str) -> str:
    """Return a pattern for --ignore of a layer and of those that differ from it by numbers alone, in its block and others.

    >>> pattern_of("model.layers.0", "model.layers.0.mlp.experts.3.up_proj")
    'mlp\\\\.experts\\\\.[0-9]+\\\\.up_proj$'
    """
    return rf"{re.sub(r'[0-9]+', '[0-9]+', re.escape(layer.removeprefix(f'{block}.')))}$"

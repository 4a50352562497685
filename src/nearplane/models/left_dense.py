"""What of a model is not quantized, by the names under which readers of config.json look for it.

Readers quantize every linear layer that config.json does not name as left alone. They look names up in the network that they
build, or among the tensors of the file; where the two differ both are given. Whole parts are given as patterns, "re:...".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from nearplane.errors import ModelError
from nearplane.models.layers import Layer
from nearplane.models.model import Model


def left_dense(model: Model, layers: Sequence[Layer] | None = None) -> list[str]:
    """Return names and patterns of all that is not quantized and that a reader might take for a linear layer.

    That is every Linear, Conv1D and Conv2d and what inherits from them, experts in one tensor or stored one by one, and
    parts of the checkpoint that transformers does not build: other readers build them.

    Args:
        model: the original.
        layers: what is quantized, if that is not all that can be.
    """
    layers = model.layers if layers is None else layers
    quantized = {layer.name for layer in layers}
    names = set(model.matrices()) - quantized
    names |= {stored for name in names if (stored := _stored(model, name)) is not None}
    parts = {*experts(model), *model.unbuilt, *(_stem(names) for names in model.weights.merged().values())}
    both = quantized | {model.written_name(layer) for layer in layers if layer.routed}
    holding = {name[:place] for name in both for place, letter in enumerate(name) if letter == "."}
    return sorted(names) + [_pattern(part) for part in sorted(parts - holding - quantized)]


def experts(model: Model) -> list[str]:
    """Return the names of modules that hold several matrices in one parameter and are not quantized."""
    left = {name for name, _ in model.skipped} | set(model.ignored)
    return sorted(name for name in left if name in model.stacked())


def merged_experts(model: Model, layers: Sequence[Layer] | None = None) -> list[str]:
    """Return the names of modules left alone that transformers puts together from tensors `*.weight`, one for each expert.

    Its reader of compressed-tensors then decodes these tensors first, and drops those that are not packed unless the scheme of
    the experts is one of eight-bit floats: "weights that ship no scale pass through untouched".
    """
    quantized = {layer.parameter for layer in (model.layers if layers is None else layers)}
    merged = {name: parts for name, parts in model.weights.merged().items() if name not in quantized}
    weights = {name.rpartition(".")[0] for name, parts in merged.items() if all(p.endswith(".weight") for p in parts)}
    return sorted(weights)


def _stored(model: Model, name: str) -> str | None:
    """Return the name of a module in the checkpoint, None if its weight is not stored as one tensor."""
    try:
        return model.source_name(f"{name}.weight").removesuffix(".weight")
    except ModelError:
        return None


def _stem(names: Iterable[str]) -> str:
    """Return the module that all names lie in."""
    shared: list[str] = []
    for parts in zip(*(name.split(".") for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _pattern(part: str) -> str:
    """Return a pattern of a module and all below it."""
    return rf"re:^{re.escape(part)}(\..*)?$"

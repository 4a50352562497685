"""What the network that config.json describes expects of a checkpoint's matrices."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D


def stored_transposed(model: nn.Module) -> set[str]:
    """Return the names of the weights that are stored as (in, out), with and without the prefix of the base model."""
    names = {f"{name}.weight" for name, module in model.named_modules() if type(module) is Conv1D}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return names | {name.removeprefix(prefix) for name in names}


def weight_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, with and without the base model's prefix; of matrices always (out, in)."""
    transposed, prefix = stored_transposed(model), f"{getattr(model, 'base_model_prefix', '')}."
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shape = tuple(parameter.shape)
        shapes[name] = shapes[name.removeprefix(prefix)] = shape[::-1] if name in transposed else shape
    return shapes

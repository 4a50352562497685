"""Layers of a checkpoint whose inputs runtimes round, in a network of decoded weights that is to compute as they do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel

from nearplane.errors import FormatError, RecipeError
from nearplane.formats.stored import Stored, quantization_of
from nearplane.lattice.rounded_inputs import rounded
from nearplane.loading.dense_network import stacked_matrices
from nearplane.models.conversion import renamed
from nearplane.models.experts import make_observable
from nearplane.models.layers import Layer, as_layer

RoundedLayers = dict[Layer, Callable[[Tensor], Tensor]]  # views of layers, and what they multiply instead of an input


def rounded_layers(network: PreTrainedModel, folder: Path) -> RoundedLayers:
    """Return the layers of a checkpoint whose inputs runtimes round, as views of its network.

    Args:
        network: The network, which may be without weights.
        folder: The folder of the checkpoint.

    Raises:
        RecipeError: The config asks for no rounding.
        FormatError: The config asks for a rounding that nearplane does not know, or names a layer that the network lacks.
    """
    found = RoundedLayers()
    stored = None if quantization_of(folder) is None else Stored(folder)
    views = {layer.name: layer for layers in stacked_matrices(network).values() for layer in layers}
    views |= {name: layer for name, module in network.named_modules() if (layer := as_layer(name, module)) is not None}
    prefix, names = f"{network.base_model_prefix}.", [] if stored is None else stored.names()
    in_network = renamed(network, (f"{name}.weight" for name in names))
    for name in names:
        if stored is None or (inputs := stored.inputs(name)) is None:
            continue
        own = in_network[f"{name}.weight"].removesuffix(".weight")
        layer = views.get(own) or views.get(own.removeprefix(prefix)) or views.get(f"{prefix}{own}")
        if layer is None:
            raise FormatError(
                f"{folder}: {type(network).__name__} has no layer {name}, whose inputs are to be rounded. Fetch the folder again."
            )
        how, scale = inputs
        found[layer] = partial(rounded, how=how, global_scale=scale)
    if not found:
        raise RecipeError(
            f"{folder} says nothing of activations, so runtimes do not round them. Leave out --activations, or quantize with it."
        )
    return found


def round_inputs(layers: RoundedLayers, root: nn.Module, prefix: str = "") -> ExitStack:
    """Let layers multiply rounded inputs until the returned stack is closed.

    Args:
        layers: The layers, of which some lie in `root`.
        root: A network or a part of one; its experts stay observable.
        prefix: Name of that part with a dot at the end.
    """
    inside = {layer: change for layer, change in layers.items() if layer.parameter.startswith(prefix)}
    if any(layer.routed for layer in inside):
        make_observable(root)
    hooks = ExitStack()
    for layer, change in inside.items():
        hooks.enter_context(layer.under(root, prefix).replacing(change))
    return hooks

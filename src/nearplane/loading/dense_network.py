"""The network that config.json describes: what it expects of a checkpoint's matrices, and itself with every weight decoded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D

from nearplane.formats.stored import Stack, quantization_of, read_dense, reader_of
from nearplane.models.conversion import Names, names_apart, patterns_apart
from nearplane.models.experts import ExpertLayer, is_stack, stacked_layers
from nearplane.models.pretrained import empty_network, network_of
from nearplane.system.fp8_mxfp4 import WidenedReader


def stored_transposed(model: nn.Module) -> set[str]:
    """Return the names of the weights that are stored as (in, out), with and without the prefix of the base model."""
    names = {f"{name}.weight" for name, module in model.named_modules() if type(module) is Conv1D}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return names | {name.removeprefix(prefix) for name in names}


def weight_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, with and without the base model's prefix; of matrices always (out, in).

    Also those of the matrices of experts, by the names that they have as layers.
    """
    transposed, prefix = stored_transposed(model), f"{getattr(model, 'base_model_prefix', '')}."
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shape = tuple(parameter.shape)
        shapes[name] = shapes[name.removeprefix(prefix)] = shape[::-1] if name in transposed else shape
    for layers in stacked_matrices(model).values():
        shapes |= {f"{layer.name}.weight": layer.shape for layer in layers}
    return shapes


def stacked_matrices(model: nn.Module) -> dict[str, list[ExpertLayer]]:
    """Return the matrices in every parameter that holds those of several experts, in order, as views of its module."""
    conversions = get_model_conversion_mapping(model) if isinstance(model, PreTrainedModel) else []

    def names(parameter: str, parts: int, experts: int) -> Names:
        found = names_apart(conversions, parameter, parts, experts)
        return Names(layers=found, stored=found, sources=tuple(tuple((name,) for name in part) for part in found))

    stacks: dict[str, list[ExpertLayer]] = {}
    for path, module in model.named_modules():
        for layer in stacked_layers(path, module, names) if is_stack(module) else ():
            stacks.setdefault(layer.parameter, []).append(layer)
    return stacks


def stacks_of(model: nn.Module) -> dict[str, Stack]:
    """Return how the stacked parameters of a network are put together, of which transformers knows no matrices by name."""
    conversions = get_model_conversion_mapping(model) if isinstance(model, PreTrainedModel) else []
    return {
        parameter: Stack(
            shape=tuple(layers[0].weight.shape),
            names=tuple(layer.name for layer in layers),
            places=tuple((layer.expert, layer.outputs, layer.transposed) for layer in layers),
        )
        for parameter, layers in stacked_matrices(model).items()
        if patterns_apart(conversions, parameter) is None
    }


def decoded_tensors(folder: Path, empty: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (parameter name, tensor) of a folder as if it had never been quantized; see `read_dense`.

    Args:
        folder: quantized.
        empty: the network that its config.json describes.
    """
    return read_dense(folder, transposed=stored_transposed(empty), shapes=weight_shapes(empty), stacks=stacks_of(empty))


def dense_network(
    folder: Path, *, dtype: torch.dtype | str = torch.float32, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load the language model of a folder with every weight decoded; needs no package of the format's makers.

    Args:
        folder: quantized in a format that nearplane reads, or not quantized.
        dtype: of the weights; "auto" is that of config.json.
        trust_remote_code: run model code that comes with the checkpoint.

    Raises:
        FormatError: a layer is not what its format or config.json says.
        ModelError: transformers builds no such network, or a weight is missing.
    """
    reader = reader_of(folder)
    empty = empty_network(folder, trust_remote_code=trust_remote_code, reader=reader)
    if quantization_of(folder) is None:
        return network_of(folder, dtype=dtype, empty=empty, trust_remote_code=trust_remote_code)
    if isinstance(dtype, str):
        dtype = empty.dtype if dtype == "auto" else getattr(torch, dtype)
    if isinstance(reader, WidenedReader):
        wide = {name: tensor.to(dtype) for name in reader.names() for tensor in reader.read([name]).values()}
        return network_of(folder, dtype=dtype, weights=wide, empty=empty)
    weights = {
        name: values.to(dtype) if values.is_floating_point() else values
        for name, values in decoded_tensors(folder, empty)
    }
    return network_of(folder, dtype=dtype, weights=weights, empty=empty)

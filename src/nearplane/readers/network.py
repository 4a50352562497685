"""The network that config.json describes: what it expects of a checkpoint's matrices, and itself with every weight decoded."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from nearplane.formats.stored import quantization_of, read_dense, reader_of
from nearplane.pretrained import empty_network, network_of
from nearplane.widened import WidenedReader


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
    shapes = weight_shapes(empty)
    weights = {
        name: values.to(dtype) if values.is_floating_point() else values
        for name, values in read_dense(folder, transposed=stored_transposed(empty), shapes=shapes)
    }
    return network_of(folder, dtype=dtype, weights=weights, empty=empty)

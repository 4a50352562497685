"""A checkpoint in any format that nearplane reads, as an ordinary network: every weight decoded by our own readers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from nearplane.formats.network import stored_transposed, weight_shapes
from nearplane.formats.stored import quantization_of, read_dense
from nearplane.pretrained import empty_network, network_of


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
    empty = empty_network(folder, trust_remote_code=trust_remote_code)
    if quantization_of(folder) is None:
        return network_of(folder, dtype=dtype, empty=empty, trust_remote_code=trust_remote_code)
    if isinstance(dtype, str):
        dtype = empty.dtype if dtype == "auto" else getattr(torch, dtype)
    shapes = weight_shapes(empty)
    weights = {
        name: values.to(dtype) if values.is_floating_point() else values
        for name, values in read_dense(folder, transposed=stored_transposed(empty), shapes=shapes)
    }
    return network_of(folder, dtype=dtype, weights=weights, empty=empty)

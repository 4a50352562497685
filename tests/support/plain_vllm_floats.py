"""Layers in four- and eight-bit floats of vLLM by plain products, for processors on which its own kernels do not run.

vLLM's schemes make the parameters, and its loaders fill them from the file. Only the choice of a kernel, and the kernel itself,
are replaced: weights are decoded by the layout in which vLLM hands them to a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from plain_vllm_experts import E2M1

SCHEMES = "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_"
CHOICES = {  # module of a scheme: its function that chooses a kernel
    "w4a4_nvfp4": "init_nvfp4_linear_kernel",
    "w4a4_mxfp4": "init_mxfp4_linear_kernel",
    "w8a8_mxfp8": "init_mxfp8_linear_kernel",
    "w8a16_fp8": "init_wfp8_a16_linear_kernel",
}


class PlainFloats:
    """Decodes weights once, to float32, and multiplies in the dtype of the inputs, which are not rounded."""

    def input_quant_key(self) -> None:
        """Return how inputs are to be rounded before the layer: not at all."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Decode: levels times steps, which are numbers, powers of two, or numbers times a global scale."""
        weight, across = layer.weight.data, False
        if weight.dtype == torch.uint8:
            pairs = weight.int()
            nibbles = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)
            levels = E2M1[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
        else:
            across = getattr(layer.weight, "input_dim", 1) == 0  # (in, out): steps of rows
            levels = weight.t().float() if across else weight.float()
        scale = getattr(layer, "weight_scale_inv", None)  # of tiles
        steps = (layer.weight_scale if scale is None else scale).data
        steps = torch.exp2(steps.float() - 127) if steps.dtype == torch.uint8 else steps.float()
        if hasattr(layer, "weight_global_scale"):
            steps = steps * layer.weight_global_scale.data  # which vLLM has inverted
        rows, columns = levels.shape[0] // steps.shape[0], levels.shape[1] // steps.shape[1]
        layer.plain = levels * steps.repeat_interleave(rows, 0).repeat_interleave(columns, 1)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply."""
        return linear(x, layer.plain.to(x.dtype), bias)


@contextmanager
def plain_floats() -> Iterator[None]:
    """Put the plain products in place of vLLM's kernels."""

    def chosen(*_: Any, **__: Any) -> PlainFloats:
        return PlainFloats()

    with ExitStack() as patches:
        for module, name in CHOICES.items():
            patches.enter_context(mock.patch(f"{SCHEMES}{module}.{name}", chosen))
        yield

"""Kernels for vLLM of plain products, for processors on which its own do not run, or overflow.

vLLM's parameters and loaders take the file, and weights are decoded as they were loaded. Only the kernels are replaced, by
vLLM's own function for kernels from outside. A server finds them as a plugin: an entry point in vllm.general_plugins.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm.model_executor.kernels.linear import (
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
    MPLinearKernel,
    MPLinearLayerConfig,
    register_linear_kernel,
)
from vllm.platforms.interface import PlatformEnum

ENTRY = "[vllm.general_plugins]\nplain_kernels = plain_vllm_kernel:register\n"
REPLACED = "CPUWNA16LinearKernel,CPUInt8ScaledMMLinearKernel"


class PlainKernel(MPLinearKernel):
    """Packed integers: decodes weights once, to float32, and multiplies in the dtype of the inputs."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Decode: `scale * (code - zero)`, where codes lie densely in words along the inputs (weights) or outputs (zeros)."""
        weight, scale, zero = self._get_weight_params(layer)
        type, shape = self.config.weight_type, self.config.partition_weight_shape
        codes = unpacked(along_rows(weight), type.size_bits, shape[0])  # (out, in)
        scale = (scale.data if scale.output_dim == 0 else scale.data.t()).float()  # (out, groups)
        if self.config.zero_points:
            assert zero is not None
            zeros = unpacked(along_rows(zero), type.size_bits, shape[1]).t()  # (out, groups)
        else:
            zeros = torch.full_like(scale, type.bias)
        width = shape[0] // scale.shape[1]
        layer.plain = scale.repeat_interleave(width, 1) * (codes - zeros.repeat_interleave(width, 1))

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, layer.plain.to(x.dtype), bias)


class PlainInt8Kernel(Int8ScaledMMLinearKernel):
    """Weights and inputs of 8 bits: rounds each row of inputs by its largest, and sums exactly, in float64."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        return not c.is_static_input_scheme and c.input_symmetric, "only inputs that are rounded row by row"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        weight, scale, *_ = self._get_layer_params(layer)
        layer.plain = weight.data.float() * scale.data.float().view(-1, 1)  # (out, in)

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, scale, *_ = self._get_layer_params(layer)
        step = x.float().abs().amax(-1, keepdim=True) / 127  # as vLLM's own kernels
        codes = (x.float() / step).round()
        sums = linear(codes.double(), weight.data.double())
        product = (sums * step * scale.data.double().view(-1)).to(x.dtype)
        return product if bias is None else product + bias


def along_rows(parameter: Any) -> Tensor:
    """Return words of which each row holds codes that follow each other."""
    return parameter.data if parameter.packed_dim == 1 else parameter.data.t()


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Return `count` codes of each row of 32-bit words, the lowest bits first, as floats."""
    places = torch.arange(32, dtype=torch.int32)
    stream = (words.contiguous()[:, :, None] >> places & 1).flatten(1)[:, : count * bits]
    return (stream.view(len(words), count, bits) << places[:bits]).sum(-1).float()


def register() -> None:
    """Put the kernels in place of vLLM's for its CPU."""
    os.environ["VLLM_DISABLED_KERNELS"] = REPLACED
    register_linear_kernel(PlainKernel, PlatformEnum.CPU, "mp")
    register_linear_kernel(PlainInt8Kernel, PlatformEnum.CPU, "int8")


def save_plugin(folder: Path) -> Path:
    """Write what makes this file a plugin of a server whose PYTHONPATH has `folder`."""
    metadata = folder / "plain_vllm_kernel-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plain_vllm_kernel\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(ENTRY)
    return folder

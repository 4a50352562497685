"""Experts of vLLM by plain products, for processors on which its own kernels do not run.

vLLM's methods make the parameters, and its loaders fill them from the file. Only the choice of a kernel, what prepares weights
for it, and the kernel itself are replaced: weights are decoded by the layout in which vLLM's parameters hold them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from plain_vllm_kernel import unpacked

METHODS = {  # module in compressed_tensors_moe, its method, and the function that chooses a kernel
    "wna16": ("CompressedTensorsWNA16MoEMethod", "select_wna16_moe_backend"),
    "w4a4_nvfp4": ("CompressedTensorsW4A4Nvfp4MoEMethod", "select_nvfp4_moe_backend"),
    "w4a4_mxfp4": ("CompressedTensorsW4A4Mxfp4MoEMethod", "select_mxfp4_moe_backend"),
    "w8a8_mxfp8": ("CompressedTensorsW8A8Mxfp8MoEMethod", "select_mxfp8_moe_backend"),
    "w8a8_fp8": ("CompressedTensorsW8A8Fp8MoEMethod", "select_fp8_moe_backend"),
    "w8a8_int8": ("CompressedTensorsW8A8Int8MoEMethod", "select_int8_moe_backend"),
}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


class PlainExperts:
    """What stands for a kernel of experts."""

    @staticmethod
    def is_monolithic() -> bool:
        return False


def decoded(method: Any, layer: Any, which: str) -> Tensor:
    """Return the matrices of all experts (experts, out, in) in float32, as vLLM's parameters hold them."""
    part = {
        name.removeprefix(f"{which}_weight").strip("_"): parameter.data
        for name, parameter in layer.named_parameters()
        if name.startswith(f"{which}_weight")
    }
    scale = part["scale"]
    if "packed" in part and part["packed"].dtype == torch.int32:
        experts, out, _ = part["packed"].shape
        bits = method.num_bits
        columns = part["packed"].shape[2] * 32 // bits
        codes = unpacked(part["packed"].flatten(0, 1), bits, columns).view(experts, out, columns)
        zeros = torch.full(scale.shape, 2.0 ** (bits - 1))
        if "zero_point" in part:
            words = part["zero_point"].transpose(1, 2)  # (experts, groups, words)
            zeros = unpacked(words.flatten(0, 1), bits, out).view(experts, -1, out).transpose(1, 2)
        width = columns // scale.shape[2]
        return scale.float().repeat_interleave(width, 2) * (codes - zeros.repeat_interleave(width, 2))
    if "packed" in part:
        pairs = part["packed"].int()
        nibbles = torch.stack([pairs & 15, pairs >> 4], -1).flatten(2)
        levels = E2M1[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    else:
        levels = part[""].float()
    steps = scale.float() if scale.dtype != torch.uint8 else torch.exp2(scale.float() - 127)
    if "global_scale" in part:
        shared = part["global_scale"]
        if shared.dim() > 1:  # of gate and up, which have to be equal, as vLLM takes the first
            assert torch.equal(shared[:, 0], shared[:, 1])
            shared = shared[:, 0]
        steps = steps / shared.view(-1, 1, 1)
    rows, columns = levels.shape[1] // steps.shape[1], levels.shape[2] // steps.shape[2]
    return levels * steps.repeat_interleave(rows, 1).repeat_interleave(columns, 2)


def prepare(method: Any, layer: Any) -> None:
    """Decode the experts, in place of what prepares weights for a kernel."""
    layer.plain = {which: decoded(method, layer, which) for which in ("w13", "w2")}


def multiply(
    method: Any,
    layer: Any,
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    shared_experts: Any,
    shared_experts_input: Any,
) -> Tensor:
    """Return the sum over the experts of each token."""
    del method, shared_experts, shared_experts_input
    result = torch.zeros_like(x)
    for expert in range(len(layer.plain["w2"])):
        token, place = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = linear(x[token], layer.plain["w13"][expert].to(x.dtype)).chunk(2, -1)
        out = linear(silu(gate) * up, layer.plain["w2"][expert].to(x.dtype))
        result.index_add_(0, token, out * topk_weights[token, place, None].to(x.dtype))
    return result


@contextmanager
def plain_experts() -> Iterator[None]:
    """Let vLLM's methods for experts of compressed-tensors choose plain products in this context."""
    package = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"
    patches = []
    for name, (method, choice) in METHODS.items():
        module = import_module(f"{package}.compressed_tensors_moe_{name}")
        chosen = mock.Mock(return_value=(mock.Mock(), PlainExperts))
        patches.append(mock.patch.object(module, choice, chosen))
        patches += [
            mock.patch.object(getattr(module, method), "process_weights_after_loading", prepare),
            mock.patch.object(getattr(module, method), "apply", multiply),
            mock.patch.object(getattr(module, method), "get_fused_moe_quant_config", mock.Mock()),
        ]
    with ExitStack() as replaced:
        for each in patches:
            replaced.enter_context(each)
        yield

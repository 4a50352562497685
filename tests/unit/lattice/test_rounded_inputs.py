"""Rounding of inputs, against compressed-tensors' own simulation of it, bit for bit."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam

from nearplane.lattice.rounded_inputs import rounded
from nearplane.lattice.shared_grid import divisor_of
from nearplane.number_formats import E2M1, FP4_MX, FP4_NV, FP8_GROUP, FP8_MX, FP8_TOKEN, INT8_TOKEN

ARGUMENTS = {
    INT8_TOKEN: {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    FP8_TOKEN: {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    FP8_GROUP: {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
    FP8_MX: {
        "num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True, "scale_dtype": torch.uint8
    },
    FP4_MX: {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True, "scale_dtype": torch.uint8
    },
    FP4_NV: {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local",
        "scale_dtype": torch.float8_e4m3fn,
    },
}  # fmt: skip


def theirs(x, how, global_scale):
    """Return what compressed-tensors passes to the product, see `forward_quantize`."""
    args = QuantizationArgs(**ARGUMENTS[how])
    divisor = None if global_scale is None else torch.tensor([global_scale], dtype=torch.float32)
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity(), global_scale=divisor)
    return fake_quantize(x, scale, zero, args, global_scale=divisor)


@pytest.fixture
def inputs(generator):
    """Return (2, 40, 256) inputs of many magnitudes, with zeros, ties between numbers and outliers."""
    x = torch.randn(2, 40, 256, generator=generator) * 2.0 ** torch.randint(-20, 20, (2, 40, 1), generator=generator)
    x[0, 0] = 0
    x[0, 1, :128] = 0
    x[0, 2] = torch.arange(-128, 128) / 4  # every tie of E2M1, and of integers
    x[0, 3, ::7] *= 1000
    x[0, 4] = torch.arange(256) * 2.0**-140  # subnormal
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ARGUMENTS, ids=lambda how: f"{how.name}-{how.group}")
def test_inputs_are_rounded_as_compressed_tensors_does_it(inputs, how, dtype):
    x = inputs.to(dtype)
    scales = (
        [divisor_of(float(peak), E2M1[-1]) for peak in (x.abs().max(), x[1].abs().max())]
        if how.global_scale
        else [None]
    )
    for scale in scales:  # with the second one, some blocks lie outside
        ours = rounded(x, how, scale)
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs(x, how, scale))


@pytest.mark.parametrize("how", ARGUMENTS, ids=lambda how: f"{how.name}-{how.group}")
def test_tokens_are_rounded_alike_whatever_is_beside_them(inputs, how):
    """compressed-tensors takes one step for all tokens of a matrix of two dimensions; kernels and nearplane do not."""
    scale = divisor_of(1.0, E2M1[-1]) if how.global_scale else None
    whole = rounded(inputs, how, scale)
    assert torch.equal(rounded(inputs.view(-1, 256), how, scale), whole.view(-1, 256))
    assert torch.equal(rounded(inputs[1, 7:8], how, scale), whole[1, 7:8])


def test_the_global_scale_is_that_of_compressed_tensors_to_rounding(inputs):
    x = inputs[1]
    assert divisor_of(float(x.abs().max()), E2M1[-1]) == pytest.approx(
        float(generate_gparam(x.min(), x.max())), rel=2e-7
    )

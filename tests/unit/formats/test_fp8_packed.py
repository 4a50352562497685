"""FP8 in compressed-tensors: all levels, bytes as its own package reads them, and what is refused."""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme

from nearplane.errors import FormatError
from nearplane.formats.compressed_tensors import FORMAT
from nearplane.formats.fp8_packed import FP8Packed
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.number_formats import E4M3, FP8
from nearplane.lattice.scale import Steps

LAYOUT = FP8Packed()


@pytest.fixture
def matrix(generator):
    W = torch.randn(6, 253, generator=generator)
    grid = Steps(format=FP8, search="mse", storage=torch.bfloat16).grid(W)
    return QuantizedMatrix(codes=torch.arange(253).repeat(6, 1).int(), grid=grid)  # every level


def test_levels_are_all_finite_values_of_the_dtype():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert sorted(set(every[every.isfinite()].tolist())) == list(E4M3)


def test_all_codes_are_read_back_and_the_same_to_the_package(matrix):
    tensors = FORMAT.layers.pack("a", matrix, torch.bfloat16)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        "a.weight": ((6, 253), torch.float8_e4m3fn),
        "a.weight_scale": ((6, 1), torch.bfloat16),
    }
    assert {
        name: (t.shape, t.dtype) for name, t in FORMAT.layers.empty("a", (6, 253), FP8, torch.bfloat16).items()
    } == {name: (t.shape, t.dtype) for name, t in tensors.items()}
    assert FORMAT.layers.shape_of("a", tensors) == (6, 253)
    assert FORMAT.layers.parts(tensors) == {"a": ["a.weight_scale", "a.weight"]}
    assert FORMAT.layers.unpack("a", tensors, FP8).same_as(matrix)
    scheme = QuantizationScheme(targets=["Linear"], weights=LAYOUT.weights(FP8, "natural"), format=LAYOUT.FORMAT)
    named = {name.removeprefix("a."): tensor for name, tensor in tensors.items()}
    decoded = BaseCompressor.get_value_from_registry(LAYOUT.FORMAT).decompress(named, scheme)["weight"]
    assert torch.equal(decoded, matrix.decode().to(decoded.dtype))


def test_what_is_no_number_and_inexact_steps_are_refused(matrix):
    tensors = LAYOUT.pack("a", matrix, torch.bfloat16)
    tensors["a.weight"].view(torch.uint8)[2, 3] = 0x7F
    with pytest.raises(FormatError, match="a: a weight is not a number"):
        LAYOUT.unpack("a", tensors, FP8)
    parts = matrix.grid.parts | {"scale": matrix.grid.scale * 1.01}
    finer = QuantizedMatrix(codes=matrix.codes, grid=matrix.grid.with_parts(parts))
    with pytest.raises(FormatError, match="a step is not exact in"):
        LAYOUT.pack("a", finer, torch.bfloat16)
    with pytest.raises(FormatError, match=r"weights\.strategy is 'block', expected channel"):
        LAYOUT.number_format(LAYOUT.weights(FP8, "natural") | {"strategy": "block"})

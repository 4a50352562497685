"""8-bit floats in compressed-tensors: all levels, bytes as its own package reads them, and what is refused."""

from dataclasses import replace

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme

from nearplane.errors import FormatError
from nearplane.formats.compressed_tensors.compressed_tensors_format import FORMAT, packing_of
from nearplane.lattice.fits import FITS
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.scale import Steps
from nearplane.number_formats import E4M3, FP8, FP8_BLOCK, MXFP8

SCALES = {
    FP8: ((256, 1), torch.bfloat16), FP8_BLOCK: ((2, 3), torch.bfloat16), MXFP8: ((256, 12), torch.uint8),
}  # fmt: skip


@pytest.fixture(params=SCALES, ids=lambda format: format.name)
def format(request):
    return request.param


@pytest.fixture
def matrix(format, generator):
    W = torch.randn(256, 384, generator=generator)
    grid, _ = FITS[format.fit](W, W.new_ones(384), Steps(format=format, search="mse", storage=torch.bfloat16))
    return QuantizedMatrix(codes=(torch.arange(256 * 384) % 253).view(256, 384).int(), grid=grid)  # every level


def test_levels_are_all_finite_values_of_the_dtype():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert sorted(set(every[every.isfinite()].tolist())) == list(E4M3)


def test_all_codes_are_read_back_and_the_same_to_the_package(format, matrix):
    tensors = FORMAT.layers.pack("a", matrix, torch.bfloat16)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        "a.weight": ((256, 384), torch.float8_e4m3fn),
        "a.weight_scale": SCALES[format],
    }
    empty = FORMAT.layers.empty("a", (256, 384), format, torch.bfloat16)
    assert {name: (t.shape, t.dtype) for name, t in empty.items()} == {
        name: (t.shape, t.dtype) for name, t in tensors.items()
    }
    assert FORMAT.layers.shape_of("a", tensors) == (256, 384)
    assert FORMAT.layers.parts(tensors) == {"a": ["a.weight_scale", "a.weight"]}
    assert FORMAT.layers.unpack("a", tensors, format).same_as(matrix)
    layout = packing_of(format)
    scheme = QuantizationScheme(targets=["Linear"], weights=layout.weights(format, "natural"), format=layout.FORMAT)
    named = {name.removeprefix("a."): tensor for name, tensor in tensors.items()}
    decoded = BaseCompressor.get_value_from_registry(layout.FORMAT).decompress(named, scheme)["weight"]
    assert torch.equal(decoded, matrix.decode().to(decoded.dtype))


def test_the_config_names_the_number_format(format):
    layout = packing_of(format)
    assert layout.number_format(layout.weights(format, "natural")) is format
    with pytest.raises(
        FormatError, match=rf"weights\.strategy is 'tensor', expected {layout.weights(format, '')['strategy']}"
    ):
        layout.number_format(layout.weights(format, "natural") | {"strategy": "tensor"})


def test_what_is_no_number_and_inexact_steps_are_refused(format, matrix):
    layout = packing_of(format)
    tensors = layout.pack("a", matrix, torch.bfloat16)
    tensors["a.weight"].view(torch.uint8)[2, 3] = 0x7F
    with pytest.raises(FormatError, match="a: a weight is not a number"):
        layout.unpack("a", tensors, format)
    finer = replace(matrix, grid=replace(matrix.grid, scale=matrix.grid.scale * 1.01))
    with pytest.raises(FormatError, match=r"a step is not exact in|a step is not a power of two"):
        layout.pack("a", finer, torch.bfloat16)


def test_steps_that_differ_within_a_block_and_blocks_of_another_size_are_refused():
    layout = packing_of(FP8_BLOCK)
    W = torch.ones(128, 256)
    grid, _ = FITS["tiles"](W, W[0], Steps(format=FP8_BLOCK, search="minmax", storage=torch.bfloat16))
    matrix = QuantizedMatrix(codes=grid.round(W)[0].int(), grid=grid)
    tensors = layout.pack("a", matrix, torch.bfloat16)
    scale = grid.scale.clone()
    scale[5] *= 2
    with pytest.raises(FormatError, match="a: steps differ within 128 rows"):
        layout.pack("a", replace(matrix, grid=replace(grid, scale=scale)), torch.bfloat16)
    with pytest.raises(FormatError, match="a is 100 x 256, expected multiples of 128 and 128"):
        layout.unpack("a", tensors | {"a.weight": tensors["a.weight"][:100]}, FP8_BLOCK)
    with pytest.raises(FormatError, match=r"weights\.block_structure is \[64, 128\], expected \(128, 128\)"):
        layout.number_format(layout.weights(FP8_BLOCK, "natural") | {"block_structure": [64, 128]})

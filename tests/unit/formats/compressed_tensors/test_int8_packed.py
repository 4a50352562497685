"""INT8 with inputs in INT8 in compressed-tensors, and what its config says of inputs for every number format."""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

from checkpoints import random_matrix
from nearplane.errors import FormatError
from nearplane.formats.compressed_tensors.compressed_tensors_format import FORMAT
from nearplane.formats.compressed_tensors.int8_packed import Int8Packed
from nearplane.formats.layer_format import Quantized
from nearplane.number_formats import number_format
from nearplane.recipe.schemes import GridScheme

PRESETS = {"int8": "INT8", "fp8": "FP8_DYNAMIC", "nvfp4": "NVFP4", "mxfp4": "MXFP4"}


def config(grid, activations):
    network = Quantized(
        scheme=GridScheme(grid=grid), quantized=["a"], rounded=["a"] if activations != "none" else [], version="0"
    )
    return FORMAT.layers.describe(network)


def test_all_codes_are_read_back_and_the_same_to_the_package():
    matrix = random_matrix(40, 64, bits=8, group_size=None, symmetric=True)
    layers = FORMAT.layers.configured(config("int8", "int8"))
    tensors = layers.pack("a", matrix, torch.float16)
    assert layers.shape_of("a", tensors) == (40, 64)
    assert FORMAT.layers.unpack("a", tensors, number_format("int8")).same_as(matrix)
    empty = layers.empty("a", (40, 64), number_format("int8"), torch.float16)
    assert {n: (t.shape, t.dtype) for n, t in empty.items()} == {n: (t.shape, t.dtype) for n, t in tensors.items()}
    scheme = QuantizationScheme(targets=["Linear"], weights=Int8Packed().weights(number_format("int8"), "natural"))
    named = {name.removeprefix("a."): tensor for name, tensor in tensors.items()}
    decoded = BaseCompressor.get_value_from_registry("int-quantized").decompress(named, scheme)["weight"]
    assert torch.equal(decoded, matrix.decode().half())


def test_other_integers_are_not_packed():
    for bits, group_size in ((4, None), (8, 32)):
        matrix = random_matrix(4, 64, bits=bits, group_size=group_size, symmetric=True)
        with pytest.raises(FormatError, match="symmetric codes of 8 bits with one step for a row"):
            Int8Packed().pack("a", matrix, torch.float16)


@pytest.mark.parametrize("grid", PRESETS)
def test_the_config_asks_for_the_rounding_of_the_package_s_own_scheme(grid):
    format = number_format(grid)
    written = config(grid, format.inputs.name)
    assert FORMAT.layers.grid_of(written, "a") == format
    assert FORMAT.layers.inputs_of(written, "a") == format.inputs
    assert FORMAT.layers.inputs_of(config(grid, "none"), "a") is None
    group = {name: x for name, x in written["config_groups"]["group_0"].items() if name != "format"}
    ours, preset = QuantizationScheme(**group), preset_name_to_scheme(PRESETS[grid], ["Linear"])
    for field in ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "scale_dtype"):
        assert getattr(ours.input_activations, field) == getattr(preset.input_activations, field), field


@pytest.mark.parametrize(
    ("grid", "changes", "said"),
    [
        ("int8", {"type": "float"}, r"input_activations\.type is 'float', expected int"),
        ("fp8", {"dynamic": False, "strategy": "tensor"}, r"input_activations\.strategy is 'tensor', expected token"),
        ("nvfp4", {"dynamic": True}, r"input_activations\.dynamic is True, expected local"),
        ("mxfp4", {"num_bits": 8}, r"input_activations\.num_bits is 8, expected 4"),
        ("mxfp4", {"group_size": 16}, r"input_activations\.group_size is 16, expected 32"),
    ],
)
def test_other_roundings_are_refused_by_name(grid, changes, said):
    written = config(grid, number_format(grid).inputs.name)
    written["config_groups"]["group_0"]["input_activations"] |= changes
    with pytest.raises(FormatError, match=said):
        FORMAT.layers.grid_of(written, "a")


def test_inputs_of_weights_that_no_reader_multiplies_with_them_are_refused():
    written = config("int8", "int8")
    weights = written["config_groups"]["group_0"]["weights"] | {"num_bits": 4}
    written["config_groups"]["group_0"] |= {"weights": weights, "format": "pack-quantized"}
    with pytest.raises(FormatError, match=r"input_activations is .*, expected None for such weights"):
        FORMAT.layers.grid_of(written | {"format": "pack-quantized"}, "a")

"""Formats that pack on a GPU write the tensors of the CPU there, and read them back."""

import pytest
import torch

from nearplane.formats.compressed_tensors.compressed_tensors_format import CompressedTensors
from nearplane.formats.table import FORMATS
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.shared_grid import SharedGrid
from nearplane.number_formats import NVFP4, integers
from pretended import pretended

OUT, COLUMNS = 32, 96
CASES = [
    *((FORMATS["compressed-tensors"].layers, integers(bits, 32)) for bits in range(2, 9)),
    (FORMATS["compressed-tensors"].layers, integers(4, None)),
    (FORMATS["compressed-tensors"].layers, NVFP4),
    (CompressedTensors(rounds_inputs=True), integers(8, None)),
    (FORMATS["gptq"].layers, integers(3, 32)),
    (FORMATS["gptq_v2"].layers, integers(4, 16, symmetric=False)),
]


def matrix_of(format, generator):
    """Return a random matrix in a number format, with steps that every file holds."""
    groups = format.groups(COLUMNS)
    group = torch.arange(COLUMNS) // (COLUMNS // groups)
    codes = torch.randint(format.low, format.high + 1, (OUT, COLUMNS), dtype=torch.int32, generator=generator)
    if format is NVFP4:
        block = torch.randint(1, 400, (OUT, groups), generator=generator).float().to(torch.float8_e4m3fn).float()
        levels = torch.tensor(format.levels, dtype=torch.float64)
        grid = SharedGrid(block=block, divisor=3.75, group=group, low=format.low, high=format.high, levels=levels)
        return QuantizedMatrix(codes=codes, grid=grid)
    scale = (torch.rand(OUT, groups, generator=generator) + 0.1).half().float()
    zero = torch.zeros(OUT, groups)
    if not format.symmetric:
        zero = torch.randint(format.low, format.high + 1, (OUT, groups), generator=generator).float()
    return QuantizedMatrix(
        codes=codes, grid=Grid(scale=scale, zero=zero, group=group, low=format.low, high=format.high)
    )


@pytest.mark.parametrize(("layers", "format"), CASES, ids=lambda value: getattr(value, "name", type(value).__name__))
def test_a_gpu_packs_the_bytes_of_the_cpu_and_reads_them_back(layers, format, generator):
    matrix = matrix_of(format, generator)
    expected = layers.pack("layer", matrix, torch.float16)
    with pretended() as gpu:
        there = matrix.to("pretend:0")
        changed = there.codes.clone()
        changed[0, 0] = format.high if int(matrix.codes[0, 0]) < format.high else format.low
        assert layers.packs_on_device(there)
        gpu.forget()
        packed = layers.pack("layer", there, torch.float16)
        read = layers.unpack("layer", packed, format)
        assert there.same_as(read)
        assert not QuantizedMatrix(codes=changed, grid=there.grid).same_as(read)
        assert gpu.total.to_host_bytes <= 64  # a few numbers that decide something
        back = {name: tensor.cpu() for name, tensor in packed.items()}
    assert back.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (tensor.dtype, tensor.shape) == (back[name].dtype, back[name].shape)
        assert torch.equal(tensor.contiguous().view(torch.uint8), back[name].contiguous().view(torch.uint8))

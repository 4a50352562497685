"""Layers that torch's kernels multiply compute with the values of their grids; other grids have no such layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from checkpoints import random_matrix
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.superblock import SuperGrid
from nearplane.loading import kernel_linear as module
from nearplane.loading.kernel_linear import Int4Linear, Int8Linear, KernelLinear, block_rows, kernel_linear

ROUNDING = 2**-8  # largest relative error of one rounding to bfloat16
CASES = {  # bits, group size, symmetric, permuted columns, outputs
    "4 bits": (4, 32, True, False, 64),
    "4 bits, groups of 128": (4, 128, True, False, 64),
    "4 bits, groups of 512, which the kernel does not have": (4, 512, True, False, 64),
    "4 bits, a step per row, 40 outputs": (4, None, True, False, 40),
    "4 bits, asymmetric, 7 outputs": (4, 64, False, False, 7),
    "4 bits, asymmetric, permuted": (4, 32, False, True, 96),
    "3 bits": (3, 128, True, False, 64),
    "2 bits, asymmetric, permuted": (2, 256, False, True, 33),
    "8 bits": (8, None, True, False, 40),
    "5 bits": (5, None, True, False, 64),
}
COLUMNS = 512


def made(case: str) -> tuple[QuantizedMatrix, KernelLinear]:
    """Return the matrix of a case, with steps that bfloat16 holds, and its layer with a bias."""
    bits, group_size, symmetric, permuted, out = CASES[case]
    matrix = random_matrix(
        out, COLUMNS, bits=bits, group_size=group_size, symmetric=symmetric, permuted=permuted, dtype=torch.bfloat16
    )
    layer = kernel_linear(matrix)
    assert type(layer) is (Int4Linear if bits <= 4 else Int8Linear)
    layer.bias = nn.Parameter(torch.linspace(-1, 1, out, dtype=torch.bfloat16), requires_grad=False)
    return matrix, layer


def inputs(rows: int) -> Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


@pytest.mark.parametrize("case", CASES)
def test_the_decoded_weight_is_the_value_of_the_grid(case: str) -> None:
    """Bit for bit where there are no offsets; these have bfloat16 too, and are at most half the range of a group."""
    matrix, layer = made(case)
    values = matrix.decode()
    assert layer.weight.dtype == torch.bfloat16
    if CASES[case][2]:
        assert torch.equal(layer.weight, values.to(torch.bfloat16))
    largest = values.abs().amax()
    assert (layer.weight.float() - values).abs().amax() <= ROUNDING * largest


@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("case", CASES)
def test_products_are_those_of_the_values(case: str, rows: int) -> None:
    """Few rows by the kernel, 300 by strips: both add in float32 and round the sum once, the bias once more."""
    matrix, layer = made(case)
    x = inputs(rows)
    assert (rows > layer.MAX_ROWS) == (rows == 300)
    expected = x.double() @ matrix.decode().double().T + layer.bias.double()
    y = layer(x.view(1, rows, -1))
    assert y.dtype == torch.bfloat16
    assert y.shape == (1, rows, layer.out_features)
    assert (y[0].double() - expected).norm() <= ROUNDING * expected.norm()


def test_steps_of_8_bits_are_exact_in_float32() -> None:
    """Their rounding to bfloat16 would change weights by as much as codes of 8 bits do."""
    matrix = random_matrix(40, COLUMNS, bits=8, group_size=None, symmetric=True, dtype=torch.float32)
    layer = kernel_linear(matrix)
    assert layer is not None
    assert torch.equal(next(layer.strips()).T, matrix.decode())
    x, steps = inputs(layer.MAX_ROWS), matrix.grid.scale[:, 0]
    expected = x.double() @ matrix.decode().double().T
    slopes = (layer(x).double() * expected).sum(0) / expected.square().sum(0)  # roundings of outputs cancel out
    of_rounded_steps = steps.to(torch.bfloat16).double() / steps.double()
    assert (slopes - 1).norm() < (of_rounded_steps - 1).norm() / 2


@pytest.mark.parametrize("case", ["4 bits, asymmetric, permuted", "8 bits"])
def test_strips_of_a_few_rows_join_to_the_same_values(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole = made(case)
    monkeypatch.setattr(module, "MAX_STRIP_WEIGHTS", COLUMNS)
    _, layer = made(case)
    assert len(list(layer.strips())) == layer.codes.shape[0] // (len(block_rows()) if "4" in case else 1)
    assert torch.equal(layer.codes, whole.codes)
    assert torch.equal(layer.weight, whole.weight)


@pytest.mark.parametrize("case", ["4 bits, asymmetric, 7 outputs", "8 bits"])
def test_other_dtypes_and_gradients_of_inputs_use_decoded_values(case: str) -> None:
    """The kernels take bfloat16 alone, and have no derivatives; casts of the network leave the steps alone."""
    matrix, layer = made(case)
    weight = layer.weight
    x = inputs(3).double().requires_grad_()
    y = layer.double()(x)
    assert torch.equal(layer.weight, weight)
    expected = x @ matrix.decode().double().T + layer.bias.double()
    assert (y - expected).norm() <= ROUNDING * expected.norm()
    y.sum().backward()
    assert (x.grad - matrix.decode().double().sum(0)).norm() <= ROUNDING * matrix.decode().norm() * 7**0.5
    short = inputs(3).requires_grad_()
    layer(short).sum().backward()
    assert (short.grad.double() - x.grad).norm() <= 2 * ROUNDING * x.grad.norm()


@pytest.mark.parametrize("case", ["4 bits, asymmetric, permuted", "8 bits"])
def test_the_state_dict_is_that_of_a_linear_layer(case: str) -> None:
    _, layer = made(case)
    dense = nn.Linear(COLUMNS, layer.out_features, dtype=torch.bfloat16)
    dense.load_state_dict(layer.state_dict())
    assert torch.equal(dense.weight, layer.weight)
    assert torch.equal(dense.bias, layer.bias)


def test_minima_of_blocks_are_offsets_also_where_the_step_is_0() -> None:
    """Blocks of GGUF and MLX: a constant group has no step, only its minimum."""
    grid = SuperGrid(
        d=torch.tensor([[0.5], [0.25]]), sc=torch.tensor([[1, 0], [2, 3]], dtype=torch.int32),
        dmin=torch.tensor([[0.125], [-0.5]]), m=torch.tensor([[5, 3], [0, 1]], dtype=torch.int32),
        group=torch.arange(64) // 32, low=0, high=15,
    )  # fmt: skip
    codes = torch.randint(0, 16, (2, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    layer = kernel_linear(QuantizedMatrix(codes=codes, grid=grid))
    assert layer is not None
    assert torch.equal(layer.weight.float(), grid.decode(codes))
    x = torch.eye(64, dtype=torch.bfloat16)
    assert torch.equal(layer(x).T.float(), grid.decode(codes))


def test_grids_that_no_kernel_takes_have_no_layer() -> None:
    """Small or unequal groups, groups or zero points of 8 bits, and levels."""

    def of(**changes: object) -> KernelLinear | None:
        options = dict(bits=4, group_size=32, symmetric=True) | changes
        return kernel_linear(random_matrix(32, 96, **options))

    assert of() is not None
    assert of(group_size=16) is of(group_size=64) is of(bits=8) is None
    assert of(bits=8, group_size=None) is not None
    assert of(bits=8, group_size=None, symmetric=False) is None
    matrix = random_matrix(32, 96, bits=4, group_size=32, symmetric=False)
    assert kernel_linear(matrix) is not None
    levels = replace(matrix.grid, levels=torch.arange(16.0))
    assert kernel_linear(replace(matrix, grid=levels)) is None

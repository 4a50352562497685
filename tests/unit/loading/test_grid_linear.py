"""Layers of packed codes compute with the values of their grids; grids that do not fit in words have no such layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from checkpoints import random_matrix
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.superblock import SuperGrid
from nearplane.loading import product_cpu, torch_threads
from nearplane.loading.grid_linear import GridLinear, grid_linear
from nearplane.loading.words_linear import MAX_ROWS

EXACT = 2**-20  # largest relative error of float32 sums of COLUMNS products, with offsets that are rounded once
CASES = {  # bits, group size, symmetric, permuted columns, outputs, bits of a field
    "4 bits": (4, 32, True, False, 64, 4),
    "4 bits, groups of 8": (4, 8, True, False, 64, 4),
    "4 bits, a step per row, 40 outputs": (4, None, True, False, 40, 4),
    "4 bits, asymmetric, 7 outputs": (4, 64, False, False, 7, 4),
    "4 bits, asymmetric, permuted": (4, 32, False, True, 96, 4),
    "3 bits": (3, 128, True, False, 64, 4),
    "2 bits, symmetric": (2, 64, True, False, 130, 2),
    "2 bits, asymmetric, permuted": (2, 256, False, True, 33, 2),
    "8 bits": (8, None, True, False, 40, 8),
    "8 bits, asymmetric": (8, 32, False, False, 64, 8),
    "5 bits, groups of 4": (5, 4, True, False, 64, 8),
}
COLUMNS = 512


def made(case: str, dtype: torch.dtype = torch.float32) -> tuple[QuantizedMatrix, GridLinear]:
    """Return the matrix of a case, and its layer with a bias."""
    bits, group_size, symmetric, permuted, out, field = CASES[case]
    matrix = random_matrix(
        out, COLUMNS, bits=bits, group_size=group_size, symmetric=symmetric, permuted=permuted, dtype=torch.float32
    )
    layer = grid_linear(matrix, dtype)
    assert layer is not None
    assert layer.bits == field
    layer.bias = nn.Parameter(torch.linspace(-1, 1, out, dtype=dtype), requires_grad=False)
    return matrix, layer


def inputs(rows: int) -> Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
def test_the_decoded_weight_is_the_value_of_the_grid(case: str) -> None:
    """Bit for bit where there are no offsets."""
    matrix, layer = made(case)
    values = matrix.decode()
    if CASES[case][2]:
        assert layer.offset_bits.numel() == 0
        assert torch.equal(layer.weight, values)
    assert (layer.weight - values).abs().amax() <= 2**-22 * values.abs().amax()
    _, short = made(case, torch.bfloat16)
    assert torch.equal(short.weight, layer.weight.to(torch.bfloat16))


@pytest.mark.parametrize("rows", [1, MAX_ROWS, 50])
@pytest.mark.parametrize("case", CASES)
def test_products_are_those_of_the_values(case: str, rows: int) -> None:
    """Few rows by the codes, 50 by strips."""
    matrix, layer = made(case)
    x = inputs(rows)
    expected = x.double() @ matrix.decode().double().T + layer.bias.double()
    y = layer(x.view(1, rows, -1))
    assert y.dtype == torch.float32
    assert y.shape == (1, rows, layer.out_features)
    # sums begin with the offsets of fields: those of 4 bits are the same for codes of 3 bits, whose products are half as large
    exact = 2 * EXACT if case == "3 bits" else EXACT
    assert (y[0].double() - expected).norm() <= exact * expected.norm()
    short = layer(x.to(torch.bfloat16))
    assert short.dtype == torch.bfloat16
    assert (short.double() - expected).norm() <= 2**-8 * expected.norm()  # inputs and outputs are rounded


@pytest.mark.parametrize("own", [True, False], ids=["torch's threads", "a pool"])
def test_threads_share_blocks_and_change_nothing(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not own:
        monkeypatch.setattr(torch_threads, "_openmp", lambda: None)
    _, layer = made("2 bits, symmetric")
    x = inputs(3)
    alone = layer(x), layer(inputs(20)), layer.weight
    monkeypatch.setattr(product_cpu, "MIN_THREADED_WEIGHTS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert len(list(layer.strips())) == 2  # of three blocks
    together = layer(x), layer(inputs(20)), layer.weight
    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[2], alone[2])
    assert (together[1] - alone[1]).norm() <= EXACT * alone[1].norm()


@pytest.mark.parametrize("case", ["4 bits, asymmetric, 7 outputs", "8 bits"])
def test_other_dtypes_and_gradients_of_inputs_use_decoded_values(case: str) -> None:
    """The kernel has no derivatives, and no float64; casts of the network leave the steps alone."""
    matrix, layer = made(case)
    weight = layer.weight
    x = inputs(3).double().requires_grad_()
    y = layer.double()(x)
    assert torch.equal(layer.weight, weight)
    expected = x @ matrix.decode().double().T + layer.bias.double()
    assert (y - expected).norm() <= 2**-22 * expected.norm()  # values are those of float32
    y.sum().backward()
    expected = matrix.decode().double().sum(0)
    assert (x.grad - expected).norm() <= 2**-20 * expected.norm()
    short = inputs(3).requires_grad_()
    layer(short).sum().backward()
    assert (short.grad - x.grad).norm() <= EXACT * x.grad.norm()


@pytest.mark.parametrize("case", ["4 bits, asymmetric, permuted", "8 bits"])
def test_the_state_dict_is_that_of_a_linear_layer(case: str) -> None:
    _, layer = made(case)
    dense = nn.Linear(COLUMNS, layer.out_features)
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
    layer = grid_linear(QuantizedMatrix(codes=codes, grid=grid), torch.float32)
    assert layer is not None
    assert torch.equal(layer.weight, grid.decode(codes))
    assert torch.equal(layer(torch.eye(64)).T, grid.decode(codes))


def test_levels_that_are_multiples_of_a_half_are_codes_of_8_bits() -> None:
    """Those of FP4 are."""
    levels = torch.tensor([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])
    matrix = random_matrix(70, 64, bits=4, group_size=16, symmetric=True, dtype=torch.float32)
    codes = torch.randint(0, 15, (70, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    grid = replace(matrix.grid, levels=levels, low=0, high=14)
    layer = grid_linear(QuantizedMatrix(codes=codes, grid=grid), torch.float32)
    assert layer is not None
    assert layer.bits == 8
    assert torch.equal(layer.weight, grid.decode(codes))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda layer: setattr(layer, "step_bits", layer.step_bits[:1].contiguous()), "do not belong together"),
        (lambda layer: setattr(layer, "step_bits", layer.step_bits[:, :0].contiguous()), "do not belong together"),
        (lambda layer: setattr(layer, "offset_bits", layer.step_bits[:, :1].contiguous()), "do not belong together"),
        (lambda layer: setattr(layer, "words", layer.words[:, :16].contiguous()), "inputs are"),
        (lambda layer: setattr(layer, "words", layer.words.mT.contiguous().mT), "expected contiguous"),
        (lambda layer: setattr(layer, "words", layer.words.to(torch.int64)), "32-bit numbers"),
    ],
    ids=["blocks", "no groups", "offsets", "inputs", "strides", "dtype"],
)
def test_tensors_that_do_not_fit_are_refused(change: Callable[[GridLinear], None], why: str) -> None:
    _, layer = made("2 bits, symmetric")
    change(layer)
    with pytest.raises(ValueError, match=why):
        layer(inputs(1))

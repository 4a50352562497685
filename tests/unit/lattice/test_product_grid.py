"""Grids of entropy-coded matrices: their values, and the exponents of rows and columns."""

from __future__ import annotations

import math

import pytest
import torch

from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.product_grid import ProductGrid, high_rate_step, ladder, row_exponents, waterfill_exponents


def test_a_product_grid_is_rows_times_codes_times_columns() -> None:
    codes = torch.tensor([[1, -2, 0], [300, 4, -5]], dtype=torch.int32)
    grid = ProductGrid(
        base=0.25, columns=torch.tensor([0, 3, -4], dtype=torch.int32), column_resolution=2,
        rows=torch.tensor([0, -1], dtype=torch.int32), row_resolution=1,
    )  # fmt: skip
    columns = torch.tensor([0.25, 0.25 * 2**1.5, 0.0625])
    expected = torch.tensor([[1.0], [0.5]]) * codes * columns
    torch.testing.assert_close(QuantizedMatrix(codes=codes, grid=grid).decode(), expected)
    assert grid.row_weight().tolist() == [1.0, 4.0]


def test_steps_by_waterfilling_give_every_plane_the_same_error() -> None:
    lengths = torch.tensor([0.01, 0.5, 1.0, 3.0, 700.0], dtype=torch.float64)
    for resolution in (1, 4, 16):
        steps = torch.exp2(waterfill_exponents(lengths, resolution).double() / resolution)
        assert bool(((steps * lengths).log2().abs() <= 0.5 / resolution + 1e-9).all())


def test_the_high_rate_step_gives_gaussian_weights_that_entropy() -> None:
    g = torch.Generator().manual_seed(0)
    sigma = torch.tensor([0.7, 1.0, 1.5], dtype=torch.float64)
    W = torch.randn(200_000, 3, dtype=torch.float64, generator=g) * sigma
    step = 2.0 ** high_rate_step(sigma, torch.ones(3), 4.0)
    entropies = []
    for column in (W / step).round().T:
        p = column.unique(return_counts=True)[1].double() / len(column)
        entropies.append(float(-(p * p.log2()).sum()))
    assert sum(entropies) / 3 == pytest.approx(4.0, abs=0.02)


def test_rows_have_steps_of_their_own_only_where_that_pays() -> None:
    assert not row_exponents(torch.full((8,), 3.0), 64, 4).any()
    assert not row_exponents(torch.tensor([1.0, 1.2, 0.9, 1.1]), 64, 4).any()  # a gain of 0.003 bit, a cost of 4 / 64
    exponents = row_exponents(torch.tensor([1.0, 256.0, 1.0, 1.0]), 64, 4)
    assert exponents.tolist() == [0, -8, 0, 0]  # 256^(-1/4) is two octaves, eight quarters
    assert row_exponents(torch.tensor([0.0, 0.0, 1.0, 1.0]), 64, 4).abs().max() <= 16


def test_a_ladder_is_as_fine_as_its_error_is_worth() -> None:
    """Measured on random lengths: error by the AM over the GM of squared steps, exponents by the bits of a rung."""
    lengths = torch.exp2(4 * torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))

    def cost(resolution: int, count: int) -> float:
        off = 2 * (waterfill_exponents(lengths, resolution).double() / resolution + lengths.log2())
        return count * 0.5 * float(torch.exp2(off).mean().log2() - off.mean()) + math.log2(resolution)

    for count in (32, 128, 352, 1024, 4096):
        assert ladder(count) == min((1, 2, 4, 8, 16, 32), key=lambda resolution: cost(resolution, count))

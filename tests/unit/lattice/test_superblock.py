"""Grids of two levels beside plain grids, and beside their own numbers in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.superblock import SuperGrid


def some_grid(rows: int = 3, blocks: int = 2, groups: int = 4, size: int = 8, *, minima: bool = True) -> SuperGrid:
    source = torch.Generator().manual_seed(0)
    d = torch.randn(rows, blocks, generator=source).abs().half().float() / 64
    sc, m = (torch.randint(1, 64, (rows, groups), generator=source, dtype=torch.int32) for _ in range(2))
    offsets = {"dmin": d.flip(0).contiguous(), "m": m} if minima else {}
    return SuperGrid(d=d, sc=sc, group=torch.arange(groups * size) // size, low=0, high=15, **offsets)


@pytest.fixture
def matrix() -> QuantizedMatrix[SuperGrid]:
    codes = torch.randint(0, 16, (3, 32), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    return QuantizedMatrix(codes=codes, grid=some_grid())


def test_values_are_exact_products_less_exact_offsets_rounded_once(matrix: QuantizedMatrix[SuperGrid]) -> None:
    grid, values = matrix.grid, matrix.decode()
    assert grid.dmin is not None
    assert grid.m is not None
    for row in range(3):
        for column in range(32):
            block, group = column // 16, column // 8
            step = Fraction(float(grid.d[row, block])) * int(grid.sc[row, group])
            offset = Fraction(float(grid.dmin[row, block])) * int(grid.m[row, group])
            exact = step * int(matrix.codes[row, column]) - offset
            assert float(values[row, column]) == float(torch.tensor(float(exact), dtype=torch.float32))


def test_it_is_a_grid_like_any_other(matrix: QuantizedMatrix[SuperGrid]) -> None:
    """In float64 scale and zero say what codes stand for, and rounding values gives their codes."""
    grid = matrix.grid.to(torch.float64)
    plain = Grid(scale=grid.scale, zero=grid.zero, group=grid.group, low=0, high=15)
    torch.testing.assert_close(plain.decode(matrix.codes), grid.decode(matrix.codes), rtol=1e-13, atol=1e-13)
    codes, values = grid.round(grid.decode(matrix.codes))
    assert torch.equal(codes.to(torch.int32), matrix.codes)
    torch.testing.assert_close(values, grid.decode(matrix.codes), rtol=1e-13, atol=1e-13)


def test_rows_merge_and_compare(matrix: QuantizedMatrix[SuperGrid]) -> None:
    one = matrix.grid
    other = one.with_parts({"d": one.d * 2})
    chosen = torch.tensor([[True], [False], [True]])
    both = one.merged(chosen, other)
    assert both.of_rows(torch.tensor([0, 2])).same_as(one.of_rows(torch.tensor([0, 2])))
    assert both.of_rows(torch.tensor([1])).same_as(other.of_rows(torch.tensor([1])))
    assert not both.same_as(one)
    assert not one.same_as(Grid(scale=one.scale, zero=one.zero, group=one.group, low=0, high=15))
    assert not some_grid(minima=False).same_as(one)


def test_a_group_without_a_step_means_its_offset() -> None:
    """Files of others have such groups; nothing that is computed of them is NaN."""
    grid = some_grid()
    none = grid.with_parts({"sc": torch.zeros_like(grid.sc)})
    assert grid.offset is not None
    assert torch.equal(none.decode(torch.full((3, 32), 7)), -grid.offset[:, grid.group])
    assert torch.equal(none.zero, torch.zeros_like(none.scale))

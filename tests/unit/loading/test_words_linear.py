"""Layers of words of codes: which grids have one, and where it computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from checkpoints import random_matrix
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.loading.grid_linear import GridLinear, grid_linear


def test_grids_that_do_not_fit_in_words_have_no_layer() -> None:
    """Groups of parts of words or of unequal sizes, other levels, more than 8 bits, codes without limits."""

    def of(grid: Grid) -> GridLinear | None:
        return grid_linear(QuantizedMatrix(codes=codes, grid=grid), torch.float32)

    matrix = random_matrix(32, 96, bits=4, group_size=32, symmetric=True)
    codes, grid = matrix.codes, matrix.grid
    assert of(grid) is not None
    assert grid_linear(random_matrix(32, 96, bits=4, group_size=12, symmetric=True), torch.float32) is None
    assert grid_linear(random_matrix(32, 96, bits=4, group_size=64, symmetric=True), torch.float32) is None
    assert of(replace(grid, levels=torch.linspace(-1, 1, 16), low=0, high=15)) is None
    assert of(replace(grid, high=1000)) is None
    assert of(replace(grid, low=None, high=None)) is None


def test_words_that_are_not_on_the_cpu_are_refused() -> None:
    """The kernel gets addresses alone."""
    layer = grid_linear(random_matrix(32, 64, bits=4, group_size=32, symmetric=True), torch.float32)
    assert layer is not None
    layer.words = layer.words.to("meta")
    with pytest.raises(ValueError, match=r"on the CPU, found .* on meta"):
        layer(torch.randn(1, 64))

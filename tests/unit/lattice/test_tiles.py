"""Grids of tiles: each step is that of all weights of a tile, as if they were one group, and stays."""

import pytest
import torch

from nearplane import RecipeError
from nearplane.lattice.fits import FITS
from nearplane.lattice.scale import Steps
from nearplane.matrix.quantize_matrix import quantize_matrix
from nearplane.number_formats import FP8_BLOCK
from nearplane.recipe.schemes import GridScheme

STEPS = Steps(format=FP8_BLOCK, search="mse", storage=torch.bfloat16)


def test_a_tile_has_the_step_of_one_group_of_its_weights(generator):
    W = torch.randn(256, 384, generator=generator) * 2.0 ** torch.arange(256)[:, None].div(40).floor()
    grid, _ = FITS["tiles"](W, W[0], STEPS)
    for row in (0, 128):
        for column in (0, 128, 256):
            tile = W[row : row + 128, column : column + 128]
            step = STEPS.fit(tile.reshape(1, -1))[0]
            assert bool((grid.scale[row : row + 128, column // 128] == step).all())


def test_a_solve_keeps_steps_equal_within_tiles_and_rows_that_no_tile_divides_are_refused(generator):
    W, X = torch.randn(256, 128, generator=generator), torch.randn(200, 128, generator=generator)
    matrix, record = quantize_matrix(W, X.T @ X / 200, GridScheme(grid="fp8-block"), storage=torch.bfloat16)
    assert record.format == "fp8-block"
    assert matrix.grid.scale.view(2, 128).unique(dim=1).shape == (2, 1)
    with pytest.raises(RecipeError, match="matrix: 200 outputs are not a multiple of the 128 rows that share steps"):
        quantize_matrix(W[:200], X.T @ X / 200, GridScheme(grid="fp8-block"))

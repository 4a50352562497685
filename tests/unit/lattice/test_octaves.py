"""Grids of powers of two: the initial exponents are the best of all, and the descent over them lowers the loss."""

import pytest
import torch

from nearplane.lattice.factor import factorize
from nearplane.lattice.fits import FITS
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.octaves import OctaveFit
from nearplane.lattice.polish import descend
from nearplane.lattice.scale import Steps
from nearplane.lattice.solvers import SOLVERS, Problem
from nearplane.number_formats import MXFP4, MXFP8


def fitted(W, importance, format):
    return FITS[format.fit](W, importance, Steps(format=format, search="mse", storage=torch.float16))[0]


@pytest.fixture
def weights(generator):
    """Return (16, 96) weights whose groups have magnitudes of eight octaves."""
    spread = 2.0 ** torch.randint(-4, 4, (16, 3, 1), generator=generator)
    return (torch.randn(16, 3, 32, generator=generator) * spread).flatten(1)


def error(W, grid, importance):
    return ((W - grid.round(W)[1]) * importance).square().view(len(W), -1, 32).sum(-1)


@pytest.mark.parametrize("format", [MXFP4, MXFP8], ids=lambda format: format.name)
def test_every_step_is_the_best_of_all_powers_of_two(weights, generator, format):
    importance = torch.rand(96, generator=generator) + 0.1
    grid = fitted(weights, importance, format)
    every = [
        error(weights, grid.with_parts(grid.parts | {"scale": torch.full_like(grid.scale, 2.0**exponent)}), importance)
        for exponent in range(-24, 12)
    ]
    torch.testing.assert_close(error(weights, grid, importance), torch.stack(every).amin(0), rtol=1e-5, atol=0)


def test_zeros_and_weights_at_the_ends_of_float32_have_steps_that_a_file_holds():
    W = torch.tensor([0.0, 1e-44, 3e38])[:, None].expand(3, 32)
    scale = fitted(W, torch.ones(32), MXFP4).scale.double()
    assert scale.flatten().tolist()[0] == 1
    assert torch.equal(scale.log2(), scale.log2().round())
    assert float(scale.min()) >= 2.0**-126
    assert float(scale.max()) <= 2.0**127


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_descent_over_exponents_ends_below_that_over_codes_and_counts_its_gain(weights, generator, dtype):
    weights = weights.to(dtype)
    X = torch.randn(300, 96, generator=generator) @ torch.randn(96, 96, generator=generator)
    H = (X.T @ X / 300).to(dtype)
    factor = factorize(H.double(), "natural", damp=0.01)
    H += factor.shift * torch.eye(96, dtype=dtype)
    grid = fitted(weights, H.diagonal().sqrt(), MXFP4)
    start = SOLVERS["nearest-plane"].round(Problem(W=weights, grid=grid, factor=factor, H=H, shift=factor.shift)).matrix

    def losses(matrix: QuantizedMatrix) -> torch.Tensor:
        E = (weights - matrix.decode()).double()
        return ((E @ H.double()) * E).sum(1)

    codes_only = descend(weights, start, H, sweeps=3)[0]
    both, gained = descend(weights, start, H, sweeps=3, fit=OctaveFit())
    assert bool((losses(both) <= losses(start) * (1 + 1e-5)).all())
    assert float(losses(both).sum()) < 0.95 * float(losses(codes_only).sum())
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4  # of the sums of losses and gains in this dtype
    torch.testing.assert_close(losses(start) + gained, losses(both), rtol=tolerance, atol=0)
    assert not torch.equal(both.grid.scale, start.grid.scale)
    assert torch.equal(both.grid.scale.log2(), both.grid.scale.log2().round())


def test_the_gain_of_every_row_is_counted_where_half_the_step_and_then_twice_the_step_look_better(generator):
    """So rare that it takes thousands of rows: the trial of a step must begin at the values before the other trials."""
    W, X = (torch.randn(rows, 96, generator=generator, dtype=torch.float64) for rows in (8000, 300))
    X = X @ torch.randn(96, 96, generator=generator, dtype=torch.float64)
    H = X.T @ X / 300
    grid = fitted(W, H.diagonal().sqrt(), MXFP4)
    start = QuantizedMatrix(codes=grid.round(W)[0].int(), grid=grid)
    both, gained = descend(W, start, H, sweeps=2, fit=OctaveFit())
    before, after = (((E @ H) * E).sum(1) for E in (W - start.decode(), W - both.decode()))
    torch.testing.assert_close(before + gained, after, rtol=1e-9, atol=0)

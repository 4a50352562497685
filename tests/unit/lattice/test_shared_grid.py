"""Grids of 8-bit float steps under one divisor: the initial steps are the best of all, and fitted ones stay exact."""

import pytest
import torch

from nearplane.errors import NumericalError
from nearplane.lattice.factor import factorize
from nearplane.lattice.fits import FITS
from nearplane.lattice.polish import refine
from nearplane.lattice.scale import Steps
from nearplane.lattice.shared_grid import E4M3, SharedFit, divisor_of
from nearplane.lattice.solvers import SOLVERS, Problem
from nearplane.number_formats import NVFP4


def fitted(W, importance, peak=None):
    return FITS[NVFP4.fit](W, importance, Steps(format=NVFP4, search="mse", storage=torch.float16, peak=peak))[0]


@pytest.fixture
def weights(generator):
    """Return (8, 64) weights whose groups have magnitudes of eight octaves."""
    spread = 2.0 ** torch.randint(-4, 4, (8, 4, 1), generator=generator)
    return (torch.randn(8, 4, 16, generator=generator) * spread).flatten(1)


def error(W, grid, importance):
    return ((W - grid.round(W)[1]) * importance).square().view(len(W), -1, 16).sum(-1)


def test_every_step_is_the_best_of_all_that_the_file_can_hold(weights, generator):
    importance = torch.rand(64, generator=generator) + 0.1
    grid = fitted(weights, importance)
    found = error(weights, grid, importance)
    every = [
        error(weights, grid.with_parts({"block": torch.full_like(grid.block, float(x))}), importance) for x in E4M3
    ]
    torch.testing.assert_close(found, torch.stack(every).amin(0), rtol=1e-5, atol=0)


def test_the_divisor_stretches_the_largest_weight_to_the_largest_step(weights):
    grid = fitted(weights, torch.ones(64))
    assert grid.divisor == pytest.approx(448 * 6 / float(weights.abs().max()))
    assert fitted(weights, torch.ones(64), peak=100.0).divisor == pytest.approx(26.88)
    assert fitted(torch.zeros(2, 32), torch.ones(32)).divisor == 1
    with pytest.raises(NumericalError, match="global scale does not fit float32"):
        divisor_of(1e-40, 6)


def test_refits_lower_the_loss_and_stay_on_values_that_the_file_holds(weights, generator):
    X = torch.randn(300, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    factor = factorize((X.T @ X / 300).double(), "activation", damp=0.01)
    H = (X.T @ X / 300) + factor.shift * torch.eye(64)
    grid = fitted(weights, H.diagonal().sqrt())

    def solve(now):
        return SOLVERS["nearest-plane"].round(Problem(W=weights, grid=now, factor=factor, H=H, shift=factor.shift))

    def loss(matrix):
        E = weights - matrix.decode()
        return float(((E @ H) * E).sum())

    before, after = (
        solve(grid).matrix,
        refine(weights, H, grid, lambda now: SharedFit(now.divisor), solve, rounds=3).matrix,
    )
    assert loss(after) < 0.98 * loss(before)
    assert after.grid.divisor == grid.divisor
    assert bool(torch.isin(after.grid.block, E4M3).all())
    assert torch.equal(after.grid.scale, after.grid.block / torch.tensor(grid.divisor))

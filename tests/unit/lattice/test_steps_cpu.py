"""Compiled fits of steps are those in torch: same steps and codes but where two are equally good, same bits for any rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from nearplane.lattice import kernels
from nearplane.lattice.fits import FITS
from nearplane.lattice.grid import Codebook, QuantizedMatrix
from nearplane.lattice.polish import descend, state_of
from nearplane.lattice.scale import Steps
from nearplane.lattice.steps_cpu import ROWS, least_squares
from nearplane.number_formats import number_format
from threads import threads_of_torch

FORMATS = ["nvfp4", "mxfp4", "mxfp8", "int4-g32", "int3-g16", "int4-g32-asym", "iq4_xs"]


@contextmanager
def in_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch fit and search."""
    plain = replace(kernels.kernels_of(torch.empty(0)), fit_steps=None, fit_octaves=None, least_squares=None)
    with monkeypatch.context() as patched:
        patched.setitem(kernels.KERNELS, "cpu", lambda: plain)
        yield


def problem(rows, generator, columns=256):
    """Return weights with groups of many magnitudes, one of zeros, and a Hessian with a dead column."""
    W = torch.randn(rows, columns, generator=generator) * 2.0 ** torch.randint(
        -4, 3, (rows, columns), generator=generator
    )
    W[rows // 2, :32] = 0
    X = torch.randn(500, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    H = X.T @ X / 500
    H.diagonal().add_(0.1 * H.diagonal().mean())
    H[5], H[:, 5] = 0, 0
    return W, H


def descended(name, W, H, sweeps=3):
    format = number_format(name)
    grid, fit = FITS[format.fit](W, H.diagonal().sqrt(), Steps(format=format, search="mse", storage=torch.bfloat16))
    start = QuantizedMatrix(codes=grid.round(W)[0].to(torch.int32), grid=grid)
    return *descend(W, start, H, sweeps=sweeps, fit=fit(grid)), grid


def losses(W, matrix, H):
    E = (W - matrix.decode()).double()
    return ((E @ H.double()) * E).sum(1)


@pytest.mark.parametrize("rows", [1, ROWS, ROWS + 3])
@pytest.mark.parametrize("name", FORMATS)
def test_a_descent_is_that_in_torch(name, rows, generator, monkeypatch):
    """Rounding errors decide between equal candidates: the losses are then equal, too."""
    W, H = problem(rows, generator)
    with in_torch(monkeypatch):
        expected, gained, start = descended(name, W, H)
    found, gain, grid = descended(name, W, H)
    assert float((grid.scale == start.scale).float().mean()) > 0.95
    assert float((found.codes == expected.codes).float().mean()) > 0.95
    torch.testing.assert_close(losses(W, found, H).sum(), losses(W, expected, H).sum(), rtol=2e-3, atol=0)
    torch.testing.assert_close(gain.sum(), gained.sum(), rtol=2e-3, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_the_gain_is_the_change_of_the_loss(name, generator):
    W, H = problem(40, generator)
    found, gain, start = descended(name, W, H)
    before = losses(W, QuantizedMatrix(codes=start.round(W)[0].to(torch.int32), grid=start), H)
    torch.testing.assert_close(before + gain, losses(W, found, H), rtol=1e-4, atol=1e-4 * float(before.mean()))
    assert float(gain.max()) <= 1e-4 * float(before.mean())
    assert float(gain.sum()) < -0.1 * float(before.sum())


def rounded(name, W, H):
    """Return the state of a descent on codes that are rounded to nearest, and its fit."""
    format = number_format(name)
    steps = Steps(format=format, search="mse", storage=torch.bfloat16, peak=20.0)
    grid, fit = FITS[format.fit](W, H.diagonal().sqrt(), steps)
    codes, values = grid.round(W)
    groups = [(g, a, a + format.group) for g, a in enumerate(range(0, W.shape[1], format.group))]
    state = state_of(W, QuantizedMatrix(codes=codes.to(torch.int32), grid=grid), H, groups)
    state.E -= values.T
    return state, fit(grid)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_rows_do_not_depend_on_each_other_or_on_threads(name, generator):
    W, H = problem(2 * ROWS + 5, generator)
    whole, fit = rounded(name, W, H)
    EH = H @ whole.E
    fit.fit(whole, 0, W.shape[1], EH.clone())
    assert bool(whole.moved)
    for part, threads in ((slice(0, ROWS), 1), (slice(3, 4), 1), (slice(ROWS, None), 1), (slice(None), 3)):
        state, fit = rounded(name, W[part], H)
        with threads_of_torch(threads):
            fit.fit(state, 0, W.shape[1], EH[:, part].contiguous())
        for found, expected in ((state.scale, whole.scale), (state.codes, whole.codes), (state.E, whole.E)):
            assert torch.equal(found, expected[:, part])
        assert torch.equal(state.fitted, whole.fitted[part])


@pytest.mark.parametrize("levels", [[-2.0, -1, 0, 1.5, 4], [float(each) for each in range(40)]])
def test_the_search_finds_the_first_step_of_least_error(levels, generator):
    """With few levels, and with more than are compared one by one."""
    groups = torch.randn(5, 3, 16, generator=generator)
    weight, steps = torch.rand(3, 16, generator=generator), torch.rand(7, 5, 3, generator=generator) + 0.1
    steps[6] = steps[0]
    book = Codebook(low=0, high=len(levels) - 1, levels=torch.tensor(levels))
    values = torch.stack([book.position(book.nearest(groups / step[..., None])) * step[..., None] for step in steps])
    error = ((values - groups).square() * weight).sum(-1)
    found = least_squares(groups, weight, book, steps)
    torch.testing.assert_close(error.gather(0, found[None])[0], error.amin(0), rtol=1e-5, atol=0)
    assert int(found.max()) < 6

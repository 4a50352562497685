"""What is trained of floats is what the file holds: values, gradients, codes of four bits and steps."""

import pytest
import torch

from nearplane.formats.compressed_tensors.compressed_tensors_format import packing_of
from nearplane.lattice.fits import FITS
from nearplane.lattice.scale import Steps
from nearplane.lattice.solvers import round_to_nearest
from nearplane.number_formats import number_format
from nearplane.tuning.levels import UNIT, TunedLevels

KINDS = ("nvfp4", "mxfp4")
EIGHT_BITS = ("fp8", "mxfp8")


def matrix_of(generator, kind):
    W, format = torch.randn(6, 64, generator=generator) * 0.02, number_format(kind)
    grid, _ = FITS[format.fit](W, torch.ones(64), Steps(format=format, search="mse", storage=torch.float32))
    return W, round_to_nearest(W, grid)


def shake(tuned, generator, size):
    with torch.no_grad():
        tuned.trained()["codes"].add_(size * torch.randn(6, 64, generator=generator))


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_file(generator, kind):
    W, start = matrix_of(generator, kind)
    tuned, packing = TunedLevels(start, torch.float32, codes=True), packing_of(number_format(kind))
    tuned.lean(W)
    assert tuned.matrix().same_as(start)
    shake(tuned, generator, 30.0)
    found = tuned.matrix()
    assert found.grid.same_as(start.grid)
    assert (found.codes != start.codes).float().mean() > 0.5
    back = packing.unpack("it", packing.pack("it", found, torch.float32), number_format(kind))
    assert back.same_as(found)
    assert torch.equal(tuned.values(), back.decode().float())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_distances_of_neighbouring_values(generator, kind):
    _, start = matrix_of(generator, kind)
    tuned, G = TunedLevels(start, torch.float32, codes=True), torch.randn(6, 64, generator=generator)
    (tuned.values() * G).sum().backward()
    levels, grid = start.grid.levels.float(), start.grid
    inner = (start.codes > 0) & (start.codes < len(levels) - 1)
    codes = start.codes.long().clamp(1, len(levels) - 2)
    gaps = grid.scale[:, grid.group] * (levels[codes + 1] - levels[codes - 1]) / 2
    found = tuned.trained()["codes"].grad
    assert inner.float().mean() > 0.5
    assert torch.allclose(found[inner], (UNIT * G * gaps)[inner], rtol=1e-4, atol=1e-8)
    assert bool((found[~inner] != 0).all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_towards_the_original_moves_no_code_and_the_nearer_side_first(generator, kind):
    W, start = matrix_of(generator, kind)
    tuned = TunedLevels(start, torch.float32, codes=True)
    tuned.lean(W)
    assert tuned.matrix().same_as(start)
    lean, error = tuned.trained()["codes"], W - start.decode()
    levels = start.grid.levels
    inner = (start.codes > 0) & (start.codes < len(levels) - 1) & (error != 0)
    assert torch.equal(lean.sign()[inner], error.sign()[inner])


@pytest.mark.parametrize("kind", KINDS)
def test_states_and_files_bring_back_what_was(generator, kind):
    _, start = matrix_of(generator, kind)
    tuned = TunedLevels(start, torch.float32, codes=True)
    shake(tuned, generator, 20.0)
    state, kept = tuned.state(), tuned.matrix()
    shake(tuned, generator, 20.0)
    assert not tuned.matrix().same_as(kept)
    tuned.restore(state)
    assert tuned.matrix().same_as(kept)


@pytest.mark.parametrize("kind", KINDS + EIGHT_BITS)
def test_steps_are_trained_and_stored_as_the_format_does(generator, kind):
    _, start = matrix_of(generator, kind)
    tuned, packing = TunedLevels(start, torch.float32), packing_of(number_format(kind))
    assert set(tuned.trained()) == {"steps"}
    assert torch.equal(tuned.values(), start.decode().float())
    steps, G = tuned.trained()["steps"], torch.randn(6, 64, generator=generator)
    (tuned.values() * G).sum().backward()
    slope = (start.decode().float() * G).view(6, steps.shape[1], -1).sum(2) * tuned.unit
    assert torch.allclose(steps.grad, slope, rtol=1e-4, atol=1e-8)
    with torch.no_grad():
        steps.add_(torch.randn(steps.shape, generator=generator) / tuned.unit)  # by a factor of e
    found = tuned.matrix()
    assert torch.equal(found.codes, start.codes)
    assert (found.grid.scale != start.grid.scale).float().mean() > 0.5
    back = packing.unpack("it", packing.pack("it", found, torch.float32), number_format(kind))
    assert back.same_as(found)
    assert torch.equal(tuned.values(), back.decode().float())
    state = tuned.state()
    with torch.no_grad():
        steps.zero_()
    assert tuned.matrix().same_as(start)
    tuned.restore(state)
    assert tuned.matrix().same_as(found)


def test_steps_of_tiles_stay_equal_in_all_their_rows(generator):
    W, format = torch.randn(256, 128, generator=generator) * 0.02, number_format("fp8-block")
    grid, _ = FITS[format.fit](W, torch.ones(128), Steps(format=format, search="mse", storage=torch.float32))
    start = round_to_nearest(W, grid)
    tuned = TunedLevels(start, torch.float32, rows=format.rows)
    with torch.no_grad():
        tuned.trained()["steps"].add_(torch.tensor([[30.0], [-30.0]]))
    found = tuned.matrix()
    packing = packing_of(format)
    assert packing.unpack("it", packing.pack("it", found, torch.float32), format).same_as(found)
    assert (found.grid.scale[:128] > start.grid.scale[:128]).all()
    assert (found.grid.scale[128:] < start.grid.scale[128:]).all()

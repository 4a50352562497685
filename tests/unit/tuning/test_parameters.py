"""What is trained is what the file holds: values, gradients and limits of steps, codes and norms."""

from dataclasses import replace

import pytest
import torch

from nearplane.errors import FormatError
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.scale import Steps
from nearplane.number_formats import integers
from nearplane.tuning.parameters import TunedMatrix, TunedVector


def matrix_of(generator, bits=2, symmetric=False, storage=torch.float16, size=8, shape=(6, 32)):
    W = torch.randn(shape, generator=generator)
    grid = Steps(format=integers(bits, size, symmetric=symmetric), search="mse", storage=storage).grid(W)
    return W, QuantizedMatrix(codes=grid.round(W)[0].int(), grid=grid)


def shake(tuned, generator, size=1.0):
    with torch.no_grad():
        for leaf in tuned.trained().values():
            leaf.add_(size * torch.randn(leaf.shape, generator=generator))


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("bits", "symmetric"), [(2, False), (3, True), (4, False), (8, True)])
def test_values_are_those_of_the_integers_and_the_stored_steps(generator, storage, bits, symmetric):
    _, start = matrix_of(generator, bits, symmetric, storage)
    tuned = TunedMatrix("it", start, storage, codes=bits < 4)
    assert tuned.matrix().same_as(start)
    shake(tuned, generator, 4.0)
    found = tuned.matrix()
    assert torch.equal(tuned.values(), found.decode())
    assert not found.grid.same_as(start.grid)
    assert torch.equal(found.grid.scale.to(storage).float(), found.grid.scale)
    assert int(found.codes.min()) >= start.grid.low
    assert int(found.codes.max()) <= start.grid.high
    assert torch.equal(found.codes, start.codes) == (bits >= 4)


def test_gradients_are_those_without_rounding(generator):
    W, start = matrix_of(generator)
    tuned = TunedMatrix("it", start, torch.float16, codes=True)
    tuned.lean(W)
    G = torch.randn(W.shape, generator=generator)
    (tuned.values() * G).sum().backward()
    scale, zero = start.grid.columns(slice(None))
    leaves = tuned.trained()
    assert torch.allclose(leaves["codes"].grad, tuned.unit * G * scale)
    by_value = (G * scale * (start.codes - zero)).view(len(W), -1, 8).sum(2)
    assert torch.allclose(leaves["steps"].grad, tuned.unit * by_value, atol=1e-6)


def test_leaning_towards_the_weights_moves_no_code(generator):
    W, start = matrix_of(generator)
    tuned = TunedMatrix("it", start, torch.float16, codes=True)
    tuned.lean(W + 10 * torch.randn(W.shape, generator=generator))
    assert tuned.matrix().same_as(start)
    assert float(tuned.trained()["codes"].detach().abs().max()) * tuned.unit > 0.3


def test_a_state_comes_back(generator):
    _, start = matrix_of(generator)
    tuned = TunedMatrix("it", start, torch.float16, codes=True)
    before = tuned.state()
    shake(tuned, generator, 4.0)
    state, after = tuned.state(), tuned.matrix()
    tuned.restore(before)
    assert tuned.matrix().same_as(start)
    tuned.restore(state)
    assert tuned.matrix().same_as(after)


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
def test_norms_are_rounded_as_they_are_stored(generator, storage):
    weights = (1 + torch.randn(9, generator=generator)).to(storage)
    tuned = TunedVector(weights, torch.device("cpu"), 0.25)
    assert torch.equal(tuned.tensor(), weights)
    tuned.values().sum().backward()
    assert bool((tuned.trained()["norms"].grad > 0).all())
    shake(tuned, generator)
    assert tuned.tensor().dtype == storage
    assert torch.equal(tuned.tensor().float(), tuned.values())
    assert not torch.equal(tuned.tensor(), weights)


def test_what_is_not_on_such_a_grid_is_refused(generator):
    _, start = matrix_of(generator)
    codes, mixed = start.codes, start.grid.group.flip(0)
    grid = Grid(scale=start.grid.scale, zero=start.grid.zero, group=mixed, low=0, high=3)
    levels = replace(start.grid, levels=torch.arange(4.0))
    for other, said in ((levels, "not integers"), (grid, "runs of equally many")):
        with pytest.raises(FormatError, match=f"it: .*{said}"):
            TunedMatrix("it", QuantizedMatrix(codes=codes, grid=other), torch.float16)

"""An entropy-coded matrix that is tuned is what the file holds, and takes no more than it may."""

import pytest
import torch

from nearplane.coding.blob import Contents, decode, encode
from nearplane.coding.scales import stored_base
from nearplane.formats.native import DEFAULT, matrix_of
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.product_grid import ProductGrid
from nearplane.tuning.parameters import Pressure, TunedLadders


def matrix_of_rate(generator, shape=(24, 32), spread=1.2):
    W = spread * torch.randn(shape, generator=generator)
    rows, columns = (torch.randint(-3, 4, (n,), generator=generator).int() for n in shape)
    grid = ProductGrid(base=stored_base(0.1), columns=columns, column_resolution=4, rows=rows, row_resolution=2)
    return grid.decode(W), QuantizedMatrix(codes=W.round().int(), grid=grid)


def shake(tuned, generator, size):
    with torch.no_grad():
        for leaf in tuned.trained().values():
            leaf.add_(size * torch.randn(leaf.shape, generator=generator))


def test_values_are_those_that_the_bytes_decode_to(generator):
    _, start = matrix_of_rate(generator)
    tuned = TunedLadders(start, 2.0, codes=True)
    assert tuned.matrix().same_as(start)
    shake(tuned, generator, 2.0)
    found = tuned.matrix()
    assert not torch.equal(found.codes, start.codes)
    assert found.grid.base != start.grid.base
    read = matrix_of(decode(encode(Contents.of(found.codes, found.grid))))
    assert read.same_as(found)
    assert torch.equal(tuned.values(), read.decode())


def test_gradients_are_those_without_rounding(generator):
    W, start = matrix_of_rate(generator)
    tuned = TunedLadders(start, 2.0, codes=True)
    tuned.lean(W)
    assert tuned.matrix().same_as(start)
    G = torch.randn(W.shape, generator=generator)
    (tuned.values() * G).sum().backward()
    steps = start.grid.row_scale()[:, None] * start.grid.column_scale()
    leaves = tuned.trained()
    assert torch.allclose(leaves["codes"].grad, 0.25 * G * steps)
    assert torch.allclose(leaves["base"].grad, 0.25 * (G * start.decode()).sum(), atol=1e-6)


def test_a_state_comes_back(generator):
    _, start = matrix_of_rate(generator)
    tuned = TunedLadders(start, 2.0, codes=True)
    before = tuned.state()
    shake(tuned, generator, 2.0)
    state, after = tuned.state(), tuned.matrix()
    tuned.restore(before)
    assert tuned.matrix().same_as(start)
    tuned.restore(state)
    assert tuned.matrix().same_as(after)


def test_codes_that_do_not_fit_two_bytes_stay_what_they_are(generator):
    _, start = matrix_of_rate(generator)
    start.codes[0, 0] = 70000
    assert TunedLadders(start, 2.0).matrix().same_as(start)


@pytest.mark.parametrize("share", [0.97, 1.0])
def test_codes_are_pulled_until_they_take_what_they_may(generator, share):
    """Gradients that say nothing but noise let codes grow; the price keeps them at the bytes allowed."""
    W, start = matrix_of_rate(generator, (96, 128))
    tuned = TunedLadders(start, 2.0, codes=True)
    tuned.lean(W)
    size = len(encode(Contents.of(start.codes, start.grid)))
    pressure = Pressure({"it": tuned}, int(share * size), DEFAULT, 1.0)
    assert pressure.measure() == size
    leaf = tuned.trained()["codes"]
    optimizer = torch.optim.AdamW([leaf], lr=0.1, betas=(0.9, 0.999), weight_decay=0.0)
    noise = 1e-4 / W.numel()
    sizes = []
    for step in range(120):
        leaf.grad = noise * torch.randn(leaf.shape, generator=generator)
        tuned.press(pressure.next_price())
        optimizer.step()
        if step % 30 == 29:
            sizes.append(pressure.measure())
    assert sizes[-1] <= share * size

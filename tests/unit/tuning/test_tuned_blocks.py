"""What is trained of blocks of llama.cpp is what the file holds: values, gradients and limits."""

import pytest
import torch

from nearplane.formats.gguf.gguf_layers import packed_blocks, unpack
from nearplane.lattice.solvers import round_to_nearest
from nearplane.lattice.superblock_fit import fit_blocks
from nearplane.number_formats import TYPES
from nearplane.tuning.parameters import TunedBlocks

KINDS = ("q4_0", "q5_1", "q2_k", "q3_k", "q4_k", "q6_k")


def matrix_of(generator, kind):
    W = torch.randn(6, 512, generator=generator) * 0.02
    return W, round_to_nearest(W, fit_blocks(TYPES[kind], W, torch.ones(512), torch.float16))


def shake(tuned, generator, size=1.0):
    with torch.no_grad():
        for leaf in tuned.trained().values():
            leaf.add_(size * torch.randn(leaf.shape, generator=generator))


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_file(generator, kind):
    _, start = matrix_of(generator, kind)
    tuned = TunedBlocks(start, torch.float16, codes=TYPES[kind].bits < 4)
    assert tuned.matrix().same_as(start)
    shake(tuned, generator, 4.0)
    found = tuned.matrix()
    assert not found.grid.same_as(start.grid)
    assert torch.equal(found.grid.sc, start.grid.sc)
    back = unpack(TYPES[kind], packed_blocks(TYPES[kind], found), 512)
    assert back.same_as(found)
    assert torch.equal(tuned.values(), back.decode())
    assert torch.equal(found.codes, start.codes) == (TYPES[kind].bits >= 4)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_without_rounding(generator, kind):
    W, start = matrix_of(generator, kind)
    tuned = TunedBlocks(start, torch.float16, codes=True)
    tuned.lean(W)
    assert tuned.matrix().same_as(start)
    G = torch.randn(W.shape, generator=generator)
    (tuned.values() * G).sum().backward()
    grid, leaves, blocks = start.grid, tuned.trained(), start.grid.d.shape[1]
    assert torch.allclose(leaves["codes"].grad, tuned.unit * G * grid.scale[:, grid.group], rtol=1e-4, atol=1e-7)
    stepped = (G * grid.scale[:, grid.group] * start.codes).view(6, blocks, -1).sum(2)
    assert torch.allclose(leaves["steps"].grad[0], tuned.unit * stepped, rtol=1e-4, atol=1e-5)
    if grid.dmin is not None:
        offsets = -(G * grid.offset[:, grid.group]).view(6, blocks, -1).sum(2)
        assert torch.allclose(leaves["steps"].grad[1], tuned.unit * offsets, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_states_and_files_bring_back_what_was(generator, kind):
    _, start = matrix_of(generator, kind)
    tuned = TunedBlocks(start, torch.float16, codes=True)
    shake(tuned, generator, 3.0)
    state, kept = tuned.state(), tuned.matrix()
    shake(tuned, generator, 3.0)
    assert not tuned.matrix().same_as(kept)
    tuned.restore(state)
    assert tuned.matrix().same_as(kept)


def test_steps_stay_finite_and_keep_their_signs(generator):
    _, start = matrix_of(generator, "q4_k")
    for far in (-200.0, 200.0):
        tuned = TunedBlocks(start, torch.float16)
        with torch.no_grad():
            tuned.trained()["steps"].fill_(far)
        grid = tuned.matrix().grid
        assert bool(torch.isfinite(tuned.values()).all())
        assert torch.equal(grid.d.sign(), start.grid.d.sign())
        assert bool((grid.dmin >= 0).all())

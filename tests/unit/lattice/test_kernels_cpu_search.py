"""The compiled search finds what the plain one finds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nearplane.lattice.grid import Codebook
from nearplane.lattice.kernels_cpu import best_candidate
from nearplane.lattice.scale import Steps
from nearplane.number_formats import integers
from threads import threads_of_torch


def errors(weights, scale, zero, low, high):
    """(candidates, n) in float64, written as the formula stands."""
    s, z = scale.double()[..., None], zero.double()[..., None]
    w = weights.double()
    codes = ((w.float() / s.float()) + z.float()).round().clamp(low, high).double()
    e = (w - s * (codes - z)).abs()
    return e.pow(2.5).sum(-1)


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 70), st.sampled_from([1, 2, 3]))
def test_no_candidate_has_a_smaller_error(seed, n, g, threads):
    """Up to float32 sums: the found one is within 1e-5 of the least."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(n, g, generator=generator)
    scale, zero = (
        torch.rand(9, n, generator=generator) + 0.05,
        torch.randint(0, 16, (9, n), generator=generator).float(),
    )
    with threads_of_torch(threads):
        found = best_candidate(weights, scale, zero, Codebook(low=0, high=15))
    all_errors = errors(weights, scale, zero, 0, 15)
    assert bool((all_errors.gather(0, found[None])[0] <= all_errors.amin(0) * (1 + 1e-5)).all())


def test_threads_change_nothing():
    weights = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
    scale = torch.rand(20, 4096, generator=torch.Generator().manual_seed(1)) + 0.01
    found = []
    for threads in (1, 4):
        with threads_of_torch(threads):
            found.append(best_candidate(weights, scale, torch.zeros_like(scale), Codebook(low=-8, high=7)))
    assert torch.equal(*found)


@pytest.mark.parametrize("symmetric", [True, False])
def test_float32_finds_the_steps_of_float64(symmetric):
    """The torch form, which runs in float64, is the oracle; near-ties may fall differently in one group of a hundred."""
    W = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    steps = Steps(format=integers(3, 32, symmetric=symmetric), search="mse", storage=torch.float16)
    fast, plain = steps.grid(W), steps.grid(W.double())
    assert float((fast.scale != plain.scale.float()).double().mean()) < 0.01

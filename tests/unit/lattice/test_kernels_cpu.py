"""The compiled sweep of a block is the plain loop: same codes, errors that are exactly the weights minus the values."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nearplane.lattice.grid import Codebook
from nearplane.lattice.kernels_cpu import STRIP_ROWS, round_to_levels, sweep_block
from nearplane.lattice.kernels_torch import Columns, Tally
from nearplane.number_formats import E2M1, E4M3
from one_block import problem
from threads import threads_of_torch

SHAPES = [
    (1, 1),
    (1, 300),
    (2, 5),
    (7, STRIP_ROWS),
    (8, STRIP_ROWS + 1),
    (9, 2 * STRIP_ROWS - 1),
    (128, 1),
    (130, 67),
    (256, 3 * STRIP_ROWS),
]


def plain(target, W, scale, zero, group, low, high, U, dtype=torch.float32):
    """The loop as the formula stands; also how far every target is from the nearest rounding boundary, in steps."""
    t, W, scale, zero, U = (x.to(dtype) for x in (target, W, scale, zero, U))
    E, codes, gap = torch.empty_like(W), torch.empty_like(W), torch.empty_like(W)
    for j, g in enumerate(group.tolist()):
        x = (t[j] + U[:j, j] @ E[:j]) / scale[g] + zero[g]
        gap[j] = (x - x.floor() - 0.5).abs()
        codes[j] = x.round()
        if low is not None or high is not None:
            codes[j].clamp_(low, high)
        E[j] = W[j] - scale[g] * (codes[j] - zero[g])
    return codes.int(), E, gap


def swept(target, W, scale, zero, group, low, high, U):
    """Codes and errors of the compiled sweep."""
    codes, E = torch.empty(W.shape, dtype=torch.int32), torch.full(W.shape, torch.nan)
    columns = Columns(W, scale, zero, group, Codebook(low=low, high=high))
    sweep_block(target, columns, U, codes, E, nothing_added_up(W))
    return codes, E


def nothing_added_up(W):
    """Sums of nothing: columns do not count."""
    none = torch.zeros(W.shape[1])
    return Tally(torch.zeros(len(W)), none, none.to(torch.int32), moves=False)


def agree(target, W, scale, zero, group, low, high, U):
    """Compare with the float64 loop all rows that stay 1e-3 steps away from rounding boundaries; return their fraction."""
    codes, E = swept(target, W, scale, zero, group, low, high, U)
    expected, _, gap = plain(target, W, scale, zero, group, low, high, U, torch.float64)
    clear = (gap > 1e-3).all(0)
    assert torch.equal(E, W - scale[group] * (codes - zero[group]))
    assert torch.equal(codes[:, clear], expected[:, clear])
    return float(clear.double().mean())


@pytest.mark.parametrize(("low", "high"), [(0, 15), (-8, 7), (None, None), (0, None), (None, 0)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_plain_loop(shape, low, high):
    agree(*problem(*shape)[:5], low, high, problem(*shape)[5])


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 600), st.integers(1, 5), st.integers(1, 3))
def test_equals_the_plain_loop_on_any_shape(seed, b, out, groups, threads):
    """Any number of columns, rows, groups in any order of columns, threads."""
    *parts, U = problem(b, out, groups=groups, seed=seed)
    with threads_of_torch(threads):
        agree(*parts, 0, 15, U)


def test_most_rows_of_the_comparison_count():
    *parts, U = problem(32, 1000, groups=4)
    assert agree(*parts, 0, 15, U) > 0.9


def test_float32_loop_gives_the_same_codes():
    """Against the plain loop in the same precision not one code in ten thousand falls on the other side."""
    *parts, U = problem(128, 1000, groups=2)
    codes, _ = swept(*parts, 0, 15, U)
    expected, _, _ = plain(*parts, 0, 15, U)
    assert float((codes != expected).double().mean()) < 1e-4


@pytest.mark.parametrize("step", [0.1, 1 / 3, 0.07])
def test_ties_round_to_even_as_torch_does(step):
    """One column, so no sum: targets that divide to exactly k + 1/2 must give the codes of torch, bit for bit."""
    target = (torch.arange(-40, 40) + 0.5)[None] * step
    one = torch.ones(1, 80)
    codes, _ = swept(
        target, target, one * step, one * 3, torch.zeros(1, dtype=torch.long), None, None, torch.ones(1, 1)
    )
    assert torch.equal(codes, (target / torch.tensor(step) + 3).round().int())


def test_threads_change_nothing():
    *parts, U = problem(64, 1000, groups=3)
    found = []
    for threads in (1, 5):
        with threads_of_torch(threads):
            found.append(swept(*parts, 0, 15, U))
    one, five = found
    assert torch.equal(one[0], five[0])
    assert torch.equal(one[1], five[1])


def test_below_the_diagonal_nothing_is_read():
    *parts, U = problem(20, 50)
    below = torch.full_like(U, 1e3).tril(-1)
    assert torch.equal(swept(*parts, 0, 15, U)[1], swept(*parts, 0, 15, U + below)[1])


def test_slices_of_larger_tensors_are_written_in_place():
    target, W, scale, zero, group, U = problem(48, 33, groups=2)
    codes, E = torch.zeros(48, 33, dtype=torch.int32), torch.zeros(48, 33)
    middle = slice(16, 32)
    columns = Columns(W[middle], scale, zero, group[middle], Codebook(low=0, high=15))
    sweep_block(target[middle], columns, U[middle, middle], codes[middle], E[middle], nothing_added_up(W[middle]))
    expected = swept(target[middle], W[middle], scale, zero, group[middle], 0, 15, U[middle, middle])
    assert torch.equal(codes[middle], expected[0])
    assert torch.equal(E[middle], expected[1])
    assert not codes[:16].any()
    assert not E[32:].any()


def test_codes_may_take_the_memory_of_the_targets():
    *parts, U = problem(70, 300, groups=2)
    expected, E = swept(*parts, 0, 15, U)[0], torch.empty(70, 300)
    target = parts[0].clone()
    columns = Columns(*parts[1:], Codebook(low=0, high=15))
    with threads_of_torch(2):
        sweep_block(target, columns, U, target.view(torch.int32), E, nothing_added_up(parts[1]))
    assert torch.equal(target.view(torch.int32), expected)


def test_a_row_with_nan_spoils_no_other_row():
    target, W, scale, zero, group, U = problem(40, 300)
    _, clean = swept(target, W, scale, zero, group, 0, 15, U)
    target[3, 7] = torch.nan
    _, E = swept(target, W, scale, zero, group, 0, 15, U)
    others = torch.arange(300) != 7
    assert torch.equal(E[:, others], clean[:, others])
    assert bool(E[3:, 7].isnan().all())


@pytest.mark.parametrize("levels", [E2M1, E4M3, tuple(range(-300, 300))], ids=["E2M1", "E4M3", "many"])
def test_codes_on_levels_are_those_of_a_search(levels, generator):
    """At every midpoint and its neighbours, too, and at infinity."""
    book = Codebook(low=0, high=len(levels) - 1, levels=torch.tensor(levels, dtype=torch.float64))
    table = book.table(torch.float32)
    spread = torch.randn(20_000, generator=generator) * 2.0 ** torch.randint(-14, 12, (20_000,), generator=generator)
    near = [np.nextafter(table.middles, np.float32(side)) for side in (-np.inf, np.inf)]
    ends = np.array([np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45], np.float32)
    positions = np.concatenate([spread.numpy(), table.middles, *near, ends])
    codes = np.empty_like(positions)
    round_to_levels(positions, table, codes)
    assert np.array_equal(codes, np.searchsorted(table.middles, positions))
    assert np.array_equal(codes, book.nearest(torch.from_numpy(positions)).numpy())

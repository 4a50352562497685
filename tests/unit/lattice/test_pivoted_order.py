"""The blocked pivoted order is the order of Algorithm 4 of Chen, Hoefler and Alistarh, one rank-one update a column."""

import pytest
import torch

from nearplane.lattice.factor import factorize
from nearplane.lattice.pivoted_order import pivoted_order
from strategies import problem


def hessian(n, *, tokens=None, decay=0.0, seed=0):
    """Float64 second moments of inputs whose scales fall like k^-decay."""
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(tokens or 2 * n + 3, n, generator=g, dtype=torch.float64)
    X *= torch.arange(1, n + 1)[torch.randperm(n, generator=g)] ** -decay
    return X.T @ X / len(X)


def rank_one(H):
    """Eliminate the smallest remaining pivot, update everything, repeat; the last is rounded first."""
    S, left, eliminated = H.clone(), list(range(len(H))), []
    while left:
        k = min(left, key=lambda i: (float(S[i, i]), i))
        S -= torch.outer(S[:, k], S[k]) / S[k, k].clone()
        left.remove(k)
        eliminated.append(k)
    return torch.tensor(eliminated[::-1])


@pytest.mark.parametrize("n", [1, 2, 17, 63, 64, 65, 130, 300])
@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_equals_the_rank_one_algorithm(n, decay):
    H = hessian(n, decay=decay)
    assert torch.equal(pivoted_order(H), rank_one(H))


@pytest.mark.parametrize("panel", [1, 3, 16, 200])
def test_the_panel_does_not_matter(panel):
    H = hessian(150)
    assert torch.equal(pivoted_order(H, panel=panel), pivoted_order(H))


def test_more_columns_than_one_strip():
    """The trailing update goes by strips of rows of the lower triangle."""
    H = hessian(600, decay=0.5)
    assert torch.equal(pivoted_order(H), rank_one(H))


def test_ties_go_to_the_lowest_index():
    """Equal pivots are eliminated from the left, so they are rounded from the right."""
    assert pivoted_order(torch.eye(130, dtype=torch.float64)).tolist() == list(range(130))[::-1]
    assert pivoted_order(torch.diag(torch.tensor([2.0, 1.0, 2.0, 1.0]))).tolist() == [2, 0, 3, 1]


def test_the_input_is_left_alone():
    H = hessian(100)
    before = H.clone()
    pivoted_order(H)
    assert torch.equal(H, before)


def test_float32_is_a_permutation_close_to_that_of_float64():
    """Near-equal pivots may swap; the profile of Gram-Schmidt lengths they give is the same."""
    H = hessian(300, decay=0.5)
    p = pivoted_order(H.float())
    assert p.sort().values.tolist() == list(range(300))
    profile, expected = (torch.linalg.cholesky(H[q.flip(0)][:, q.flip(0)]).diagonal() for q in (p, pivoted_order(H)))
    torch.testing.assert_close(profile, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_singular_matrix_still_gives_a_permutation(dtype):
    """Fewer tokens than columns, an input that is always 0, two equal ones: for the factorization to report, not for this."""
    H = hessian(200, tokens=50).to(dtype)
    H[:, 7] = H[7] = 0
    H[:, 9], H[9] = H[:, 8].clone(), H[8].clone()
    p = pivoted_order(H)
    assert p.sort().values.tolist() == list(range(200))


def test_pivots_make_the_flattest_profile_here() -> None:
    """The greedy choice of the least pivot; no theorem, but so on every layer that was measured."""
    H = problem(columns=24, tokens=60).H
    orders = ("pivoted", "natural", "activation", "reversed")
    pivoted, *others = (float(factorize(H, order, damp=0.01).d.sum()) for order in orders)
    assert pivoted <= min(others)

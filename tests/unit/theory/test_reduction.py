"""LLL reduction: reduced by definition, unimodular by exact integers, equal to exact rational LLL and to fpylll; Babai with it."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nearplane.errors import NumericalError
from nearplane.lattice.bounds import quadratic
from nearplane.lattice.factor import Factor, factorize
from nearplane.lattice.grid import Grid
from nearplane.lattice.solvers import nearest_plane
from nearplane.theory.reduction import _sweeps, nearest_plane_reduced, reduce
from nightly import daily
from oracles import closest_vector
from strategies import problem, problems

DELTA = 0.75


def textbook(B, delta=Fraction(3, 4)):
    """Reduce integer rows in exact rational arithmetic, one exchange after the other: the readable twin.

    Returns the rows, their squared Gram-Schmidt lengths, and how many decisions were ties: a mu of exactly +-1/2, or equality in
    Lovasz' condition, at which a computation in floating point may go either way.

    Cohen, A Course in Computational Algebraic Number Theory, Algorithm 2.6.3.
    """
    B, mu, d = [list(map(Fraction, row)) for row in B], [[Fraction(0)] * len(B) for _ in B], []
    for k, row in enumerate(B):
        r = []  # <b_k, b_i*>
        for i in range(k):
            r.append(dot(row, B[i]) - dot(mu[i][:i], r))
            mu[k][i] = r[i] / d[i]
        d.append(dot(row, row) - dot(mu[k][:k], r))
    k, ties = 1, 0
    while k < len(B):
        for i in range(k - 1, -1, -1):
            c = round(mu[k][i])
            ties += abs(mu[k][i] - c) == Fraction(1, 2)
            B[k] = [x - c * y for x, y in zip(B[k], B[i], strict=True)]
            mu[k][i] -= c
            mu[k][:i] = [x - c * y for x, y in zip(mu[k][:i], mu[i][:i], strict=True)]
        m = mu[k][k - 1]
        length = d[k] + m * m * d[k - 1]  # of the new vector k-1
        ties += length == delta * d[k - 1]
        if length >= delta * d[k - 1]:
            k += 1
            continue
        B[k - 1], B[k] = B[k], B[k - 1]
        mu[k - 1][: k - 1], mu[k][: k - 1] = mu[k][: k - 1], mu[k - 1][: k - 1]
        mu[k][k - 1] = m * d[k - 1] / length
        d[k - 1], d[k] = length, d[k - 1] * d[k] / length
        for row in mu[k + 1 :]:
            row[k - 1], row[k] = row[k] + mu[k][k - 1] * (row[k - 1] - m * row[k]), row[k - 1] - m * row[k]
        k = max(k - 1, 1)
    return [[int(x) for x in row] for row in B], torch.tensor([float(x) for x in d], dtype=torch.float64), ties


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def integers(n, top, seed, kind="uniform"):
    """A basis of n integer rows: dense, or that of a q-ary lattice."""
    g = torch.Generator().manual_seed(seed)
    B = torch.randint(-top, top + 1, (n, n), generator=g)
    if kind == "uniform":
        return B
    half = n // 2
    B = torch.eye(n, dtype=torch.int64)
    B[:half] *= top
    B[half:, :half] = torch.randint(top, (n - half, half), generator=g)
    return B


def reduced_rows(B, **options):
    """Reduce integer rows by the library, whose first vector is LLL's last; rows and squared lengths in LLL's order."""
    mirrored = B.flip(0)
    found = reduce(factorize((mirrored @ mirrored.T).double(), damp=0.0), **options)
    return (found.T.T @ mirrored).flip(0), found.factor.d.flip(0), found


def triangular(A):
    """The factor of an upper triangular integer basis, rows in rounding order, without squaring it."""
    A, n = A.double(), len(A)
    dead = torch.zeros(n, dtype=torch.bool)
    return Factor(order=torch.arange(n), U=A / A.diagonal(), d=A.diagonal().square(), damp=0.0, shift=0.0, dead=dead)


def assert_reduced(found, delta=DELTA):
    """Check the definition on the factor itself: size-reduced, and Lovasz' condition."""
    U, d = found.factor.U, found.factor.d
    assert float(U.triu(1).abs().amax() if len(U) > 1 else 0) <= 0.5 + 1e-7
    assert bool((d[:-1] >= (delta - 1e-7 - U.diagonal(1).square()) * d[1:]).all())


def determinant(rows):
    """Of an integer matrix, exactly (Bareiss)."""
    M, sign, previous = [list(map(int, row)) for row in rows], 1, 1
    for k in range(len(M) - 1):
        pivot = next((i for i in range(k, len(M)) if M[i][k]), None)
        if pivot is None:
            return 0
        if pivot != k:
            M[k], M[pivot], sign = M[pivot], M[k], -sign
        for i in range(k + 1, len(M)):
            for j in range(k + 1, len(M)):
                M[i][j] = (M[i][j] * M[k][k] - M[i][k] * M[k][j]) // previous
        previous = M[k][k]
    return sign * M[-1][-1]


# --- the reduction ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", daily(range(6), range(2)))
@pytest.mark.parametrize(
    ("n", "top", "kind"), [(2, 1000, "uniform"), (5, 1000, "uniform"), (12, 1009, "q-ary"), (24, 100, "uniform")]
)
def test_equals_exact_rational_lll(n, top, kind, seed):
    """One window is the textbook's algorithm, exchange by exchange: the same basis to the integer, but for ties."""
    B = integers(n, top, seed, kind)
    rows, d, found = reduced_rows(B, window=n)
    expected, lengths, ties = textbook(B.tolist())
    assert_reduced(found)
    if not ties:
        assert rows.tolist() == expected
        torch.testing.assert_close(d, lengths, rtol=1e-10, atol=0)
    assert kind == "q-ary" or not ties


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("n", "top"), [(20, 1000), (40, 100)])
def test_equals_fpylll(n, top, seed):
    """The same vectors; signs too, since neither program changes one."""
    fpylll = pytest.importorskip("fpylll")
    B = integers(n, top, seed)
    rows, _, _ = reduced_rows(B, window=n)
    theirs = fpylll.LLL.reduction(fpylll.IntegerMatrix.from_matrix(B.tolist()), delta=DELTA, eta=0.5001)
    assert rows.tolist() == [[theirs[i, j] for j in range(n)] for i in range(n)]


@pytest.mark.parametrize("window", [8, 16, 30])
@pytest.mark.parametrize(("n", "top", "kind"), [(60, 100, "uniform"), (80, 1009, "q-ary")])
def test_windows_are_as_good_as_fpylll(n, top, kind, window):
    """Another order of exchanges, another reduced basis: judged by fpylll's own test, and by its potential."""
    fpylll = pytest.importorskip("fpylll")
    B = integers(n, top, 0, kind)
    rows, d, found = reduced_rows(B, window=window)
    mine = fpylll.IntegerMatrix.from_matrix(rows.tolist())
    assert fpylll.LLL.is_reduced(mine, delta=DELTA - 1e-6, eta=0.5 + 1e-6)
    theirs = fpylll.LLL.reduction(fpylll.IntegerMatrix.from_matrix(B.tolist()), delta=DELTA, eta=0.5001)
    M = fpylll.GSO.Mat(theirs)
    M.update_gso()
    lengths = torch.tensor([M.get_r(i, i) for i in range(n)], dtype=torch.float64)
    places = torch.arange(n, 0, -1)
    start = float((found.before.flip(0).log2() * places).sum())
    fallen = [start - float((x.log2() * places).sum()) for x in (lengths, d)]  # of the potential, in bits
    torch.testing.assert_close(d.log2().sum(), lengths.log2().sum(), rtol=0, atol=1e-6)
    assert fallen[1] > 0.97 * fallen[0]
    assert float(d[0]) <= 2 ** ((n - 1) / 2) * float(d.log2().mean().exp2())  # LLL's guarantee for the first vector


@settings(deadline=None)
@given(
    problems(kinds=("column",)),
    st.sampled_from(["natural", "activation", "pivoted", "reversed"]),
    st.sampled_from([2, 3, 64]),
)
def test_is_a_reduced_basis_of_the_same_lattice(p, order, window):
    """By definition; T has determinant 1 or -1; and the factor is that of the transformed Hessian."""
    factor = p.factor(order)
    step = p.grid.steps()[0]
    found = reduce(factor, step=step, window=window)
    assert_reduced(found)
    assert abs(determinant(found.T.tolist())) == 1
    assert torch.equal(found.T @ found.inverse, torch.eye(len(step), dtype=torch.int64))
    basis = step[:, None] * found.T
    G = basis.T @ p.damped_hessian(factor) @ basis
    U, d = found.factor.U, found.factor.d
    scale = G.diagonal().sqrt()
    torch.testing.assert_close((U * d @ U.T) / scale / scale[:, None], G / scale / scale[:, None], rtol=0, atol=1e-9)
    torch.testing.assert_close(d.log().sum(), found.before.log().sum(), rtol=0, atol=1e-6)


def test_a_large_basis_is_reduced_in_windows():
    """256 dimensions far from reduced (a q-ary lattice): by definition, and unimodular by the exact inverse."""
    rows, d, found = reduced_rows(integers(256, 1009, 0, "q-ary"))
    assert_reduced(found)
    assert torch.equal(found.T @ found.inverse, torch.eye(256, dtype=torch.int64))
    torch.testing.assert_close(d[0], rows[0].double().square().sum(), rtol=1e-9, atol=0)
    assert float(found.factor.d.sum()) < 0.9 * float(found.before.sum())  # and so is Babai's bound


def test_delta_makes_it_stricter():
    B = integers(40, 100, 3)
    for delta in (0.5, 0.75, 0.99):
        _, _, found = reduced_rows(B, delta=delta)
        assert_reduced(found, delta)
    potentials = [
        float((reduced_rows(B, delta=x)[1].log2() * torch.arange(40, 0, -1)).sum()) for x in (0.3, 0.75, 0.99)
    ]
    assert all(a > b for a, b in pairwise(potentials))


@pytest.mark.parametrize("n", [1, 7])
def test_identity_leaves_everything(n):
    """Nothing to reduce: T is the identity, in the order of the columns whatever the factor's order."""
    H = torch.eye(n, dtype=torch.float64)
    found = reduce(factorize(H, torch.arange(n - 1, -1, -1), damp=0.0))
    assert torch.equal(found.T, torch.eye(n, dtype=torch.int64).flip(1))
    assert torch.equal(found.factor.d, torch.ones(n, dtype=torch.float64))
    W = torch.randn(5, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(nearest_plane_reduced(W, one_step(n, 0.1), found).codes, (W / 0.1).round().int())


@pytest.mark.parametrize("delta", [0.25, 1.0])
def test_refuses_a_delta_without_a_guarantee(delta):
    with pytest.raises(NumericalError, match="1/4 < delta < 1"):
        reduce(factorize(torch.eye(3, dtype=torch.float64)), delta=delta)


@pytest.mark.parametrize("window", [8, 32])
def test_what_rotations_lose_is_reduced_again(window):
    """Entries of 2^20: after the first pass the exact integers are found not to be reduced, after the last they are."""
    A = integers(60, 2**20 + 1, 0, "q-ary").flip(0, 1)
    found = reduce(triangular(A), window=window)
    assert_reduced(found)
    rows = found.T.T @ A  # exact
    G = (rows @ rows.T).double()
    torch.testing.assert_close(factorize(G, damp=0.0).d, found.factor.d, rtol=1e-7, atol=0)


@pytest.mark.parametrize(("top", "n"), [(2**24 + 1, 128), (2**40, 40)])
def test_says_so_when_float64_cannot_hold_the_lattice(top, n):
    with pytest.raises(NumericalError, match="cannot be reduced in float64"):
        reduce(triangular(integers(n, top, 0, "q-ary").flip(0, 1)), window=8)


def test_does_not_go_on_for_ever():
    """A condition that no basis meets: vectors would change places again and again."""
    with pytest.raises(NumericalError, match="may never end"):
        _sweeps(np.eye(3), np.eye(3), 1.5, 3)


# --- Babai in the reduced basis --------------------------------------------------------------------------------------


def one_step(n, step):
    scale = torch.full((1, 1), step, dtype=torch.float64)
    return Grid(scale=scale, zero=torch.zeros_like(scale), group=torch.zeros(n, dtype=torch.int64))


def correlated(n, seed=0, out=6):
    """Inputs that are nearly one direction: LLL has something to do."""
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(4 * n, n, generator=g, dtype=torch.float64) * 0.1 + torch.randn(
        4 * n, 1, generator=g, dtype=torch.float64
    )
    return torch.randn(out, n, generator=g, dtype=torch.float64), X.T @ X / len(X)


@settings(deadline=None)
@given(problems(kinds=("tensor", "unclipped", "unclipped rows")), st.sampled_from(["natural", "activation", "pivoted"]))
def test_loss_is_within_the_reduced_profile(p, order):
    """`1/4 sum_j d'_j` bounds the damped loss of every row in the original coordinates; rows may have steps of their own."""
    factor = p.factor(order)
    grid = Grid(scale=p.grid.scale, zero=p.grid.zero, group=p.grid.group)
    found = reduce(factor)
    matrix = nearest_plane_reduced(p.W, grid, found)
    assert matrix.codes.dtype == torch.int32
    E = p.W - matrix.decode()
    bound = 0.25 * found.factor.d.sum() * grid.scale[:, 0].square()
    noise = 1e-9 * quadratic(p.W, p.damped_hessian(factor))
    assert bool((quadratic(E, p.damped_hessian(factor)) <= bound * (1 + 1e-9) + noise).all())


@settings(deadline=None)
@given(problems(kinds=("column",), damps=(0.01,)), st.integers(-9, 9))
def test_steps_of_columns_and_zeros_are_part_of_the_lattice(p, zero):
    """The bound with the grid's own steps; whole zeros only shift the codes."""
    factor, group = p.factor("natural"), p.grid.group
    scale = p.grid.scale
    found = reduce(factor, step=scale[0])
    plain = nearest_plane_reduced(p.W, Grid(scale=scale, zero=torch.zeros_like(scale), group=group), found)
    E = p.W - plain.decode()
    noise = 1e-9 * quadratic(p.W, p.damped_hessian(factor))
    assert bool((quadratic(E, p.damped_hessian(factor)) <= 0.25 * found.factor.d.sum() * (1 + 1e-9) + noise).all())
    shift = torch.full_like(scale, float(zero))
    exact = Grid(scale=torch.ones_like(scale), zero=shift, group=torch.zeros_like(group))
    W = torch.arange(p.W.numel()).reshape(p.W.shape).double()
    integer = nearest_plane_reduced(W, exact, reduce(factor))
    assert torch.equal(integer.codes, (W + zero).int())  # a lattice point rounds to itself


@pytest.mark.parametrize("order", ["natural", "pivoted"])
def test_equals_nearest_plane_when_the_basis_is_reduced_already(order):
    """Inputs without much correlation: T only carries the order, and the codes are those of the plain sweep."""
    p = problem(out=16, columns=24, tokens=4000, kind="unclipped")
    g = torch.Generator().manual_seed(1)
    X = torch.randn(4000, 24, generator=g, dtype=torch.float64)
    factor = factorize(X.T @ X / 4000, order)
    found = reduce(factor)
    assert torch.equal(found.T, torch.eye(24, dtype=torch.int64)[:, factor.order])
    codes = nearest_plane_reduced(p.W, p.grid, found).codes
    assert torch.equal(codes, nearest_plane(p.W, p.grid, factor).codes)


@pytest.mark.parametrize("seed", range(10))
def test_brute_force_is_never_beaten(seed):
    """Codes are points of the original lattice, so that none is closer than the closest."""
    W, H = correlated(3, seed, out=2)
    factor = factorize(H, damp=0.01)
    grid = one_step(3, 0.5)
    found = reduce(factor)
    damped = H + factor.shift * torch.eye(3, dtype=torch.float64)
    losses = quadratic(W - nearest_plane_reduced(W, grid, found).decode(), damped)
    for w, loss in zip(W, losses, strict=True):
        best = closest_vector(w, damped, torch.full((3,), 0.5, dtype=torch.float64), float(loss))
        assert best is not None
        assert best <= float(loss) * (1 + 1e-9)


def test_pays_where_inputs_are_nearly_one_direction():
    """There no order has short lengths that are alike; at equal step the mean loss of many rows is lower than in any."""
    W, H = correlated(32, out=2000)
    grid = one_step(32, 0.5)
    natural, pivoted = factorize(H, damp=1e-4), factorize(H, "pivoted", damp=1e-4)
    found = reduce(natural)
    loss = float(quadratic(W - nearest_plane_reduced(W, grid, found).decode(), H).mean())
    for factor in (natural, pivoted):
        assert float(found.factor.d.sum()) < float(factor.d.sum())
        assert loss < float(quadratic(W - nearest_plane(W, grid, factor).decode(), H).mean())


def test_refuses_grids_that_clip_or_are_not_parallel():
    W, H = correlated(4)
    found = reduce(factorize(H))
    group = torch.arange(4)
    scale = torch.tensor([[1.0, 1.0, 1.0, 1.1]], dtype=torch.float64)
    with pytest.raises(NumericalError, match="cannot be clipped"):
        nearest_plane_reduced(W, Grid(scale=scale, zero=torch.zeros_like(scale), group=group, low=0, high=3), found)
    with pytest.raises(NumericalError, match="not parallel"):
        nearest_plane_reduced(W, Grid(scale=scale, zero=torch.zeros_like(scale), group=group), found)
    with pytest.raises(NumericalError, match="not finite"):
        nearest_plane_reduced(W * torch.nan, one_step(4, 1.0), found)


def test_refuses_codes_beyond_32_bits():
    """In the reduced basis, and in the original one."""
    found = reduce(triangular(torch.tensor([[1, 1000], [0, 1]])))
    with pytest.raises(NumericalError, match="reduced basis"):
        nearest_plane_reduced(torch.tensor([[3e9, 0.0]]), one_step(2, 1.0), found)
    point = torch.tensor([[3e6, -3e9]], dtype=torch.float64)
    with pytest.raises(NumericalError, match="does not fit 32 bits"):
        nearest_plane_reduced(point, one_step(2, 1.0), found)
    assert nearest_plane_reduced(point / 3, one_step(2, 1.0), found).codes.tolist() == [[1_000_000, -1_000_000_000]]

"""The factor from a root of the inputs equals the factor of their Hessian, and keeps digits where that one has none."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice.factor import Factor, factorize
from nearplane.theory.qr_factor import ROWS_PER_COLUMN, append, factorize_inputs, factorize_root
from nightly import daily
from oracles import min_pivot, ql, same
from strategies import ORDERS, Problem, problem, problems

NAMED = ORDERS[:-1]


def from_root(p: Problem, order: str) -> Factor:
    return factorize_inputs(p.X, p.permutation if order == "given" else order, damp=p.damp)


@settings(deadline=None)
@given(problems(), st.sampled_from(ORDERS))
def test_the_factor_is_the_one_of_the_hessian(p: Problem, order: str) -> None:
    """Of every order and damping, with fewer tokens than inputs and dead ones; problems whose pivots tie are left out."""
    expected = p.factor(order)
    assume(order != "pivoted" or min_pivot(p.damped_hessian(expected))[1] > 1e-9)
    found = from_root(p, order)
    assert torch.equal(found.order, expected.order)
    assert torch.equal(found.dead, expected.dead)
    assert found.damp == expected.damp
    assert found.shift == pytest.approx(expected.shift, rel=1e-12)
    assert float((found.d / expected.d - 1).abs().max()) < 1e-10
    assert float((found.U - expected.U).norm() / expected.U.norm()) < 1e-10


@settings(deadline=None)
@given(problems(full_rank=True, dead=0, damps=(0.0,)), st.sampled_from(ORDERS))
def test_undamped_it_is_the_ql_decomposition_of_the_data(p: Problem, order: str) -> None:
    """[B25] takes `L` of `X = Q L`; here `U sqrt(d) = L^T / sqrt(tokens)`."""
    factor = from_root(p, order)
    assert same(factor.U * factor.d.sqrt() * len(p.X) ** 0.5, ql(p.X[:, factor.order])[1].T)


@settings(deadline=None)
@given(problems())
def test_a_root_is_triangular_and_squares_to_the_gram_matrix(p: Problem) -> None:
    R = append(None, p.X)
    assert same(R.T @ R, p.X.T @ p.X)
    assert torch.equal(R, R.triu())
    assert bool((R.diagonal() >= 0).all())


@settings(deadline=None)
@given(problems(full_rank=True, dead=0), st.integers(1, 40))
def test_streamed_it_is_the_root_of_all_rows_at_once(p: Problem, rows: int) -> None:
    R = None
    for part in p.X.split(rows):
        R = append(R, part)
    assert same(R, append(None, p.X))


def test_many_rows_are_taken_in_blocks(generator: torch.Generator) -> None:
    X = torch.randn(3 * ROWS_PER_COLUMN * 5 + 2, 5, generator=generator, dtype=torch.float64)
    assert same(append(None, X), torch.linalg.cholesky(X.T @ X).T)


@pytest.mark.parametrize("order", NAMED)
@pytest.mark.parametrize("damp", [0.0, 0.01, "auto"])
def test_dead_inputs_are_stepped_over(order: str, damp: float | str) -> None:
    """They neither receive nor hand on an error, to the bit; an input that never was anything but 0 can be factored."""
    p = problem(dead=3)
    factor = factorize_root(append(None, p.X), len(p.X), order, damp=damp)
    dead = factor.dead[factor.order]
    assert torch.equal(factor.dead, (p.X == 0).all(0))
    assert int(dead.sum()) == 3
    off = factor.U - torch.eye(len(dead), dtype=torch.float64)
    assert not bool(off[dead].any())
    assert not bool(off[:, dead].any())
    assert factor.d[dead].tolist() == [factor.shift or 1.0] * 3
    nothing = factorize_root(torch.zeros(4, 4, dtype=torch.float64), 7, order, damp=damp)
    assert torch.equal(nothing.U, torch.eye(4, dtype=torch.float64))
    assert bool(nothing.dead.all())


def test_auto_is_the_smallest_damping() -> None:
    p = problem(tokens=3)
    assert factorize_root(append(None, p.X), 3, damp="auto").damp == factorize(p.H, damp="auto").damp == 1e-4


@pytest.mark.parametrize("order", NAMED)
def test_inputs_that_depend_on_each_other_are_refused_undamped(order: str) -> None:
    """Column 2 is a combination of 1 and 3: whichever is eliminated last has only a rounding error left."""
    X = problem().X.clone()
    X[:, 2] = X[:, 1] / 3 - X[:, 3]
    with pytest.raises(NumericalError, match=r"column [123] .*damping 0\.0"):
        factorize_root(append(None, X), len(X), order, damp=0.0)


def test_the_refusal_names_the_column_at_which_elimination_fails() -> None:
    """With fewer tokens than inputs the last ones exhaust the rank, and the one before them has no length left."""
    p = problem(tokens=5)
    R = append(None, p.X)
    with pytest.raises(NumericalError, match="column 2 "):
        factorize_root(R, 5, "natural", damp=0.0)
    with pytest.raises(NumericalError, match="column 5 "):
        factorize_root(R, 5, "reversed", damp=0.0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_root_that_is_not_finite_is_refused(value: float) -> None:
    R = torch.eye(3, dtype=torch.float64)
    R[0, 1] = value
    with pytest.raises(NumericalError, match="NaN or Inf"):
        factorize_root(R, 3)


def test_inputs_and_roots_are_left_as_they_are() -> None:
    X = problem(dead=2).X
    R = append(None, X)
    before = X.clone(), R.clone()
    append(R, X)
    for order in NAMED:
        factorize_root(R, len(X), order)
    assert torch.equal(X, before[0])
    assert torch.equal(R, before[1])


def hard(condition: float, dtype: torch.dtype, seed: int) -> Tensor:
    """Return (64, 16) rows with singular values from 1 down to 1 / condition, evenly in their logarithm."""
    g = torch.Generator().manual_seed(seed)
    Q, V = (torch.linalg.qr(torch.randn(rows, 16, generator=g, dtype=torch.float64))[0] for rows in (64, 16))
    return (Q * condition ** -torch.linspace(0, 1, 16, dtype=torch.float64) @ V.T).to(dtype)


def exact_lengths(X: Tensor) -> list[Fraction]:
    """Return `tokens * d` in natural order in rational numbers: no rounding at all."""
    rows = [[Fraction(x) for x in row] for row in X.tolist()]
    n = X.shape[1]
    H = [[sum((row[i] * row[j] for row in rows), Fraction(0)) for j in range(n)] for i in range(n)]
    for k in reversed(range(n)):
        for i in range(k):
            for j in range(k):
                H[i][j] -= H[i][k] * H[k][j] / H[k][k] if j <= i else 0
        for i in range(k):
            for j in range(i):
                H[j][i] = H[i][j]
    return [H[k][k] for k in range(n)]


def error(make: Callable[[], Factor], exact: list[Fraction]) -> float:
    """Return the largest relative error of `d`; infinite where there is no factor."""
    try:
        d = make().d.double().tolist()
    except NumericalError:
        return torch.inf
    return max(abs(float(Fraction(found) * 64 / length - 1)) for found, length in zip(d, exact, strict=True))


@pytest.mark.parametrize("seed", daily(range(3), [0]))
@pytest.mark.parametrize(
    ("dtype", "condition"),
    [
        (torch.float32, 1e2),
        (torch.float32, 1e4),
        (torch.float32, 1e5),
        (torch.float32, 1e6),
        (torch.float64, 1e5),
        (torch.float64, 1e8),
        (torch.float64, 1e10),
        (torch.float64, 1e12),
    ],
)
def test_qr_loses_digits_with_the_condition_and_cholesky_with_its_square(
    dtype: torch.dtype, condition: float, seed: int
) -> None:
    """Relative error of `d` against rational arithmetic, measured over three seeds, Cholesky of H and QR in one dtype:

    | float32, condition | 1e2 | 1e4 | 1e5 | 1e6 | float64, condition | 1e5 | 1e8 | 1e10 | 1e12 |
    |---|---|---|---|---|---|---|---|---|---|
    | Cholesky | 1e-4 | 2 | fails | fails | Cholesky | 1e-7 | 0.2 | fails | fails |
    | QR | 2e-6 | 1e-4 | 5e-4 | 5e-3 | QR | 1e-12 | 1e-9 | 3e-8 | 3e-5 |

    Cholesky's smallest constant depends on how many threads multiply: 0.0055 eps condition^2 with one, 0.01 with two.
    """
    X = hard(condition, dtype, seed)
    exact, eps = exact_lengths(X), torch.finfo(dtype).eps
    by_cholesky = error(lambda: factorize(X.T @ X / 64, damp=0.0), exact)
    by_qr = error(lambda: factorize_root(append(None, X, dtype=dtype), 64, damp=0.0), exact)
    assert by_qr < eps * condition
    assert by_cholesky > 10 * by_qr
    assert by_cholesky > min(1e-2, 1e-3 * eps * condition**2)  # infinite: no factor at all


@pytest.mark.parametrize("condition", [1e5, 1e6])
def test_float32_inputs_keep_eleven_digits_where_float32_products_leave_no_hessian_to_factor(condition: float) -> None:
    """Summing the products in float64 does not help: they were rounded before. Measured: 1e-12 and 8e-12."""
    X = hard(condition, torch.float32, 0)
    exact = exact_lengths(X)
    H = sum((part.T @ part).double() for part in X.split(16)) / 64
    assert error(lambda: factorize(H, damp=0.0), exact) == torch.inf
    assert error(lambda: factorize_root(append(None, X), 64, damp=0.0), exact) < 3e-11

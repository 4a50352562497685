"""The factorization and the orders."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from nearplane.errors import NumericalError
from nearplane.lattice.factor import factorize, order_by
from oracles import inv, min_pivot, same, unit_upper
from strategies import ORDERS, Problem, problem, problems

NAMED = ORDERS[:-1]


@given(problems(), st.sampled_from(ORDERS))
def test_the_factor_reproduces_the_damped_hessian_in_rounding_order(p: Problem, order: str) -> None:
    factor = p.factor(order)
    H = p.damped_hessian(factor)[factor.order][:, factor.order]
    assert same(factor.U * factor.d @ factor.U.T, H)
    assert torch.equal(factor.U, factor.U.triu())
    assert torch.equal(factor.U.diagonal(), torch.ones_like(factor.d))
    assert bool((factor.d > 0).all())
    assert torch.equal(factor.order.sort().values, torch.arange(len(H)))


@given(problems(), st.sampled_from(ORDERS))
def test_u_and_d_are_the_unit_upper_factor_that_the_seeds_invert_for(p: Problem, order: str) -> None:
    """`H = U diag(d) U^T` with U unit upper is unique."""
    factor = p.factor(order)
    assert same(factor.U, unit_upper(p.damped_hessian(factor)[factor.order][:, factor.order]))


@given(problems(), st.sampled_from(ORDERS))
def test_solve_is_a_solve_with_the_damped_hessian(p: Problem, order: str) -> None:
    factor = p.factor(order)
    assert same(factor.solve(p.W), torch.linalg.solve(p.damped_hessian(factor), p.W.T).T)


@given(problems())
def test_damping_is_relative_to_the_mean_of_the_diagonal(p: Problem) -> None:
    factor = p.factor("natural")
    assert factor.damp == p.damp
    assert factor.shift == p.damp * float(p.H.diagonal().mean())


@given(problems(), st.sampled_from(ORDERS))
def test_the_determinant_does_not_depend_on_the_order(p: Problem, order: str) -> None:
    assert same(p.factor(order).d.log().sum(), p.factor("natural").d.log().sum())


def test_the_named_orders_are_what_they_say() -> None:
    p = problem(columns=8)
    H = p.H
    assert order_by(H.diagonal(), "natural").tolist() == list(range(8))
    assert order_by(H.diagonal(), "reversed").tolist() == list(range(8))[::-1]
    diagonal = H.diagonal()[order_by(H.diagonal(), "activation")]
    assert bool((diagonal.diff() <= 0).all())
    assert torch.equal(factorize(H, p.permutation).order, p.permutation)


@given(problems(dead=1))
def test_the_pivoted_order_is_algorithm_4_of_chen_et_al_reversed(p: Problem) -> None:
    """What is eliminated last is rounded first. Problems are left out whose choice hangs on rounding errors."""
    factor = p.factor("pivoted")
    sequence, gap = min_pivot(p.damped_hessian(factor))
    assume(gap > 1e-9)
    assert torch.equal(factor.order, sequence.flip(0))


def test_equal_inputs_are_rounded_in_column_order_by_activation() -> None:
    assert factorize(torch.eye(5, dtype=torch.float64), "activation").order.tolist() == [0, 1, 2, 3, 4]


@given(problems(dead=3), st.sampled_from(ORDERS))
def test_dead_inputs_are_stepped_over(p: Problem, order: str) -> None:
    """They neither receive nor hand on an error, and the others are factored as if they were not there."""
    factor = p.factor(order)
    assert torch.equal(factor.dead, (p.X == 0).all(0))
    dead = factor.dead[factor.order]
    off = factor.U - torch.eye(len(dead), dtype=torch.float64)
    assert not bool(off[dead].any())
    assert not bool(off[:, dead].any())
    live = factor.order[~dead]
    H = p.damped_hessian(factor)[live][:, live]
    assert same(factor.U[~dead][:, ~dead], unit_upper(H))


@pytest.mark.parametrize("damp", [0.0, 0.01, "auto"])
@pytest.mark.parametrize("order", NAMED)
def test_an_input_that_never_was_anything_but_0_can_still_be_factored(order: str, damp: float | str) -> None:
    factor = factorize(torch.zeros(4, 4, dtype=torch.float64), order, damp=damp)
    assert bool(factor.dead.all())
    assert torch.equal(factor.U, torch.eye(4, dtype=torch.float64))
    H = torch.diag(torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64))
    assert factorize(H, order, damp=damp).dead.tolist() == [False, True, False]


@pytest.mark.parametrize("expected", [1e-4, 1e-3, 1e-2, 1e-1, 1.0])
def test_auto_takes_the_first_damping_that_factors(expected: float) -> None:
    """One eigenvalue is negative by a third of what `expected` adds."""
    H = torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64))
    H[3, 3] = -expected * 0.75 / (3 + 0.75 * expected)
    assert factorize(H, damp="auto").damp == expected
    with pytest.raises(NumericalError):
        factorize(H, damp=expected / 10)


@pytest.mark.parametrize("order", NAMED)
def test_a_hessian_that_is_not_positive_definite_is_refused_by_column_and_damping(order: str) -> None:
    H = torch.eye(5, dtype=torch.float64)
    H[2, 2] = -1
    with pytest.raises(NumericalError, match=r"column 2 .*damping 0\.01"):
        factorize(H, order, damp=0.01)


def test_the_refusal_names_the_column_at_which_elimination_fails() -> None:
    """Columns 1 and 3 are each fine but not together: the one that is eliminated second is named."""
    H = torch.eye(5, dtype=torch.float64)
    H[1, 3] = H[3, 1] = 2
    with pytest.raises(NumericalError, match="column 1 "):
        factorize(H, "natural")
    with pytest.raises(NumericalError, match="column 3 "):
        factorize(H, "reversed")


def test_auto_gives_up_at_the_largest_damping() -> None:
    H = torch.diag(torch.tensor([1.0, 1.0, 1.0, -2.9], dtype=torch.float64))
    with pytest.raises(NumericalError, match="auto"):
        factorize(H, damp="auto")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_hessian_that_is_not_finite_is_refused(value: float) -> None:
    H = torch.eye(3, dtype=torch.float64)
    H[0, 1] = value
    with pytest.raises(NumericalError, match="NaN or Inf"):
        factorize(H)


def test_the_factor_has_the_dtype_that_is_asked_for() -> None:
    H = problem().H
    single = factorize(H, dtype=torch.float32)
    assert (single.U.dtype, single.d.dtype) == (torch.float32, torch.float32)
    assert factorize(H).U.dtype == torch.float64


def test_factoring_leaves_the_hessian_as_it_is() -> None:
    H = problem(dead=2).H
    before = H.clone()
    for order in NAMED:
        factorize(H, order)
    assert torch.equal(H, before)


def test_the_inverse_of_the_factor_is_the_lower_factor_of_gptq() -> None:
    """The papers' L of `H^-1 = L D^-1 L^T` is `U^-T`: nothing that GPTQ does needs the inverse of the Hessian."""
    p = problem()
    factor = p.factor("natural")
    L = inv(factor.U).T
    assert same(L / factor.d @ L.T, inv(p.damped_hessian(factor)))


def test_auto_takes_float32_where_it_is_good_and_float64_where_it_is_not(generator: torch.Generator) -> None:
    """Good: the lengths agree with float64 to a thousandth."""
    X = torch.randn(400, 60, generator=generator, dtype=torch.float64)
    spectrum = torch.arange(1, 61, dtype=torch.float64) ** -3
    easy, hard = (
        X * scale @ torch.linalg.qr(torch.randn(60, 60, generator=generator, dtype=torch.float64))[0]
        for scale in (1.0, spectrum)
    )
    for rows, damp, expected in ((easy, 0.01, torch.float32), (hard, 1e-8, torch.float64)):
        H = rows.T @ rows / len(rows)
        found, exact = factorize(H, damp=damp, dtype="auto"), factorize(H, damp=damp)
        assert found.d.dtype == expected
        assert float((found.d / exact.d - 1).abs().max()) < 1e-3

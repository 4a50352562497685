"""Nearest plane against every algorithm it is claimed to equal, and the invariances of a lattice.

Codes are compared one by one. Problems in which some oracle stood within 1e-9 steps of a tie are left out (`assume`):
there rounding errors decide, and both codes are right. They are met about once in a million.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nearplane.errors import NumericalError
from nearplane.lattice.factor import factorize
from nearplane.lattice.grid import Grid
from nearplane.lattice.solvers import nearest_plane, round_to_nearest
from oracles import ALL, Rounding, damped, gptq, gptq_recursive, lagrange, ql, run, same
from strategies import KINDS, ORDERS, UNCLIPPED, Kind, Problem, problem, problems

TIE = 1e-9


def unit_grid(columns: int, step: float = 1.0) -> Grid:
    """Return the integers times a step, unbounded."""
    one = torch.full((1, 1), step, dtype=torch.float64)
    return Grid(scale=one, zero=torch.zeros_like(one), group=torch.zeros(columns, dtype=torch.int64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALL)
def test_codes_equal_those_of_every_algorithm_of_the_seeds(name: str, kind: Kind) -> None:
    """GPTQ in all its forms is Babai's nearest plane ([C25] Theorem 1), for whatever grid and order."""

    @settings(max_examples=settings().max_examples // 5)  # for each of a hundred pairs
    @given(problems((kind,)), st.sampled_from(ORDERS))
    def check(p: Problem, order: str) -> None:
        factor = p.factor(order)
        expected, rounding = run(name, p.W, p.data(factor), p.grid, factor.order)
        assume(rounding.margin > TIE)
        assert torch.equal(nearest_plane(p.W, p.grid, factor).codes, expected)

    check()


@given(problems(damps=(0.1, 1.0)), st.sampled_from(ORDERS))
def test_one_more_gptq_update_after_a_step_of_babai_changes_nothing(p: Problem, order: str) -> None:
    """[C25] F.4: the update lies in the direction that the step has already settled.

    Damping is large, for the targets' sake: the papers' factors of an inverse lose digits by its condition.
    """
    factor = p.factor(order)
    X = p.data(factor)
    codes, plain = run("C25 3 Babai", p.W, X, p.grid, factor.order)
    more, updated = run("C25 F.4 Babai and GPTQ", p.W, X, p.grid, factor.order)
    assume(min(plain.margin, updated.margin) > TIE)
    assert torch.equal(more, codes)
    assert same(updated.targets, plain.targets)


@given(problems(), st.sampled_from(ORDERS), st.integers(0, 2**32 - 1))
def test_any_factor_of_the_hessian_gives_the_same_codes(p: Problem, order: str, seed: int) -> None:
    """[C25] Theorem 5: the data may be rotated, or replaced by a square root of the Hessian."""
    factor = p.factor(order)
    X, H = p.data(factor), p.damped_hessian(factor)
    rotation = torch.linalg.qr(
        torch.randn(len(X), len(X), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ).Q
    values, vectors = torch.linalg.eigh(H)
    codes = nearest_plane(p.W, p.grid, factor).codes
    for basis in (rotation @ X, ql(X)[1], torch.linalg.cholesky(H).T, vectors * values.sqrt() @ vectors.T):
        other, rounding = run("B25 BABAI", p.W, basis, p.grid, factor.order)
        assume(rounding.margin > TIE)
        assert torch.equal(other, codes)


@given(problems(), st.sampled_from(ORDERS))
def test_rows_share_the_factor_whatever_their_steps(p: Problem, order: str) -> None:
    """[C25] Theorem 6: each row alone has the codes it has in the matrix."""
    factor = p.factor(order)
    codes = nearest_plane(p.W, p.grid, factor).codes
    assume(run("C25 1 relative error", p.W, p.data(factor), p.grid, factor.order)[1].margin > TIE)
    for i in range(len(p.W)):
        row = slice(i, i + 1) if len(p.grid.scale) > 1 else slice(None)
        alone = replace(p.grid, scale=p.grid.scale[row], zero=p.grid.zero[row])
        assert torch.equal(nearest_plane(p.W[i : i + 1], alone, factor).codes, codes[i : i + 1])


@given(problems(), st.sampled_from(ORDERS), st.integers(1, 11))
def test_the_block_size_does_not_change_codes(p: Problem, order: str, block: int) -> None:
    factor = p.factor(order)
    assume(run("F22 lazy blocks", p.W, p.data(factor), p.grid, factor.order)[1].margin > TIE)
    assert torch.equal(nearest_plane(p.W, p.grid, factor, block=block).codes, nearest_plane(p.W, p.grid, factor).codes)


@given(problems(), st.sampled_from(ORDERS))
def test_an_order_only_permutes_the_problem(p: Problem, order: str) -> None:
    factor = p.factor(order)
    order_ = factor.order
    assume(run("C25 1 relative error", p.W, p.data(factor), p.grid, order_)[1].margin > TIE)
    natural = factorize(p.H[order_][:, order_], damp=p.damp)
    permuted = nearest_plane(p.W[:, order_], replace(p.grid, group=p.grid.group[order_]), natural)
    assert torch.equal(permuted.codes, nearest_plane(p.W, p.grid, factor).codes[:, order_])


@given(problems(UNCLIPPED), st.sampled_from(ORDERS), st.integers(0, 2**32 - 1))
def test_shifting_the_weights_by_a_lattice_vector_shifts_the_codes(p: Problem, order: str, seed: int) -> None:
    factor = p.factor(order)
    assume(run("C25 1 relative error", p.W, p.data(factor), p.grid, factor.order)[1].margin > TIE)
    shift = torch.randint(-99, 100, p.W.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    shifted = nearest_plane(p.W + p.grid.steps() * shift, p.grid, factor)
    assert torch.equal(shifted.codes, nearest_plane(p.W, p.grid, factor).codes + shift)


@given(problems(), st.sampled_from(ORDERS), st.sampled_from((-40, -1, 1, 40)), st.sampled_from((-40, 1, 40)))
def test_scaling_weights_and_steps_together_or_the_inputs_changes_nothing(
    p: Problem, order: str, weights: int, inputs: int
) -> None:
    """By powers of two, which floating point multiplies exactly: no tie can be decided otherwise."""
    factor = p.factor(order)
    a, b = 2.0**weights, 4.0**inputs
    scaled_factor = factorize(p.H * b, factor.order, damp=p.damp)
    scaled = nearest_plane(a * p.W, replace(p.grid, scale=a * p.grid.scale), scaled_factor)
    assert torch.equal(scaled.codes, nearest_plane(p.W, p.grid, factor).codes)


@given(problems(), st.sampled_from(ORDERS))
def test_where_inputs_do_not_interact_everything_is_round_to_nearest(p: Problem, order: str) -> None:
    H = torch.diag(p.H.diagonal())
    factor = factorize(H, p.permutation if order == "given" else order, damp=p.damp)
    assert torch.equal(nearest_plane(p.W, p.grid, factor).codes, round_to_nearest(p.W, p.grid).codes)


@given(problems(), st.sampled_from(ORDERS))
def test_a_matrix_on_the_grid_stays_as_it_is(p: Problem, order: str) -> None:
    codes = round_to_nearest(p.W, p.grid).codes
    matrix = nearest_plane(p.grid.decode(codes), p.grid, p.factor(order))
    assert torch.equal(matrix.codes, codes)
    assert matrix.grid is p.grid


@given(problems(dead=3), st.sampled_from(ORDERS))
def test_the_codes_of_live_columns_do_not_depend_on_dead_ones(p: Problem, order: str) -> None:
    factor = p.factor(order)
    assume(run("C25 1 relative error", p.W, p.data(factor), p.grid, factor.order)[1].margin > TIE)
    live = (~factor.dead).nonzero()[:, 0]
    codes = nearest_plane(p.W, p.grid, factor).codes
    other = nearest_plane(p.W.masked_fill(factor.dead, 0), p.grid, factor).codes
    assert torch.equal(other[:, live], codes[:, live])
    alone = damped(p.X, factor.shift)[:, live]
    rank = torch.empty_like(factor.order)
    rank[live] = torch.arange(len(live))
    grid = replace(p.grid, group=p.grid.group[live])
    without, _ = run("C25 1 relative error", p.W[:, live], alone, grid, rank[factor.order[~factor.dead[factor.order]]])
    assert torch.equal(codes[:, live], without)


def test_the_worked_example_moves_the_second_weight_to_0_4() -> None:
    """w = (0.8, 0.6), H^-1 = [[1, -1], [-1, 2]]; rounding w_0 to 1.0 moves w_1 to 0.4."""
    H = torch.tensor([[2.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    W = torch.tensor([[0.8, 0.6]], dtype=torch.float64)
    factor = factorize(H, damp=0.0)
    value = torch.tensor(1.0, dtype=torch.float64)
    assert same(W[0, 1] + (W[0, 0] - value) * factor.U[0, 1], torch.tensor(0.4, dtype=torch.float64))
    assert nearest_plane(W, unit_grid(2), factor).codes.tolist() == [[1, 0]]
    assert round_to_nearest(W, unit_grid(2)).codes.tolist() == [[1, 1]]
    rounding = Rounding.of(unit_grid(2), 1, torch.arange(2))
    assert lagrange(W.T, torch.linalg.cholesky(H).T, rounding).flatten().tolist() == [1, 0]
    assert same(rounding.targets[1], torch.tensor([0.4], dtype=torch.float64))


def test_without_the_downdate_the_lagrange_update_is_right_for_the_first_column_only() -> None:
    """Tutorial 2's loop keeps the full inverse; the downdate, or a Cholesky factor, is what makes it GPTQ."""
    p = problem(columns=8, kind="unclipped")
    X = p.data(p.factor("natural"))
    with_, without, reference = (Rounding.of(p.grid, 4, torch.arange(8)) for _ in range(3))
    codes = gptq(p.W.T, X, reference)
    assert torch.equal(lagrange(p.W.T, X, with_), codes)
    assert not torch.equal(lagrange(p.W.T, X, without, downdate=False), codes)
    assert same(without.targets[:2], reference.targets[:2])
    assert not same(without.targets[2], reference.targets[2])


def test_the_recursion_as_printed_differs_by_its_misprint() -> None:
    """[B25] GPTQ-REC divides by L_11 where it must be M_11."""
    p = problem(columns=8, kind="unclipped")
    factor = p.factor("natural")
    mended, printed = (
        gptq_recursive(p.W.T, p.data(factor), Rounding.of(p.grid, 4, torch.arange(8)), as_printed=as_printed)
        for as_printed in (False, True)
    )
    codes = nearest_plane(p.W, p.grid, factor).codes
    assert torch.equal(mended.T.int(), codes)
    assert not torch.equal(printed.T.int(), codes)


@given(problems())
def test_codes_are_32_bit_integers_of_the_shape_of_the_weight(p: Problem) -> None:
    for matrix in (nearest_plane(p.W, p.grid, p.factor("pivoted")), round_to_nearest(p.W, p.grid)):
        assert matrix.codes.dtype == torch.int32
        assert matrix.codes.shape == p.W.shape
        assert matrix.codes.is_contiguous()


def test_solving_leaves_weights_and_steps_as_they_are() -> None:
    p = problem()
    W, scale = p.W.clone(), p.grid.scale.clone()
    nearest_plane(p.W, p.grid, p.factor("activation"))
    round_to_nearest(p.W, p.grid)
    assert torch.equal(p.W, W)
    assert torch.equal(p.grid.scale, scale)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    p = problem()
    p.W[1, 2] = value
    with pytest.raises(NumericalError, match="NaN or Inf"):
        nearest_plane(p.W, p.grid, p.factor("natural"))
    with pytest.raises(NumericalError, match="NaN or Inf"):
        round_to_nearest(p.W, p.grid)

"""The table of solvers: its names are those that a recipe takes, and every line keeps what it promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice.bounds import quadratic
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.solvers import SOLVERS, nearest_plane
from nearplane.lattice.solvers import Problem as Given
from nearplane.recipe.scheme import Solver
from nearplane.recipe.schemes import GridScheme
from strategies import KINDS, ORDERS, UNCLIPPED, Problem, problem, problems

CLIPPED = tuple(kind for kind in KINDS if kind not in UNCLIPPED)
BEAMS = (1, 2, 5)


def given_to(p: Problem, order: str, beam: int = 1) -> Given:
    """Return a problem as the solvers are given it."""
    factor = p.factor(order)
    return Given(W=p.W, grid=p.grid, factor=factor, H=p.H, shift=factor.shift, beam=beam)


def losses(p: Given, matrix: QuantizedMatrix[Grid]) -> Tensor:
    """Return (out,) the damped loss of every row."""
    H = p.H + p.shift * torch.eye(len(p.H), dtype=p.H.dtype)
    return quadratic(p.W - matrix.decode(), H)


def test_a_recipe_takes_the_solvers_of_the_table_and_no_others() -> None:
    """`schemes/` writes them out, as it may not import what needs torch."""
    assert set(SOLVERS) == set(Solver.__args__)
    assert all(GridScheme(solver=name).solver == name for name in SOLVERS)


@pytest.mark.parametrize("name", SOLVERS)
@given(problems(), st.sampled_from(ORDERS), st.sampled_from(BEAMS))
def test_codes_are_of_the_grid_that_was_given(name: str, p: Problem, order: str, beam: int) -> None:
    found = SOLVERS[name].round(given_to(p, order, beam)).matrix
    assert found.codes.dtype == torch.int32
    assert found.codes.shape == p.W.shape
    assert torch.equal(found.grid.scale, p.grid.scale)
    if p.grid.low is not None:
        assert int(found.codes.min()) >= p.grid.low
    if p.grid.high is not None:
        assert int(found.codes.max()) <= p.grid.high


@pytest.mark.parametrize("name", [name for name, solver in SOLVERS.items() if solver.bounded])
@pytest.mark.parametrize("kinds", [UNCLIPPED, CLIPPED], ids=["unclipped", "clipped"])
def test_bounded_solvers_lose_no_more_than_nearest_plane_in_any_row(name: str, kinds: tuple) -> None:
    @given(problems(kinds), st.sampled_from(ORDERS), st.sampled_from(BEAMS))
    def check(p: Problem, order: str, beam: int) -> None:
        asked = given_to(p, order, beam)
        least = losses(asked, nearest_plane(asked.W, asked.grid, asked.factor))
        noise = 1e-12 * quadratic(p.W, p.damped_hessian(asked.factor))
        assert bool((losses(asked, SOLVERS[name].round(asked).matrix) <= least * (1 + 1e-12) + noise).all())

    check()


@pytest.mark.parametrize("name", [name for name, solver in SOLVERS.items() if not solver.bounded])
def test_other_solvers_lose_more_on_some_problems(name: str) -> None:
    """So that the table does not say too little."""
    worse = 0
    for seed in range(20):
        asked = given_to(problem(seed=seed, out=8, columns=12, tokens=24, kind="asymmetric", bits=2), "pivoted")
        least = losses(asked, nearest_plane(asked.W, asked.grid, asked.factor))
        worse += bool((losses(asked, SOLVERS[name].round(asked).matrix) > least * (1 + 1e-9)).any())
    assert worse


def unknown_inputs(p: Given) -> Given:
    """Return the problem with a Hessian and a factor of which nothing is known."""
    factor = replace(p.factor, U=torch.full_like(p.factor.U, torch.nan), d=torch.full_like(p.factor.d, torch.nan))
    return replace(p, H=torch.full_like(p.H, torch.nan), factor=factor, shift=float("nan"))


@pytest.mark.parametrize("name", SOLVERS)
def test_only_solvers_that_need_no_inputs_do_without(name: str) -> None:
    asked = given_to(problem(out=6, columns=10), "activation", 2)
    if SOLVERS[name].needs_inputs:
        with pytest.raises(NumericalError, match="NaN or Inf"):
            SOLVERS[name].round(unknown_inputs(asked))
        other = given_to(problem(out=6, columns=10, tokens=12), "activation", 2)
        other = replace(other, W=asked.W, grid=asked.grid)
        assert not torch.equal(SOLVERS[name].round(other).matrix.codes, SOLVERS[name].round(asked).matrix.codes)
    else:
        assert torch.equal(
            SOLVERS[name].round(unknown_inputs(asked)).matrix.codes, SOLVERS[name].round(asked).matrix.codes
        )

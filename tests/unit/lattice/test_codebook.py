"""Grids of levels (FP4, NF4): solved, polished and beamed by the same code as grids of integers."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from nearplane.errors import RecipeError
from nearplane.lattice.beam import k_best
from nearplane.lattice.bounds import certify
from nearplane.lattice.factor import factorize
from nearplane.lattice.grid import Codebook, Grid, QuantizedMatrix
from nearplane.lattice.polish import polish
from nearplane.lattice.scale import Steps
from nearplane.lattice.solvers import nearest_plane, round_to_nearest, sweep_planes
from nearplane.number_formats import NumberFormat
from nearplane.theory.obq import greedy_sweep
from strategies import ORDERS, Problem, problems

E2M1 = torch.tensor([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
FP4 = NumberFormat(name="fp4", bits=4, levels=tuple(E2M1.tolist()))


def on_levels(p: Problem) -> Problem:
    """The same problem on a grid of levels."""
    steps = Steps(format=FP4, search="minmax", storage=torch.float64)
    return replace(p, grid=steps.grid(p.W / 2))  # half the range: some weights clip


def damped_loss(p: Problem, shift: float, matrix: QuantizedMatrix) -> Tensor:
    """Return (out,) what is lost of every row."""
    E = p.W - matrix.decode()
    return ((E @ (p.H + shift * torch.eye(len(p.H), dtype=p.H.dtype))) * E).sum(1)


def level_problems() -> st.SearchStrategy[Problem]:
    return problems(kinds=("row",), full_rank=True, dead=0).map(on_levels).filter(lambda p: bool((p.W != 0).all()))


def test_the_nearest_of_all_levels_is_found() -> None:
    x = torch.linspace(-8, 8, 3001, dtype=torch.float64)
    book = Codebook(low=0, high=len(E2M1) - 1, levels=E2M1)
    assert torch.equal((book.position(book.nearest(x)) - x).abs(), (x[:, None] - E2M1).abs().amin(1))


@pytest.mark.parametrize(("low", "high"), [(None, None), (0, 14), (1, 15)])
def test_levels_that_make_no_sense_are_refused(low: int | None, high: int | None) -> None:
    with pytest.raises(RecipeError):
        Codebook(low=low, high=high, levels=E2M1.flip(0) if high == 14 else E2M1)


@given(level_problems(), st.sampled_from(ORDERS))
def test_the_sweep_is_the_loop_as_the_formula_stands(p: Problem, order: str) -> None:
    factor = p.factor(order)
    found = nearest_plane(p.W, p.grid, factor)
    E, codes = torch.zeros_like(p.W), torch.zeros_like(p.W)
    for j, column in enumerate(factor.order.tolist()):
        t = p.W[:, column] + E[:, :j] @ factor.U[:j, j]
        distance = (t[:, None] / p.grid.scale - E2M1).abs()
        nearest = distance.topk(2, largest=False)
        assume(bool((nearest.values.diff() > 1e-9 * nearest.values.sum(1, keepdim=True)).all()))
        codes[:, column] = nearest.indices[:, 0].double()
        E[:, j] = p.W[:, column] - p.grid.scale[:, 0] * E2M1[nearest.indices[:, 0]]
    assert torch.equal(found.codes, codes.int())


@pytest.mark.parametrize("block", [16, 256])
def test_the_sweep_in_float32_is_the_loop_in_float64_away_from_ties(block: int, generator: torch.Generator) -> None:
    """Compared are rows whose targets all stay 1e-3 steps away from the middle between two levels; most rows do."""
    n, out = 48, 200
    X = torch.randn(200, n, generator=generator, dtype=torch.float64)
    W = torch.randn(out, n, generator=generator)
    grid = replace(
        Steps(format=FP4, search="minmax", storage=torch.float32).grid(W),
        high=len(E2M1) - 1,
    )
    factor = factorize(X.T @ X, "natural", damp=0.01)
    found = nearest_plane(W, grid, factor, block=block)
    E, codes, gap = (torch.zeros(out, n, dtype=torch.float64) for _ in range(3))
    scale, middles = grid.scale[:, 0].double(), (E2M1[1:] + E2M1[:-1]) / 2
    for j in range(n):
        x = (W[:, j] + E[:, :j] @ factor.U[:j, j]) / scale
        gap[:, j] = (x[:, None] - middles).abs().amin(1)
        codes[:, j] = (x[:, None] - E2M1).abs().argmin(1)
        E[:, j] = W[:, j] - scale * E2M1[codes[:, j].long()]
    clear = (gap > 1e-3).all(1)
    assert float(clear.double().mean()) > 0.8
    assert torch.equal(found.codes[clear], codes[clear].int())
    assert torch.equal(grid.round(W)[1], grid.decode(grid.round(W)[0].int()))


@given(level_problems(), st.sampled_from(ORDERS))
def test_polish_and_new_steps_never_lose_more(p: Problem, order: str) -> None:
    factor = p.factor(order)
    H = p.damped_hessian(factor)
    swept = nearest_plane(p.W, p.grid, factor)
    before = damped_loss(p, factor.shift, swept)
    polished = polish(p.W, swept, H, sweeps=3)
    after = damped_loss(p, factor.shift, polished)
    assert bool((after <= before * (1 + 1e-9) + 1e-300).all())
    fitted = damped_loss(p, factor.shift, polish(p.W, polished, H, storage=torch.float64))
    assert bool((fitted <= after * (1 + 1e-9) + 1e-300).all())


@given(level_problems(), st.sampled_from(ORDERS))
def test_beams_begin_with_nearest_plane_and_end_with_the_closest_vector(p: Problem, order: str) -> None:
    p = (
        replace(p, W=p.W[:, :2], X=p.X[:, :2], H=p.H[:2, :2], permutation=torch.tensor([1, 0]))
        if p.W.shape[1] > 2
        else p
    )
    p = replace(p, grid=replace(p.grid, group=p.grid.group[: p.W.shape[1]]))
    factor = p.factor(order)
    swept, widest = nearest_plane(p.W, p.grid, factor), k_best(p.W, p.grid, factor, beam=len(E2M1) ** 2)
    one = k_best(p.W, p.grid, factor, beam=1)
    assert torch.equal(one.codes, swept.codes)
    codes = torch.cartesian_prod(*[torch.arange(len(E2M1))] * p.W.shape[1]).view(-1, p.W.shape[1]).int()
    best = torch.stack(
        [damped_loss(p, factor.shift, QuantizedMatrix(codes=c.expand(len(p.W), -1), grid=p.grid)) for c in codes]
    ).amin(0)
    assert torch.allclose(damped_loss(p, factor.shift, widest), best, rtol=1e-9, atol=1e-300)


@given(level_problems())
def test_the_bound_holds_where_nothing_clips(p: Problem) -> None:
    factor = p.factor("natural")
    p = replace(p, grid=replace(p.grid, scale=p.grid.scale * 4))  # twice the range
    found = certify(p.W, p.W, sweep_planes(p.W, p.grid, factor), p.H, factor)
    assume(not found.clipped_rows)
    assert found.worst_case is not None
    assert found.damped_loss <= found.worst_case * (1 + 1e-9)


@given(level_problems())
def test_the_greedy_order_and_plain_rounding_know_levels(p: Problem) -> None:
    exact = p.grid.decode(round_to_nearest(p.W, p.grid).codes)
    swept = greedy_sweep(exact, p.grid, p.H, shift=p.factor("natural").shift).matrix
    for matrix in (round_to_nearest(exact, p.grid), swept):
        assert torch.equal(matrix.decode(), exact)


def test_a_grid_says_whether_another_is_the_same() -> None:
    one = torch.ones(1, 1)
    grid = Grid(scale=one, zero=0 * one, group=torch.zeros(2, dtype=torch.int64), low=0, high=14, levels=E2M1)
    assert grid.same_as(replace(grid, levels=E2M1.clone()))
    assert not grid.same_as(replace(grid, levels=E2M1 + 1))
    assert not grid.same_as(replace(grid, levels=None))

"""OBQ rounds next what is nearest: its order seen in the space of the data, and its codes as those of nearest plane.

Problems in which two columns cost the same to nine digits, or a target stood that near to a tie, are left out (`assume`):
there rounding errors decide.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice.factor import factorize
from nearplane.lattice.grid import Grid, Weights
from nearplane.lattice.solvers import nearest_plane, round_to_nearest
from nearplane.theory.obq import MAX_INPUTS, GreedySweep, greedy_sweep, sweep_rows
from oracles import damped, run
from strategies import UNCLIPPED, Problem, problem, problems

TIE = 1e-9


def greedy(*given, **options):
    """Return codes and grid of a sweep without its order."""
    return greedy_sweep(*given, **options).matrix


def solved(p: Problem) -> tuple[Tensor, float, GreedySweep]:
    """Return the weights without dead columns' values, the shift, and the sweep."""
    factor = p.factor("natural")
    return p.W.masked_fill(factor.dead, 0), factor.shift, greedy_sweep(p.W, p.grid, p.H, shift=factor.shift)


def row_of(grid: Grid, i: int) -> Grid:
    """Return the grid of one row."""
    row = slice(i, i + 1) if len(grid.scale) > 1 else slice(None)
    return replace(grid, scale=grid.scale[row], zero=grid.zero[row])


def plain(W: Tensor, grid: Grid, A: Tensor) -> tuple[Tensor, Tensor, float]:
    """Run OBQ as the formula stands, inverting what is left at every step: codes, order, and how near a choice came to a tie."""
    codes, order, margin = torch.empty_like(W, dtype=torch.int32), torch.empty_like(W, dtype=torch.int64), torch.inf
    for i, w in enumerate(W.clone()):
        rounding_grid, free = row_of(grid, i), list(range(len(w)))
        for step in range(len(w)):
            P = torch.linalg.inv(A[free][:, free])
            code, value = (x[0] for x in rounding_grid.round(w[None, free], torch.tensor(free)))
            error = w[free] - value
            cost = error.square() / P.diagonal()
            k = int(cost.argmin())
            if len(free) > 1:
                first, second = cost.sort().values[:2].tolist()
                margin = min(margin, (second - first) / second)
            w[free] -= error[k] / P[k, k] * P[:, k]
            codes[i, free[k]] = int(code[k])
            order[i, step] = free.pop(k)
    return codes, order, margin


def rounding_margin(p: Problem, W: Tensor, shift: float, order: Tensor) -> float:
    """Return how near to a tie the targets of the rows come, each in its order, in steps."""
    X = damped(p.X, shift)
    return min(
        run("C25 1 relative error", W[i : i + 1], X, row_of(p.grid, i), order[i])[1].margin for i in range(len(W))
    )


@given(problems())
def test_codes_are_those_of_nearest_plane_in_the_order_of_each_row(p: Problem) -> None:
    W, shift, sweep = solved(p)
    assume(rounding_margin(p, W, shift, sweep.order) > TIE)
    for i in range(len(W)):
        factor = factorize(p.H, sweep.order[i], damp=p.damp)
        alone = nearest_plane(W[i : i + 1], row_of(p.grid, i), factor)
        assert torch.equal(sweep.matrix.codes[i : i + 1], alone.codes)


def distances(y: Tensor, X: Tensor, free: list[int], grid: Grid) -> tuple[Tensor, Tensor]:
    """Return the distance from `y` to the nearest hyperplane of every free column, and that hyperplane's code.

    The hyperplane {code_j = z} is `x_j value(z) + span of the other free columns`; the distance is what least squares leaves.
    """
    nearest, codes = [], []
    for j in free:
        others = X[:, [k for k in free if k != j]]
        Q = torch.linalg.qr(others).Q
        r, x = (v - Q @ (Q.T @ v) for v in (y, X[:, j]))
        scale, zero = (float(part) for part in grid.columns(torch.tensor([j])))
        near = round(float(r @ x / (x @ x)) / scale + zero)
        near = min(max(near, -(2**62) if grid.low is None else grid.low), 2**62 if grid.high is None else grid.high)
        low, high = (-torch.inf if grid.low is None else grid.low), (torch.inf if grid.high is None else grid.high)
        tried = [z for z in range(near - 2, near + 3) if low <= z <= high]
        found = [float((r - x * (scale * (z - zero))).norm()) for z in tried]
        nearest.append(min(found))
        codes.append(tried[found.index(min(found))])
    return torch.tensor(nearest, dtype=torch.float64), torch.tensor(codes)


@pytest.mark.parametrize("kinds", [UNCLIPPED, ("row", "asymmetric", "one-sided")], ids=["unclipped", "clipped"])
def test_the_next_column_is_that_of_the_nearest_hyperplane(kinds: tuple) -> None:
    """[C25] Corollary 4, with distances taken in the space of the data. Clipping leaves a grid fewer hyperplanes, no more."""

    @given(problems(kinds, columns=6))
    def check(p: Problem) -> None:
        W, shift, sweep = solved(p)
        assume(rounding_margin(p, W, shift, sweep.order) > TIE)
        X = damped(p.X, shift)
        live = (p.H.diagonal() != 0).nonzero()[:, 0].tolist()
        for i, w in enumerate(W):
            y, free, grid = X @ w, live.copy(), row_of(p.grid, i)
            value = grid.decode(sweep.matrix.codes[i : i + 1])[0]
            for j in sweep.order[i, : len(live)].tolist():
                distance, code = distances(y, X, free, grid)
                at = free.index(j)
                assert float(distance[at]) <= float(distance.min()) * (1 + 1e-9)
                assert int(sweep.matrix.codes[i, j]) == int(code[at])
                y = y - X[:, j] * value[j]
                free.remove(j)

    check()


@given(problems(dead=0))
def test_it_is_the_algorithm_with_every_inverse_taken_anew(p: Problem) -> None:
    factor = p.factor("natural")
    A = p.damped_hessian(factor)
    codes, order, margin = plain(p.W, p.grid, A)
    assume(margin > TIE)
    assume(rounding_margin(p, p.W, factor.shift, order) > TIE)
    scale, zero = (part.expand(len(p.W), -1) for part in p.grid.columns(slice(None)))
    found = sweep_rows(Weights(p.W, scale, zero, p.grid.codebook), torch.linalg.inv(A), 1 / A.diagonal(), 2)
    assert torch.equal(found[0], codes)
    assert torch.equal(found[1], order)


@given(problems())
def test_memory_changes_nothing(p: Problem) -> None:
    A = p.damped_hessian(p.factor("natural"))
    scale, zero = (part.expand(len(p.W), -1) for part in p.grid.columns(slice(None)))
    arguments = Weights(p.W, scale, zero, p.grid.codebook), torch.linalg.inv(A), 1 / A.diagonal()
    for a, b in zip(sweep_rows(*arguments, 1), sweep_rows(*arguments, 99), strict=True):
        assert torch.equal(a, b)


@given(problems())
def test_every_row_has_an_order_of_all_columns_dead_ones_last(p: Problem) -> None:
    sweep = solved(p)[2]
    dead = p.H.diagonal() == 0
    assert torch.equal(sweep.order.sort().values, torch.arange(len(p.H)).expand_as(sweep.order))
    assert not bool(dead[sweep.order[:, : int((~dead).sum())]].any())


@given(problems(dead=3))
def test_dead_inputs_decode_to_what_is_nearest_to_0_and_move_nothing(p: Problem) -> None:
    _, shift, sweep = solved(p)
    dead = p.H.diagonal() == 0
    zeros = round_to_nearest(torch.zeros_like(p.W), p.grid).codes
    assert torch.equal(sweep.matrix.codes[:, dead], zeros[:, dead])
    live = (~dead).nonzero()[:, 0]
    alone = greedy(p.W[:, live], replace(p.grid, group=p.grid.group[live]), p.H[live][:, live], shift=shift)
    assert torch.equal(sweep.matrix.codes[:, live], alone.codes)


def test_inputs_named_dead_are_dead() -> None:
    p = problem(columns=8)
    named = torch.arange(8) >= 5
    matrix = greedy(p.W, p.grid, p.H, shift=0.1, dead=named)
    alone = greedy(p.W[:, :5], replace(p.grid, group=p.grid.group[:5]), p.H[:5, :5], shift=0.1)
    assert torch.equal(matrix.codes[:, :5], alone.codes)
    assert not matrix.codes[:, 5:].any()
    assert torch.equal(greedy(p.W, p.grid, p.H, dead=~torch.zeros_like(named)).codes, torch.zeros_like(matrix.codes))


@given(problems(dead=0))
def test_where_inputs_do_not_interact_everything_is_round_to_nearest_smallest_cost_first(p: Problem) -> None:
    H = torch.diag(p.H.diagonal())
    sweep = greedy_sweep(p.W, p.grid, H)
    nearest = round_to_nearest(p.W, p.grid)
    assert torch.equal(sweep.matrix.codes, nearest.codes)
    cost = ((p.W - nearest.decode()).square() * H.diagonal()).gather(1, sweep.order)
    assert bool((cost[:, 1:] >= cost[:, :-1] * (1 - 1e-12)).all())


@given(problems(dead=0))
def test_a_matrix_on_the_grid_stays_as_it_is(p: Problem) -> None:
    codes = round_to_nearest(p.W, p.grid).codes
    matrix = greedy(p.grid.decode(codes), p.grid, p.H, shift=p.factor("natural").shift)
    assert torch.equal(matrix.codes, codes)
    assert matrix.grid is p.grid
    assert matrix.codes.dtype == torch.int32


def test_of_equal_costs_the_lowest_column_goes_first() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    grid = Grid(scale=one, zero=0 * one, group=torch.zeros(6, dtype=torch.int64))
    W = torch.tensor([[0.25, 0.125, 0.25, 0.125, 0.25, 0.125]], dtype=torch.float64)
    weights = Weights(W, one.expand(1, 6), 0 * one.expand(1, 6), grid.codebook)
    arguments = weights, torch.eye(6).double(), torch.ones(6).double()
    assert greedy_sweep(W, grid, torch.eye(6)).order.tolist() == [[1, 3, 5, 0, 2, 4]]
    assert sweep_rows(*arguments, 1)[1].tolist() == [[1, 3, 5, 0, 2, 4]]


def test_the_worked_example_rounds_the_first_weight_first() -> None:
    """w = (0.8, 0.6), H^-1 = [[1, -1], [-1, 2]]: costs 0.04 and 0.08; then w_1 has moved to 0.4."""
    H = torch.tensor([[2.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    grid = Grid(scale=one, zero=0 * one, group=torch.zeros(2, dtype=torch.int64))
    sweep = greedy_sweep(torch.tensor([[0.8, 0.6]], dtype=torch.float64), grid, H)
    assert sweep.order.tolist() == [[0, 1]]
    assert sweep.matrix.codes.tolist() == [[1, 0]]


def test_float32_weights_are_swept_in_float64_and_nothing_is_changed() -> None:
    p = problem(columns=12, out=5)
    W, H = p.W.float(), p.H.clone()
    grid = replace(p.grid, scale=p.grid.scale.float(), zero=p.grid.zero.float())
    wide = replace(grid, scale=grid.scale.double(), zero=grid.zero.double())
    assert torch.equal(greedy(W, grid, H, shift=0.1).codes, greedy(W.double(), wide, H, shift=0.1).codes)
    assert torch.equal(W, p.W.float())
    assert torch.equal(H, p.H)


def test_a_singular_hessian_is_refused_by_its_column_and_taken_with_a_shift() -> None:
    p = problem(columns=8, tokens=3)
    H = p.H.clone()
    H[5], H[:, 5] = H[4].clone(), H[:, 4].clone()
    H[5, 5] = H[4, 4]
    with pytest.raises(NumericalError, match="not positive definite: the pivot of column"):
        greedy(p.W, p.grid, H)
    assert greedy(p.W, p.grid, H, shift=float(H.diagonal().mean()) / 100).codes.shape == p.W.shape


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    p = problem()
    H = p.H.clone()
    H[2, 3] = H[3, 2] = value
    with pytest.raises(NumericalError, match="Hessian contains NaN or Inf"):
        greedy(p.W, p.grid, H)
    p.W[1, 2] = value
    with pytest.raises(NumericalError, match="weight is NaN or Inf"):
        greedy(p.W, p.grid, p.H)


def test_more_inputs_than_it_can_take_are_refused_with_what_to_use() -> None:
    n = MAX_INPUTS + 1
    one = torch.ones(1, 1)
    grid = Grid(scale=one, zero=0 * one, group=torch.zeros(n, dtype=torch.int64))
    with pytest.raises(NumericalError, match=r"the limit is 4096 inputs\. Use nearest_plane"):
        greedy(torch.zeros(1, n), grid, torch.ones(1, 1).expand(n, n))

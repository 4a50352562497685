"""Polish: coordinate descent as the formula stands, never a loss that rises; rounds of new steps: the best of every row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nearplane.lattice import kernels
from nearplane.lattice import polish as module
from nearplane.lattice.beam import k_best
from nearplane.lattice.bounds import quadratic
from nearplane.lattice.factor import Factor
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.polish import PlainFit, descend, merge, polish, refine
from nearplane.lattice.solvers import Solution, nearest_plane, round_to_nearest, sweep_planes
from oracles import closest_vector
from strategies import KINDS, ORDERS, UNCLIPPED, Problem, problem, problems

TIE = 1e-9
CLIPPED = tuple(kind for kind in KINDS if kind not in (*UNCLIPPED, "one-sided"))
STARTS = ("nearest plane", "round to nearest", "at random")


def begun(p: Problem, start: str, seed: int = 0) -> tuple[Tensor, QuantizedMatrix]:
    """Return the damped Hessian and codes to polish."""
    factor = p.factor("natural")
    if start == "nearest plane":
        return p.damped_hessian(factor), nearest_plane(p.W, p.grid, factor)
    matrix = round_to_nearest(p.W, p.grid)
    if start == "at random":
        shift = torch.randint(-3, 4, p.W.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        matrix = replace(matrix, codes=within(p.grid, matrix.codes + shift))
    return p.damped_hessian(factor), matrix


def within(grid: Grid, codes: Tensor) -> Tensor:
    """Return the codes, cut off at the limits of the grid."""
    low, high = (-torch.inf if grid.low is None else grid.low), (torch.inf if grid.high is None else grid.high)
    return codes.clamp(low, high).to(codes.dtype)


def losses(p: Problem, matrix: QuantizedMatrix, H: Tensor) -> Tensor:
    """Return (out,) the loss of every row under `H`."""
    return quadratic(p.W - matrix.decode(), H)


def plain(p: Problem, matrix: QuantizedMatrix, H: Tensor, sweeps: int) -> tuple[Tensor, float]:
    """The formula, column by column, nothing kept between them: codes, and how near to a tie a target came, in steps."""
    codes, margin = matrix.codes.clone(), torch.inf
    for _ in range(sweeps):
        for j in range(p.W.shape[1]):
            if H[j, j] == 0:
                continue
            values = p.grid.decode(codes)
            scale, zero = (part[:, 0] for part in p.grid.columns([j]))
            x = (values[:, j] + (p.W - values) @ H[:, j] / H[j, j]) / scale + zero
            margin = min(margin, float((x - x.floor() - 0.5).abs().min()))
            codes[:, j] = within(p.grid, x.round())
    return codes, margin


@given(problems(), st.sampled_from(STARTS), st.integers(0, 2**32 - 1))
def test_the_loss_of_no_row_rises(p: Problem, start: str, seed: int) -> None:
    """On any grid, clipped or not, whatever the codes were; dead inputs, singular Hessians, huge and tiny numbers among them."""
    H, matrix = begun(p, start, seed)
    before = first = losses(p, matrix, H)
    for _ in range(4):
        matrix = polish(p.W, matrix, H)
        after = losses(p, matrix, H)
        assert bool((after <= before + 1e-12 * first).all())
        before = after


@given(problems(), st.sampled_from(STARTS), st.integers(0, 2**32 - 1), st.integers(1, 11), st.integers(0, 4))
def test_it_is_one_column_after_another_whatever_the_block(
    p: Problem, start: str, seed: int, block: int, sweeps: int
) -> None:
    """Where a target is within 1e-9 steps of a tie rounding errors decide, and blocks may differ: such problems are left out."""
    H, matrix = begun(p, start, seed)
    expected, margin = plain(p, matrix, H, sweeps)
    assume(margin > TIE)
    polished = polish(p.W, matrix, H, sweeps=sweeps, block=block)
    assert torch.equal(polished.codes, expected)
    assert polished.grid is p.grid


@given(problems(), st.sampled_from(STARTS), st.integers(0, 2**32 - 1))
def test_at_the_end_no_single_code_can_move_to_a_lower_loss(p: Problem, start: str, seed: int) -> None:
    """By a step up or down within the limits; further is worse, as the loss is convex in each code."""
    H, matrix = begun(p, start, seed)
    matrix = polish(p.W, matrix, H, sweeps=1000)
    assert torch.equal(polish(p.W, matrix, H).codes, matrix.codes)
    least = losses(p, matrix, H)
    E = p.W - matrix.decode()
    for j in range(p.W.shape[1]):
        for side in (-1, 1):
            codes = matrix.codes.clone()
            codes[:, j] += side
            allowed = within(p.grid, codes[:, j]) == codes[:, j]
            moved = losses(p, replace(matrix, codes=codes), H)
            scale = (E.abs() + p.grid.steps()).square() @ H.diagonal()  # of the sums that are compared
            assert bool((moved >= least - 1e-12 * scale)[allowed].all())


@given(problems(), st.sampled_from(STARTS), st.integers(0, 2**32 - 1))
def test_where_inputs_do_not_interact_anything_becomes_round_to_nearest(p: Problem, start: str, seed: int) -> None:
    H, matrix = begun(p, start, seed)
    position = p.W / p.grid.steps() + p.grid.columns(slice(None))[1]
    assume(float((position - position.floor() - 0.5).abs().min()) > TIE)
    polished = polish(p.W, matrix, H.diagonal().diag())
    assert torch.equal(polished.codes, round_to_nearest(p.W, p.grid).codes)


@given(problems(dead=5), st.sampled_from(STARTS), st.integers(0, 2**32 - 1))
def test_dead_inputs_that_no_damping_reaches_keep_their_codes(p: Problem, start: str, seed: int) -> None:
    _, matrix = begun(p, start, seed)
    dead = p.H.diagonal() == 0
    polished = polish(p.W, matrix, p.H, sweeps=2)
    assert torch.equal(polished.codes[:, dead], matrix.codes[:, dead])
    scale = (
        (p.W - matrix.decode()).square() @ p.H.diagonal() * len(p.H)
    )  # a singular Hessian may leave a loss of any smallness
    assert bool((losses(p, polished, p.H) <= losses(p, matrix, p.H) + 1e-12 * scale).all())


@pytest.mark.parametrize(("out", "columns"), [(4, 8), (1, 8), (40, 1)])
def test_polishing_leaves_what_it_is_given_as_it_is(out: int, columns: int) -> None:
    """Also where a matrix and its transpose are the same memory."""
    p = problem(out=out, columns=columns, kind="row")
    H, matrix = begun(p, "at random")
    copies = [x.clone() for x in (p.W, H, matrix.codes, p.grid.scale)]
    assert not torch.equal(polish(p.W, matrix, H).codes, copies[2])
    for x, copy in zip((p.W, H, matrix.codes, p.grid.scale), copies, strict=True):
        assert torch.equal(x, copy)


@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_kernel_finds_what_the_torch_form_finds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for rows, one in fifty at most, that come so near to a tie that the order of a float32 sum decides."""
    p = problem(out=300, columns=72, tokens=200, kind=kind)
    W, H = p.W.float(), p.damped_hessian(p.factor("natural")).float()
    matrix = round_to_nearest(W, p.grid.to(torch.float32))
    compiled = polish(W, matrix, H, sweeps=3, block=32)
    monkeypatch.setattr(module, "kernels_of", lambda _: kernels.torch_kernels())
    reference = polish(W, matrix, H, sweeps=3, block=32)
    assert compiled.codes.dtype == reference.codes.dtype == torch.int32
    assert float((compiled.codes != reference.codes).any(1).double().mean()) < 0.02
    assert float(quadratic(W - compiled.decode(), H).sum()) < float(quadratic(W - matrix.decode(), H).sum())


# ---- against brute force ----


def refined(
    p: Problem, factor: Factor, H: Tensor, *, rounds: int, sweeps: int, beam: int | None = None
) -> QuantizedMatrix:
    def solve(grid: Grid) -> Solution:
        if beam is None:
            return sweep_planes(p.W, grid, factor)
        return Solution(matrix=k_best(p.W, grid, factor, beam=beam))

    found = refine(p.W, H, p.grid, lambda _: PlainFit(torch.float64), solve, rounds=rounds).matrix
    return polish(p.W, found, H, sweeps=sweeps)


def step_of(grid: Grid, i: int) -> tuple[Tensor, Tensor]:
    """Return (in,) scale and zero of row `i`."""
    scale, zero = grid.columns(slice(None))
    return scale[min(i, len(scale) - 1)], zero[min(i, len(zero) - 1)]


@given(problems(CLIPPED, columns=4), st.sampled_from(ORDERS))
def test_no_solver_beats_brute_force_on_a_grid_with_limits(p: Problem, order: str) -> None:
    """Over all code vectors, each matrix on its own grid: refitted steps have another floor."""
    assume((p.grid.high - p.grid.low + 1) ** p.W.shape[1] <= 5000)
    factor = p.factor(order)
    H = p.damped_hessian(factor)
    codes = torch.arange(p.grid.low, p.grid.high + 1, dtype=torch.float64)
    box = torch.cartesian_prod(*[codes] * p.W.shape[1]).reshape(-1, p.W.shape[1])
    plane = nearest_plane(p.W, p.grid, factor)
    found = [k_best(p.W, p.grid, factor, beam=3), polish(p.W, plane, H, sweeps=9)]
    found += [refined(p, factor, H, rounds=rounds, sweeps=1, beam=2) for rounds in (0, 2)]
    for matrix in found:
        assert bool(((matrix.codes >= p.grid.low) & (matrix.codes <= p.grid.high)).all())
        for i, loss in enumerate(losses(p, matrix, H).tolist()):
            scale, zero = step_of(matrix.grid, i)
            floor = float(quadratic(p.W[i] - scale * (box - zero), H).min())
            assert loss >= floor * (1 - 1e-12)


@given(problems(UNCLIPPED, columns=5, full_rank=True, damps=(0.1, 1.0)), st.sampled_from(ORDERS))
def test_no_solver_beats_brute_force_on_a_lattice(p: Problem, order: str) -> None:
    factor = p.factor(order)
    H = p.damped_hessian(factor)
    plane = nearest_plane(p.W, p.grid, factor)
    found = [k_best(p.W, p.grid, factor, beam=3), polish(p.W, plane, H, sweeps=9)]
    for matrix in (*found, refined(p, factor, H, rounds=2, sweeps=1)):
        for i, loss in enumerate(losses(p, matrix, H).tolist()):
            step = step_of(matrix.grid, i)[0]
            error = 1e-12 * float(
                step.square() @ H.diagonal()
            )  # steps fitted to one column leave nothing but rounding errors
            floor = closest_vector(p.W[i], H, step, within=loss + error)
            assume(floor is not None)
            assert loss >= floor * (1 - 1e-12) - error


# ---- rounds ----


@given(problems(), st.sampled_from(ORDERS))
def test_without_rounds_and_sweeps_it_is_the_plain_solve(p: Problem, order: str) -> None:
    factor = p.factor(order)
    matrix = refined(p, factor, p.damped_hessian(factor), rounds=0, sweeps=0)
    assert torch.equal(matrix.codes, nearest_plane(p.W, p.grid, factor).codes)
    assert matrix.grid is p.grid


@given(problems(), st.sampled_from(ORDERS), st.integers(0, 3), st.integers(0, 2))
def test_no_row_loses_more_than_the_first_solve_nor_than_one_on_the_grid_it_ends_with(
    p: Problem, order: str, rounds: int, sweeps: int
) -> None:
    """The second is what the bounds of nearest plane need."""
    factor = p.factor(order)
    H = p.damped_hessian(factor)
    found = refined(p, factor, H, rounds=rounds, sweeps=sweeps)
    for grid in (p.grid, found.grid):
        plane = losses(p, nearest_plane(p.W, grid, factor), H)
        noise = 1e-12 * (plane + quadratic(p.W, H))
        assert bool((losses(p, found, H) <= plane + noise).all())


@given(problems(), st.sampled_from(ORDERS), st.integers(0, 2))
def test_the_loss_of_no_row_rises_with_the_sweeps(p: Problem, order: str, rounds: int) -> None:
    factor = p.factor(order)
    H = p.damped_hessian(factor)
    first = losses(p, nearest_plane(p.W, p.grid, factor), H)
    before = losses(p, refined(p, factor, H, rounds=rounds, sweeps=1), H)
    for sweeps in (2, 3):
        after = losses(p, refined(p, factor, H, rounds=rounds, sweeps=sweeps), H)
        assert bool((after <= before + 1e-12 * first).all())
        before = after


@given(problems(columns=12), st.sampled_from(ORDERS), st.integers(1, 3), st.booleans())
def test_every_row_is_the_better_of_the_descent_and_a_solve_on_its_steps(
    p: Problem, order: str, rounds: int, tells: bool
) -> None:
    """Whether or not the solver tells what its rows lost."""
    factor = p.factor(order)
    H = p.damped_hessian(factor)
    solved: list[Solution] = []

    def solve(grid: Grid) -> Solution:
        solved.append(sweep_planes(p.W, grid, factor))
        return solved[-1] if tells else replace(solved[-1], losses=None)

    found = refine(p.W, H, p.grid, lambda _: PlainFit(torch.float64), solve, rounds=rounds)
    first, last = solved
    descended = polish(p.W, first.matrix, H, sweeps=rounds, storage=torch.float64)
    assert torch.equal(last.matrix.grid.scale, descended.grid.scale)
    assert torch.equal(found.matrix.grid.scale, descended.grid.scale)
    assert found.outside is last.outside
    one, other = losses(p, descended, H), losses(p, last.matrix, H)
    clear = (one - other).abs() > 1e-9 * (one + other)  # else rounding errors decide
    better = torch.where((one < other)[:, None], descended.codes, last.matrix.codes)
    assert torch.equal(found.matrix.codes[clear], better[clear])


# ---- steps and codes together ----


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16, torch.float64])
@given(problems(columns=12), st.sampled_from(STARTS), st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_fitting_steps_on_the_way_never_raises_the_loss(
    storage: torch.dtype, p: Problem, start: str, seed: int, block: int
) -> None:
    """Not even where steps keep to what they were, or storage rounds them; whatever the groups, side by side or not."""
    if storage == torch.float16:
        assume(float(p.grid.scale.min()) > 1e-4 and float(p.grid.scale.max()) < 1e4)
    grid = p.grid if storage == torch.float64 else replace(p.grid, scale=p.grid.scale.to(storage).double())
    H, matrix = begun(replace(p, grid=grid), start, seed)
    before = first = losses(p, matrix, H)
    for _ in range(3):
        matrix = polish(p.W, matrix, H, storage=storage, block=block)
        after = losses(p, matrix, H)
        assert bool((after <= before + 1e-12 * first).all())
        assert torch.equal(matrix.grid.scale.to(storage).double(), matrix.grid.scale)
        assert torch.equal(matrix.grid.group, grid.group)
        assert torch.equal(matrix.grid.zero.expand(len(p.W), -1), grid.zero.expand(len(p.W), -1))
        before = after


@settings(max_examples=settings().max_examples // 2)
@given(problems(("row", "grouped", "permuted", "asymmetric"), full_rank=True, dead=0))
def test_steps_that_stay_are_those_of_lstsq(p: Problem) -> None:
    """Where passes change nothing any more, codes included, every step is the least-squares one given the codes."""
    H, matrix = begun(p, "nearest plane")
    matrix = polish(p.W, matrix, H, sweeps=200, storage=torch.float64)
    L = torch.linalg.cholesky(H)
    member = torch.nn.functional.one_hot(p.grid.group, p.grid.scale.shape[1]).double()
    V = matrix.codes - matrix.grid.zero[:, p.grid.group]
    A = torch.stack([L.T @ (v[:, None] * member) for v in V])  # (out, in, groups), X diag(v) per group
    least = torch.linalg.svdvals(A)[:, -1]
    assume(bool((least > 0.1 * torch.linalg.svdvals(A)[:, 0]).all()))
    best = torch.linalg.lstsq(A, (p.W @ L)[..., None]).solution[..., 0]
    now = matrix.grid.scale
    assume(bool(((best > now / 3) & (best < now * 3)).all()))  # further no step moves
    off = (A @ (now - best)[..., None])[..., 0].norm(dim=1)  # in lengths of the error
    assert bool((off <= 1e-5 * (p.W @ L).norm(dim=1)).all())


def test_rows_say_what_the_descent_gained() -> None:
    """What the sweep adds up on the way is what the loss differs by; so no product is made to know it."""
    p = problem(out=40, columns=300, tokens=400, kind="grouped")
    for start in STARTS:
        H, matrix = begun(p, start)
        after, gained = descend(p.W, matrix, H, sweeps=2, fit=PlainFit(torch.float64))
        assert torch.allclose(losses(p, matrix, H) + gained, losses(p, after, H), rtol=1e-9)
        assert bool((gained < 0).all())


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16, torch.float32])
@given(problems(("tensor", "row", "grouped", "asymmetric", "permuted"), columns=12))
def test_steps_are_what_storage_holds_before_each_solve(storage: torch.dtype, p: Problem) -> None:
    if storage == torch.float16:
        assume(float(p.grid.scale.min()) > 1e-4 and float(p.grid.scale.max()) < 1e4)
    grid = replace(p.grid, scale=p.grid.scale.to(storage).double())
    factor = p.factor("natural")

    def solve(now: Grid) -> Solution:
        assert torch.equal(now.scale.to(storage).double(), now.scale)
        return sweep_planes(p.W, now, factor)

    matrix = refine(p.W, p.damped_hessian(factor), grid, lambda _: PlainFit(storage), solve, rounds=2).matrix
    assert torch.equal(matrix.grid.scale.to(storage).double(), matrix.grid.scale)
    assert (matrix.grid.low, matrix.grid.high) == (grid.low, grid.high)
    assert torch.equal(matrix.grid.group, grid.group)


def test_a_step_that_storage_cannot_hold_is_not_taken() -> None:
    """Steps are stored in float16, up to 65504; the codes want one of 70000."""
    W = torch.tensor([[70000.0, -70000.0, 140000.0, 10.0, 20.0, 30.0]], dtype=torch.float64)
    scale, group = torch.tensor([[60000.0, 9.0]], dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1, 1])
    grid = Grid(scale=scale, zero=torch.zeros_like(scale), group=group, low=-4, high=3)
    fixed = refine(
        W,
        torch.eye(6, dtype=torch.float64),
        grid,
        lambda _: PlainFit(torch.float16),
        lambda now: Solution(matrix=round_to_nearest(W, now)),
        rounds=1,
    ).matrix
    assert fixed.grid.scale.tolist() == [[60000.0, 10.0]]


def test_rounds_and_sweeps_pay_on_two_bits() -> None:
    """Correlated inputs, 64 rows: each takes something off what is left, together the most."""
    p = problem(out=64, columns=64, tokens=256, kind="grouped", bits=2)
    factor = p.factor("activation")
    H = p.damped_hessian(factor)
    loss = {
        (rounds, sweeps): float(losses(p, refined(p, factor, H, rounds=rounds, sweeps=sweeps), H).sum())
        for rounds in (0, 2)
        for sweeps in (0, 2)
    }
    assert loss[2, 2] < loss[2, 0] < loss[0, 0]
    assert loss[2, 2] < loss[0, 2] < loss[0, 0]


def test_merged_rows_come_with_their_own_steps() -> None:
    """Also where one of the matrices has a single step for all rows."""
    p = problem(out=5, columns=6, kind="tensor", seed=4)
    one = round_to_nearest(p.W, p.grid)
    finer = replace(
        p.grid, scale=p.grid.scale * (torch.arange(5, dtype=torch.float64)[:, None] + 1) / 8, zero=p.grid.zero + 1
    )
    other = round_to_nearest(p.W, finer)
    chosen = torch.tensor([True, False, True, False, False])[:, None]
    for a, b in ((one, other), (other, one)):
        merged = merge(chosen, a, b)
        assert torch.equal(merged.decode(), torch.where(chosen, a.decode(), b.decode()))
        assert torch.equal(merged.codes, torch.where(chosen, a.codes, b.codes))

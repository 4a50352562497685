"""The certificate: identities, and the theorems it quotes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from nearplane.lattice import bounds
from nearplane.lattice.bounds import Certificate, certify, limit, losses_on_extra, means_on_extra, quadratic
from nearplane.lattice.factor import Factor, factorize
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.moments import Extra
from nearplane.lattice.polish import polish
from nearplane.lattice.solvers import Solution, nearest_plane, round_to_nearest, sweep_planes
from oracles import closest_vector, run
from pretended import pretended
from strategies import ORDERS, UNCLIPPED, Problem, problem, problems
from unordered import Unordered


def close(actual: float, expected: float) -> bool:
    """Whether two numbers agree to 1e-12."""
    return abs(actual - expected) <= 1e-12 * abs(expected)


def solved(p: Problem, order: str) -> tuple[Factor, QuantizedMatrix, Certificate]:
    factor = p.factor(order)
    solution = sweep_planes(p.W, p.grid, factor)
    return factor, solution.matrix, certify(p.W, p.W, solution, p.H, factor)


def moved_from_the_sweep(p: Problem, factor: Factor, matrix: QuantizedMatrix[Grid]) -> Solution:
    """Return codes that began with those of the sweep, with what it saw."""
    return replace(sweep_planes(p.W, p.grid, factor), matrix=matrix)


@given(problems(), st.sampled_from(ORDERS))
def test_the_damped_loss_is_the_sum_of_the_planes_distances(p: Problem, order: str) -> None:
    """`sum_j d_j ||t_j - v_j||^2`, t_j being the current weights of GPTQ, on every grid, clipped or not."""
    factor, matrix, certificate = solved(p, order)
    codes, rounding = run("C25 1 relative error", p.W, p.data(factor), p.grid, factor.order)
    assume(torch.equal(codes, matrix.codes))
    residuals = rounding.targets.T - matrix.decode()[:, factor.order]
    assert close(certificate.damped_loss, float((residuals.square() * factor.d).sum() / p.W.numel()))


@given(problems(), st.sampled_from(ORDERS))
def test_losses_are_traces_under_the_hessian(p: Problem, order: str) -> None:
    factor, matrix, certificate = solved(p, order)
    E = p.W - matrix.decode()
    loss, energy = (float(torch.trace(A @ p.H @ A.T)) for A in (E, p.W))
    assert close(certificate.damped_loss, float(torch.trace(E @ p.damped_hessian(factor) @ E.T)) / E.numel())
    outputs = float((p.X @ E.T).square().sum()) / len(p.X)
    scale = float(E.square().sum() * p.H.diagonal().sum())  # a singular Hessian may leave a loss of any smallness
    assert abs(certificate.loss * E.numel() - loss) <= 1e-12 * scale
    assert abs(certificate.loss * E.numel() - outputs) <= 1e-12 * scale
    assert close(certificate.relative_loss, certificate.loss * E.numel() / energy)


@given(problems(UNCLIPPED), st.sampled_from(ORDERS))
def test_without_clipping_no_row_is_worse_than_the_bound(p: Problem, order: str) -> None:
    """Babai: every residual is at most half a step, whatever the weights."""
    factor, matrix, certificate = solved(p, order)
    rows = quadratic(p.W - matrix.decode(), p.damped_hessian(factor))
    bound = (p.grid.steps().square()[:, factor.order] * factor.d).sum(1) / 4
    assert bool((rows <= bound * (1 + 1e-12)).all())
    assert certificate.clipped == 0.0
    assert certificate.clipped_rows == 0.0
    assert certificate.damped_loss <= certificate.worst_case * (1 + 1e-12)


@given(problems(), st.sampled_from(ORDERS))
def test_rows_that_do_not_clip_keep_the_bound_on_any_grid(p: Problem, order: str) -> None:
    factor, matrix, certificate = solved(p, order)
    codes, rounding = run("C25 1 relative error", p.W, p.data(factor), p.grid, factor.order)
    assume(torch.equal(codes, matrix.codes))
    targets = torch.empty_like(p.W)
    targets[:, factor.order] = rounding.targets.T
    outside = p.clipped(targets)
    assert close(certificate.clipped, float(outside.double().mean()))
    assert close(certificate.clipped_rows, float(outside.any(1).double().mean()))
    rows = quadratic(p.W - matrix.decode(), p.damped_hessian(factor))
    live = factor.d.masked_fill(factor.dead[factor.order], factor.shift)
    bound = (p.grid.steps().square()[:, factor.order] * live).sum(1).expand(len(p.W)) / 4
    inside = ~outside.any(1)
    assert bool((rows[inside] <= bound[inside] * (1 + 1e-12)).all())


@given(problems(UNCLIPPED), st.sampled_from(ORDERS), st.integers(0, 2**32 - 1))
def test_the_bound_is_tight_at_the_corner_of_the_cell(p: Problem, order: str, seed: int) -> None:
    """Weights whose every residual is half a step less a millionth have the bound less two millionths as loss."""
    factor = p.factor(order)
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-9, 10, p.W.shape, generator=g, dtype=torch.int32)
    sign = torch.randint(0, 2, p.W.shape, generator=g, dtype=torch.float64) * 2 - 1
    short = 1 - 2.0**-20
    residuals = (sign * p.grid.steps() * short / 2)[:, factor.order]
    E = torch.empty_like(p.W)
    E[:, factor.order] = torch.linalg.solve_triangular(factor.U, residuals, upper=True, left=False, unitriangular=True)
    W = p.grid.decode(codes) + E
    solution = sweep_planes(W, p.grid, factor)
    assert torch.equal(solution.matrix.codes, codes)
    certificate = certify(W, W, solution, p.H, factor)
    assert close(certificate.damped_loss, short**2 * certificate.worst_case)


def test_the_bound_is_reached_exactly_where_arithmetic_is_exact() -> None:
    """At the corner itself, a tie in every column: dyadic numbers, not one rounding error."""
    U = torch.tensor([[1.0, 0.5, -0.25], [0.0, 1.0, 0.75], [0.0, 0.0, 1.0]], dtype=torch.float64)
    d = torch.tensor([4.0, 1.0, 0.25], dtype=torch.float64)
    H = U * d @ U.T
    factor = factorize(H, damp=0.0)
    assert torch.equal(factor.U, U)
    step = torch.tensor([[0.5]], dtype=torch.float64)
    grid = Grid(scale=step, zero=torch.zeros_like(step), group=torch.zeros(3, dtype=torch.int64))
    residuals = torch.full((1, 3), 0.25, dtype=torch.float64)
    W = residuals @ torch.linalg.inv(U)
    certificate = certify(W, W, sweep_planes(W, grid, factor), H, factor)
    assert certificate.damped_loss == certificate.worst_case == 0.25 / 4 * 5.25 / 3


@pytest.mark.parametrize("order", ORDERS)
def test_the_mean_loss_on_gaussian_weights_is_the_expected_one(order: str, generator: torch.Generator) -> None:
    """A third of the bound, within 5 %: with steps small against the weights every offset is as likely as any other."""
    p = problem(columns=16, tokens=64, kind="unclipped")
    W = 100 * torch.randn(20_000, 16, generator=generator, dtype=torch.float64)
    factor = p.factor(order)
    certificate = certify(W, W, sweep_planes(W, p.grid, factor), p.H, factor)
    assert certificate.expected == pytest.approx(certificate.worst_case / 3, rel=1e-12)
    assert certificate.damped_loss / certificate.expected == pytest.approx(1, rel=0.05)


@given(problems(UNCLIPPED, columns=5, full_rank=True, damps=(0.1, 1.0)), st.sampled_from(ORDERS))
def test_no_grid_point_is_nearer_than_gamma_says(p: Problem, order: str) -> None:
    """Against all grid points that could be nearer, row by row."""
    factor, matrix, certificate = solved(p, order)
    H = p.damped_hessian(factor)
    errors = quadratic(p.W - matrix.decode(), H)
    worst = 1.0
    for w, s, error in zip(p.W, p.grid.steps().expand_as(p.W), errors.tolist(), strict=True):
        optimum = closest_vector(w, H, s, within=error)
        assume(optimum is not None)
        assert error <= certificate.gamma**2 * optimum * (1 + 1e-12)
        worst = max(worst, (error / optimum) ** 0.5 if optimum else 1.0)
    assert worst <= certificate.gamma * (1 + 1e-12)


@given(problems(), st.sampled_from(ORDERS))
def test_gamma_is_never_larger_than_the_seeds(p: Problem, order: str) -> None:
    """Their factor is `sqrt(1 + max_j ...)`, with the sum over the planes that follow; ours has no 1 beside it."""
    factor, _, certificate = solved(p, order)
    assume(certificate.clipped_rows == 0)
    profile = (p.grid.steps().square()[:, factor.order] * factor.d).expand_as(p.W)
    tails = profile.flip(1).cumsum(1).flip(1)
    assert 1.0 <= certificate.gamma <= float((1 + tails / profile).amax().sqrt())


def test_equal_planes_give_the_square_root_of_their_number() -> None:
    """Identity Hessian, one step: gamma^2 = in. (Round to nearest is optimal there; the theorem does not know.)"""
    H = torch.eye(9, dtype=torch.float64)
    step = torch.ones(1, 1, dtype=torch.float64)
    grid = Grid(scale=step, zero=torch.zeros_like(step), group=torch.zeros(9, dtype=torch.int64))
    W = torch.full((2, 9), 0.3, dtype=torch.float64)
    factor = factorize(H, damp=0.0)
    assert certify(W, W, sweep_planes(W, grid, factor), H, factor).gamma == 3.0


def test_rows_that_clip_are_counted_and_left_out_of_gamma() -> None:
    H = torch.eye(4, dtype=torch.float64)
    scale = torch.tensor([[1.0, 1.0], [1.0, 100.0], [0.1, 0.1]], dtype=torch.float64)
    grid = Grid(scale=scale, zero=torch.zeros_like(scale), group=torch.tensor([0, 0, 1, 1]), low=-4, high=3)
    W = torch.tensor([[1, 2, 3, 3], [4, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.float64)
    factor = factorize(H, damp=0.0)
    certificate = certify(W, W, sweep_planes(W, grid, factor), H, factor)
    assert (certificate.clipped, certificate.clipped_rows) == (2 / 12, 2 / 3)
    assert certificate.gamma == 2.0
    W[0, 0] = 9
    assert certify(W, W, sweep_planes(W, grid, factor), H, factor).gamma is None


@given(problems(), st.sampled_from(ORDERS))
def test_a_matrix_on_the_grid_has_lost_nothing(p: Problem, order: str) -> None:
    values = p.grid.round(p.W, slice(None))[1]
    factor = p.factor(order)
    certificate = certify(values, values, sweep_planes(values, p.grid, factor), p.H, factor)
    assert (certificate.loss, certificate.damped_loss, certificate.relative_loss) == (0.0, 0.0, 0.0)
    assert certificate.clipped == 0.0


@pytest.mark.parametrize("order", ORDERS[:-1])
def test_a_dead_input_costs_nothing_without_damping(order: str) -> None:
    """It is factored with an arbitrary length, which must not show in the bounds."""
    H = torch.diag(torch.tensor([1e-6, 2e-6, 0.0, 3e-6], dtype=torch.float64))
    live = torch.tensor([0, 1, 3])
    step = torch.full((1, 1), 0.5, dtype=torch.float64)
    W = torch.tensor([[0.3, 0.7, 5.2, 1.1]], dtype=torch.float64)

    def certificate(columns: Tensor) -> Certificate:
        grid = Grid(scale=step, zero=torch.zeros_like(step), group=torch.zeros(len(columns), dtype=torch.int64))
        part, h = W[:, columns], H[columns][:, columns]
        factor = factorize(h, order, damp=0.0)
        return certify(part, part, sweep_planes(part, grid, factor), h, factor)

    whole, alone = certificate(torch.arange(4)), certificate(live)
    assert close(whole.worst_case * 4, alone.worst_case * 3)
    assert close(whole.damped_loss * 4, alone.damped_loss * 3)
    assert whole.gamma == alone.gamma


def test_the_limit_of_iid_gaussian_weights_is_six_decibels_a_bit() -> None:
    for bits in (0.5, 1.0, 3.0, 7.0):
        assert limit(4.0**-bits * 2.5, torch.full((7,), 2.5), torch.ones(5)) == pytest.approx(bits, abs=1e-9)


def test_the_limit_fills_water_over_rows_and_directions() -> None:
    """Against the definition, summed pair by pair at a level chosen first."""
    rows, lengths, theta = torch.tensor([0.5, 1.0, 8.0]), torch.tensor([1.0, 0.3, 0.01, 2.0]), 0.2
    variances = [float(a * b) for a in rows for b in lengths]
    distortion = sum(min(theta, v) for v in variances) / 12
    rate = sum(max(0.0, 0.5 * math.log2(v / theta)) for v in variances) / 12
    assert limit(distortion, rows, lengths) == pytest.approx(rate, abs=1e-6)


def test_the_limit_at_no_loss_is_infinite_and_at_all_of_it_zero() -> None:
    rows, lengths = torch.tensor([1.0, 4.0]), torch.tensor([1.0, 2.0, 0.0])
    assert limit(0.0, rows, lengths) == math.inf
    assert limit(float((rows[:, None] * lengths).mean()), rows, lengths) == pytest.approx(0, abs=1e-9)


def test_the_limit_of_many_rows_is_that_of_all_pairs() -> None:
    g = torch.Generator().manual_seed(0)
    rows, lengths = torch.rand(3000, generator=g) + 0.01, torch.rand(500, generator=g) ** 4
    pairs = (rows.double()[:, None] * lengths.double()).flatten()
    theta = 0.05
    loss = float(pairs.clamp(max=theta).mean())
    assert limit(loss, rows, lengths) == pytest.approx(float((pairs / theta).log2().clamp(min=0).mean() / 2), abs=1e-3)


# ---- codes that are not those of the sweep ----


def scale_of(p: Problem, E: Tensor) -> float:
    """Return what rounding errors of a loss of `E` are relative to: a singular Hessian may leave one of any smallness."""
    return float(E.square().sum() * p.H.diagonal().sum()) / E.numel()


@given(problems(), st.sampled_from(ORDERS), st.integers(1, 3))
def test_strips_of_rows_change_nothing(p: Problem, order: str, strip: int) -> None:
    factor, matrix, whole = solved(p, order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "MEASURED_ROWS", strip)
        parts = certify(p.W, p.W, moved_from_the_sweep(p, factor, matrix), p.H, factor)
    scale = scale_of(p, p.W - round_to_nearest(p.W, p.grid).decode()) + scale_of(p, p.W - matrix.decode())
    for name, a, b in zip(Certificate._fields, whole, parts, strict=True):
        if name in ("loss", "nearest_loss"):
            assert abs(a - b) <= 1e-12 * scale
        elif name == "row_losses":
            assert bool(((a - b).abs() <= 1e-12 * scale * len(p.W)).all())
        elif name == "relative_loss":
            assert abs(a - b) * whole.loss <= 1e-12 * scale * a
        elif a is None or name in ("clipped", "clipped_rows", "degenerate"):
            assert a == b
        else:
            assert close(a, b)


def test_strips_cut_the_sweep_and_the_values_as_they_cut_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of every row, of none, or offsets alone."""
    p = problem(out=7, columns=8, kind="asymmetric", bits=2)
    single = p.grid.scale.mean(0, keepdim=True)
    factor = p.factor("pivoted")
    for grid in (p.grid, replace(p.grid, scale=single), replace(p.grid, scale=single, zero=p.grid.zero[:1])):
        matrix = nearest_plane(p.W, grid, factor)
        moved = polish(p.W, matrix, p.damped_hessian(factor), sweeps=2)
        found = []
        for strip in (1024, 2):
            monkeypatch.setattr(bounds, "MEASURED_ROWS", strip)
            solution = moved_from_the_sweep(replace(p, grid=grid), factor, moved)
            certificate = certify(p.W, p.W, solution, p.H, factor, values=1.01 * moved.decode())
            found.append(torch.cat([certificate.row_losses, numbers(certificate)]))
        assert not torch.equal(moved.codes, matrix.codes)
        torch.testing.assert_close(*found, rtol=1e-12, atol=0)


def numbers(certificate: Certificate) -> Tensor:
    """Return all numbers; -1 for None."""
    values = [value for name, value in certificate._asdict().items() if name not in ("row_losses", "degenerate")]
    return torch.tensor([-1.0 if value is None else value for value in values], dtype=torch.float64)


@given(problems(), st.sampled_from(ORDERS))
def test_the_loss_is_the_mean_of_the_rows_losses(p: Problem, order: str) -> None:
    _, matrix, certificate = solved(p, order)
    E = p.W - matrix.decode()
    assert certificate.row_losses.shape == (len(p.W),)
    assert abs(float(certificate.row_losses.mean()) - certificate.loss) <= 1e-12 * scale_of(p, E)
    rows = (p.X @ E.T).square().sum(0) / len(p.X) / p.W.shape[1]  # (out,), from the outputs
    assert bool(((certificate.row_losses - rows).abs() <= 1e-12 * len(p.W) * scale_of(p, E)).all())


@given(problems(), st.sampled_from(ORDERS))
def test_the_nearest_loss_is_that_of_round_to_nearest(p: Problem, order: str) -> None:
    factor, _, certificate = solved(p, order)
    matrix = round_to_nearest(p.W, p.grid)
    rounded = certify(p.W, p.W, Solution(matrix=matrix), p.H, factor)
    assert close(certificate.nearest_loss, rounded.nearest_loss)
    assert rounded.nearest_loss == rounded.loss
    E = p.W - matrix.decode()
    assert abs(rounded.loss - float(torch.trace(E @ p.H @ E.T)) / E.numel()) <= 1e-12 * scale_of(p, E)
    assert (rounded.worst_case, rounded.expected, rounded.gamma) == (None, None, None)
    assert rounded.clipped == float(p.clipped(p.W).double().mean())


@given(problems(), st.sampled_from(ORDERS))
def test_what_clips_and_the_bounds_are_those_of_the_sweep_and_the_losses_those_of_the_codes(
    p: Problem, order: str
) -> None:
    factor, matrix, first = solved(p, order)
    H = p.damped_hessian(factor)
    polished = polish(p.W, matrix, H, sweeps=3)
    found = certify(p.W, p.W, moved_from_the_sweep(p, factor, polished), p.H, factor)
    for name in ("clipped", "clipped_rows", "worst_case", "expected", "gamma", "nearest_loss"):
        assert getattr(found, name) == getattr(first, name)
    assert close(found.damped_loss, float(quadratic(p.W - polished.decode(), H).sum()) / p.W.numel())
    assert found.damped_loss <= first.damped_loss * (1 + 1e-12)


@given(problems(), st.sampled_from(ORDERS), st.integers(1, 4))
def test_rows_whose_sweep_does_not_clip_keep_the_bound_when_polished(p: Problem, order: str, sweeps: int) -> None:
    factor, matrix, _ = solved(p, order)
    H = p.damped_hessian(factor)
    codes, rounding = run("C25 1 relative error", p.W, p.data(factor), p.grid, factor.order)
    assume(torch.equal(codes, matrix.codes))
    targets = torch.empty_like(p.W)
    targets[:, factor.order] = rounding.targets.T
    inside = ~p.clipped(targets).any(1)
    polished = polish(p.W, matrix, H, sweeps=sweeps)
    bound = (p.grid.steps().square()[:, factor.order] * factor.d).sum(1).expand(len(p.W)) / 4
    rows = quadratic(p.W - polished.decode(), H)
    assert bool((rows[inside] <= bound[inside] * (1 + 1e-12)).all())
    found = certify(p.W, p.W, moved_from_the_sweep(p, factor, polished), p.H, factor)
    if bool(inside.all()):
        assert found.damped_loss <= found.worst_case * (1 + 1e-12)


@given(problems(UNCLIPPED, columns=5, full_rank=True, damps=(0.1, 1.0)), st.sampled_from(ORDERS))
def test_no_grid_point_is_nearer_to_polished_codes_than_gamma_says(p: Problem, order: str) -> None:
    factor, matrix, _ = solved(p, order)
    H = p.damped_hessian(factor)
    polished = polish(p.W, matrix, H, sweeps=9)
    gamma = certify(p.W, p.W, moved_from_the_sweep(p, factor, polished), p.H, factor).gamma
    errors = quadratic(p.W - polished.decode(), H).tolist()
    for w, s, error in zip(p.W, p.grid.steps().expand_as(p.W), errors, strict=True):
        optimum = closest_vector(w, H, s, within=error)
        assume(optimum is not None)
        assert optimum * (1 - 1e-12) <= error <= gamma**2 * optimum * (1 + 1e-12)


@given(problems(UNCLIPPED), st.sampled_from(ORDERS), st.sampled_from((0.9, 1.0, 1.3)))
def test_values_decide_the_loss_and_codes_the_rest(p: Problem, order: str, gain: float) -> None:
    """As where an entropy-coded matrix is scaled as a whole once it is solved."""
    factor, matrix, plain = solved(p, order)
    V = gain * matrix.decode()
    found = certify(p.W, p.W, moved_from_the_sweep(p, factor, matrix), p.H, factor, values=V)
    E = p.W - V
    assert abs(found.loss - float(torch.trace(E @ p.H @ E.T)) / E.numel()) <= 1e-12 * scale_of(p, E)
    for name in ("damped_loss", "worst_case", "expected", "gamma", "clipped", "clipped_rows", "nearest_loss"):
        assert getattr(found, name) == getattr(plain, name)


@pytest.mark.parametrize("two", [True, False], ids=["two networks", "one network"])
def test_losses_beside_are_those_of_outputs_on_the_rows(generator: torch.Generator, two: bool) -> None:
    """`E|W x - V x_hat|^2` of rows that the codes have never seen; with one network `x` is `x_hat`."""
    p = problem(0, out=5, columns=12)
    matrix = nearest_plane(p.W, p.grid, p.factor("natural"))
    target = p.W + 0.01 * torch.randn(p.W.shape, generator=generator, dtype=torch.float64)
    X_hat = torch.randn(40, 12, generator=generator, dtype=torch.float64)
    X = X_hat + 0.1 * torch.randn(X_hat.shape, generator=generator, dtype=torch.float64) if two else X_hat
    losses = losses_on_extra(p.W, target, matrix, Extra(X_hat=X_hat, X=X if two else None))
    loss, relative, nearest, own = means_on_extra(losses, outputs=5).tolist()
    outputs, plain = X @ p.W.T, p.grid.decode(p.grid.round(target)[0])
    lost, would = (float((outputs - X_hat @ V.T).square().mean()) / 12 for V in (matrix.decode(), plain))
    assert close(loss, lost)
    assert close(nearest, would)
    assert close(relative, lost / (float(outputs.square().mean()) / 12))
    alone = X_hat @ (target - matrix.decode()).T
    assert close(own, float(alone.square().sum() / outputs.square().sum()))


def scaled_problem(weights: float, inputs: float = 1.0) -> tuple[Tensor, Tensor, Certificate]:
    """Certify random weights and inputs, both times a factor, rounded to nearest."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(24, 16, generator=generator, dtype=torch.float64).mul_(weights).bfloat16().float()
    X = torch.randn(64, 16, generator=generator, dtype=torch.float64) * inputs
    grid = Grid(scale=(W.abs().amax(1, keepdim=True) / 7).clamp(min=1e-44), zero=torch.zeros(24, 1),
                group=torch.zeros(16, dtype=torch.long), low=-8, high=7)  # fmt: skip
    return W, X, certified(W, X.T @ X / 64, grid)


def certified(W: Tensor, H: Tensor, grid: Grid) -> Certificate:
    matrix = round_to_nearest(W, grid)
    return certify(W, W, Solution(matrix=matrix), H, factorize(H, damp=0.01))


@pytest.mark.parametrize("size", [1e-30, 1e-16, 1e15, 1e30])
def test_the_relative_loss_is_that_of_weights_of_usual_size(size: float) -> None:
    """Squares of such weights vanish or overflow in float32: the ratio was 1e257, and 0."""
    usual, other = (scaled_problem(factor)[2] for factor in (1.0, size))
    assert math.isfinite(other.nearest_loss)
    assert other.relative_loss == pytest.approx(usual.relative_loss, rel=0.05)


def one_large(W: Tensor, H: Tensor) -> None:
    W[3, 5] = 1e6


BREAKS = {
    "": lambda W, H: None,
    "all its weights are 0": lambda W, H: W.zero_(),
    "all its inputs are 0": lambda W, H: H.zero_(),
    "its outputs are too small for float32": lambda W, H: W.mul_(1e-30),
    "its inputs are the same for every token": lambda W, H: H.copy_(torch.outer(H[0], H[0])),
    "one weight outweighs all others": one_large,
}


@pytest.mark.parametrize("why", BREAKS)
def test_a_layer_whose_losses_tell_nothing_is_told(why: str) -> None:
    W, X, _ = scaled_problem(1.0)
    H = X.T @ X / 64
    BREAKS[why](W, H)
    scale = (W.abs().amax(1, keepdim=True) / 7).clamp(min=1e-44)
    grid = Grid(scale=scale, zero=torch.zeros(24, 1), group=torch.zeros(16, dtype=torch.long), low=-8, high=7)
    certificate = certified(W, H, grid)
    assert certificate.degenerate == why
    assert 0 <= certificate.relative_loss <= 1


@pytest.mark.parametrize("columns", [1, 7, 8, 9, 64, 100])
def test_running_sums_of_a_gpu_are_those_of_the_cpu_without_its_cumsum(
    columns: int, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    monkeypatch.setattr(bounds, "BLOCK_COLUMNS", 8)
    x = torch.rand(3, columns, dtype=torch.float64, generator=generator)
    with pretended(), Unordered() as seen:
        found = bounds._running_sums(x.to("pretend:0")).cpu()
    torch.testing.assert_close(found, x.cumsum(1), rtol=1e-14, atol=0)
    assert torch.equal(bounds._running_sums(x), x.cumsum(1))
    assert seen.found == set()

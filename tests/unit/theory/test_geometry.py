"""The pictures: the geometry behind them holds for any two inputs, and they are drawn as they should be."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nearplane.lattice.bounds import quadratic
from nearplane.lattice.factor import factorize
from nearplane.theory import geometry as g
from oracles import closest_vector

DIGITS = 1e-12
Problem = tuple[Tensor, Tensor, Tensor]


def _problem(seed: int, correlation: float) -> Problem:
    """Return inputs (5, 2), correlated, their Hessian, and weights (40, 2)."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    X[:, 1] = correlation * X[:, 0] + (1 - correlation**2) ** 0.5 * X[:, 1]
    return X, g.hessian(X), 3 * torch.randn(40, 2, generator=generator, dtype=torch.float64)


PROBLEMS = st.builds(_problem, seed=st.integers(0, 2**32 - 1), correlation=st.floats(-0.95, 0.95))


def depth(polygon: Tensor, points: Tensor) -> Tensor:
    """Return (n,) how deep points (n, 2) lie inside a polygon: the distance to the nearest edge, negative outside."""
    edge = polygon.roll(-1, 0) - polygon  # (corners, 2)
    inward = torch.stack([-edge[:, 1], edge[:, 0]], 1) / edge.norm(dim=1, keepdim=True)
    return ((points[:, None] - polygon) * inward).sum(2).amin(1)


@given(PROBLEMS)
def test_the_basis_is_the_inputs_rotated(problem: Problem) -> None:
    """Lengths and angles are those of the columns of X."""
    _, H, _ = problem
    B = g.basis(H)
    assert float((B.T @ B - H).norm()) <= DIGITS * float(H.norm())
    assert B[1, 1] == 0


@given(PROBLEMS)
def test_a_reduced_basis_spans_the_same_lattice_by_its_shortest_vectors(problem: Problem) -> None:
    """Lagrange: the last vector is the shortest of the lattice, the first the shortest that is not a multiple of it."""
    _, H, _ = problem
    B = g.basis(H)
    T = g.reduced(B)
    assert abs(int(T[0, 0] * T[1, 1] - T[0, 1] * T[1, 0])) == 1
    v, u = (B @ T.double()).unbind(1)
    reach = range(-40, 41)
    codes = torch.tensor([z for z in itertools.product(reach, reach) if any(z)])
    lengths = (codes.double() @ B.T).square().sum(1)
    other = codes[:, 0] * T[1, 1] != codes[:, 1] * T[0, 1]
    assert float(u @ u) == pytest.approx(float(lengths.min()), rel=DIGITS)
    assert float(v @ v) == pytest.approx(float(lengths[other].min()), rel=DIGITS)


@given(PROBLEMS)
def test_the_optimum_is_that_of_brute_force(problem: Problem) -> None:
    """No integers have a smaller loss."""
    _, H, W = problem
    losses = quadratic(W - g.solve(W, H, "optimum"), H)
    for w, loss in zip(W[:8], losses, strict=False):
        swept = g.sweep(w, H).loss
        assert float(loss) == pytest.approx(closest_vector(w, H, torch.ones(2, dtype=w.dtype), swept), rel=1e-9)


@pytest.mark.parametrize("method", g.METHODS)
@given(problem=PROBLEMS)
def test_cells_have_the_area_of_the_lattice_and_hold_what_is_rounded_to_them(
    method: g.Method, problem: Problem
) -> None:
    """All of one area and every error of the package's own rounding inside: the cells tile the plane."""
    _, H, W = problem
    cell, B = g.cell(H, method), g.basis(H)
    assert g.area(cell) == pytest.approx(float(H.det().sqrt()), rel=1e-10)
    errors = (W - g.solve(W, H, method)) @ B.T
    assert float(depth(cell, errors).min()) >= -DIGITS * float(B.norm())


@pytest.mark.nightly
@pytest.mark.parametrize("method", g.METHODS)
@given(problem=PROBLEMS)
def test_a_method_is_optimal_exactly_where_its_picture_says_so(method: g.Method, problem: Problem) -> None:
    """An error lies in the blue part of the cell if and only if the codes are the closest ones."""
    _, H, W = problem
    tiling, B = g.tiling(H, method, fineness=2), g.basis(H)
    codes = g.solve(W, H, method)
    inside = depth(tiling.agrees, (W - codes) @ B.T)
    clear = inside.abs() > 1e-9 * B.norm()  # on no edge
    assert torch.equal((inside > 0)[clear], (codes == g.closest(W, H)).all(1)[clear])
    assert tiling.share == pytest.approx(g.area(tiling.agrees) / float(H.det().sqrt()), rel=1e-9)
    assert tiling.share <= 1 + DIGITS


def test_cutting_through_corners_leaves_no_edge_without_a_length() -> None:
    """Its direction would be rounding noise, and cutting by it anything."""
    _, H, _ = _problem(5109, 0.95)
    agrees = g.tiling(H, "round to nearest", fineness=2).agrees
    assert len(agrees) == 4
    assert float((agrees.roll(-1, 0) - agrees).norm(dim=1).min()) > 0.1


@pytest.mark.parametrize("method", g.ORDERS)
@given(problem=PROBLEMS)
def test_the_cell_of_nearest_plane_is_a_rectangle_with_sides_sqrt_d(method: g.Method, problem: Problem) -> None:
    """The box of the Gram-Schmidt vectors."""
    _, H, _ = problem
    cell = g.cell(H, method)
    assert len(cell) == 4
    sides = cell.roll(-1, 0) - cell
    scale = float(H.trace())
    assert float((sides * sides.roll(-1, 0)).sum(1).abs().max()) <= DIGITS * scale
    squares = sides.square().sum(1)[:2].sort().values
    assert float((squares - factorize(H, g.ORDERS[method], damp=0.0).d.sort().values).abs().max()) <= DIGITS * scale


@pytest.mark.parametrize("method", g.ORDERS)
@given(problem=PROBLEMS)
def test_mean_and_worst_error_of_a_box_are_the_certificate_s(method: g.Method, problem: Problem) -> None:
    """A twelfth and a quarter of the sum of d."""
    _, H, _ = problem
    tiling = g.tiling(H, method, fineness=2)
    expected, worst = g.bounds(H, g.ORDERS[method])
    assert tiling.mean == pytest.approx(expected, rel=1e-10)
    assert tiling.worst == pytest.approx(worst, rel=1e-10)


@given(PROBLEMS)
def test_mean_error_of_rounding_is_a_twelfth_of_the_trace(problem: Problem) -> None:
    """Both errors are uniform and independent."""
    _, H, _ = problem
    assert g.mean_square(g.cell(H, "round to nearest")) == pytest.approx(float(H.trace()) / 12, rel=1e-10)


@pytest.mark.parametrize("method", g.METHODS)
def test_the_mean_over_a_cell_is_that_of_weights_that_were_rounded(method: g.Method) -> None:
    """The midpoint rule on n^2 squares is off by the order of n^-2 times the curvature."""
    H, n = g.hessian(g.INPUTS), 64
    tiling = g.tiling(H, method, fineness=n)
    assert abs(tiling.measured - tiling.mean) <= float(H.trace()) / n**2


def test_in_the_example_all_methods_differ_and_fit_the_optimum_in_the_order_of_the_claim() -> None:
    """What the titles say."""
    H, w = g.hessian(g.INPUTS), g.WEIGHTS[None]
    optimum, nearest, natural, reversed_ = (g.solve(w, H, method) for method in g.METHODS)
    assert torch.equal(reversed_, optimum)
    assert len({tuple(codes[0].tolist()) for codes in (optimum, nearest, natural)}) == 3
    shares = [g.tiling(H, method).share for method in g.METHODS]
    assert shares[1] < shares[2] < shares[3] < shares[0] == pytest.approx(1, abs=DIGITS)
    means = [g.tiling(H, method).mean for method in g.METHODS]
    assert means[0] < means[3] < means[2] < means[1]


def babai_first(w: Tensor, X: Tensor) -> tuple[int, Tensor]:
    """Return the code of the plane nearest to `X w`, and (tokens,) its projection on that plane. Sees no Hessian.

    The planes are `k x_0 + R x_1`; their normal is the part of `x_0` that is orthogonal to `x_1`.
    """
    target, x_0, x_1 = X @ w, X[:, 0], X[:, 1]
    normal = x_0 - (x_0 @ x_1) / (x_1 @ x_1) * x_1
    code = (target @ normal / (x_0 @ normal)).round()
    return int(code), target - (target @ normal / (x_0 @ normal) - code) * normal


@given(PROBLEMS)
def test_the_first_steps_of_gptq_and_babai_are_one(problem: Problem) -> None:
    """Error propagation through the inverse Hessian, seen in data space, is the projection on the nearest plane."""
    X, H, W = problem
    for w in W[:8]:
        code, moved = g.gptq_first(w, H)
        same, projected = babai_first(w, X)
        steps = g.sweep(w, H)
        assert code == same == int(steps.codes[0])
        scale = float((X @ w).norm()) + float(X.norm())
        assert float((X @ moved - projected).norm()) <= 1e-11 * scale
        assert float((X @ steps.path[1] - projected).norm()) <= 1e-11 * scale


@given(PROBLEMS)
def test_obq_takes_the_smallest_error_over_inverse_and_that_is_the_nearest_plane(problem: Problem) -> None:
    """Corollary 4: the distances of its criterion are those of the pictures, foot by foot."""
    _, H, W = problem
    B, inverse = g.basis(H), torch.linalg.inv(H)
    for w in W[:8]:
        distances = g.plane_distances(w, H)
        for j in (0, 1):
            path = g.sweep(w, H, g.ORDER_STARTING_WITH[j]).path @ B.T
            assert float((path[1] - path[0]).norm()) == pytest.approx(float(distances[j]), rel=1e-9)
        criterion = (w.round() - w).square() / inverse.diagonal()
        assert g.greedy(w, H).first == int(criterion.argmin())


def test_the_worked_example_comes_out_to_the_digit() -> None:
    """w = (0.8, 0.6), H^-1 = [[1, -1], [-1, 2]]: rounding w_0 to 1 moves w_1 to 0.4, which rounds to 0; the loss is halved."""
    w, H = g.worked_example()
    assert w.tolist() == [0.8, 0.6]
    assert torch.linalg.inv(H).tolist() == [[1, -1], [-1, 2]]
    steps = g.sweep(w, H)
    expected = torch.tensor([[0.8, 0.6], [1.0, 0.4], [1.0, 0.0]], dtype=torch.float64)
    assert float((steps.path - expected).abs().max()) < 1e-15
    assert steps.codes.tolist() == [1, 0]
    code, moved = g.gptq_first(w, H)
    assert code == 1
    assert float((moved - expected[1]).abs().max()) < 1e-15
    assert steps.loss == pytest.approx(0.2, rel=DIGITS)
    assert float(quadratic((w - w.round())[None], H)) == pytest.approx(2 * steps.loss, rel=DIGITS)

"""Every theorem the library leans on, as a property of random problems.

[C25] Chen, Hoefler, Alistarh (2507.18553); [B25] Birnick (2508.01077); [F22] Frantar, Alistarh (2208.11580) and Frantar et al.
(2210.17323). `docs/lattice.md` proves or explains them in the same order. Those that are tested beside the code they are about
are not repeated here; `ELSEWHERE` names them, and a test keeps the list honest.

Each runs as many examples as the profile says: 50, or 500 with `HYPOTHESIS_PROFILE=nightly`.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.linalg import inv

from nearplane.lattice.bounds import certify, quadratic
from nearplane.lattice.factor import Factor, factorize
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.solvers import nearest_plane, sweep_planes
from oracles import ALL, BACK_TO_FRONT, closest_vector, ql, run, same, unit_lower
from strategies import KINDS, ORDERS, UNCLIPPED, Problem, problems

TIE = 1e-9
DAMPS = (0.1, 1.0)  # where the papers' inverses are compared to 1e-12: they lose digits by their condition
SEEDS = st.integers(0, 2**32 - 1)

ELSEWHERE = {
    "test_nearest_plane.py": {
        "[C25] Theorem 1: Algorithms 1 = 5, 6, 7, 3 = 8; [B25] GPTQ, GPTQ-REC, BABAI, BABAI-PROJ-REC; [F22] lazy blocks; least "
        "squares; Lagrange with downdate: the same codes": "test_codes_equal_those_of_every_algorithm_of_the_seeds",
        "[F22] lazy blocks of any size": "test_the_block_size_does_not_change_codes",
        "[C25] F.4": "test_one_more_gptq_update_after_a_step_of_babai_changes_nothing",
        "[C25] Theorem 5": "test_any_factor_of_the_hessian_gives_the_same_codes",
        "[C25] Theorem 6": "test_rows_share_the_factor_whatever_their_steps",
        "a lattice is the same around each of its points": (
            "test_shifting_the_weights_by_a_lattice_vector_shifts_the_codes"
        ),
        "only ratios count": "test_scaling_weights_and_steps_together_or_the_inputs_changes_nothing",
        "an order is a permutation of the basis": "test_an_order_only_permutes_the_problem",
        "an orthogonal basis": "test_where_inputs_do_not_interact_everything_is_round_to_nearest",
        "points of the lattice": "test_a_matrix_on_the_grid_stays_as_it_is",
        "[B25] misprint of GPTQ-REC": "test_the_recursion_as_printed_differs_by_its_misprint",
        "the loop without downdate": (
            "test_without_the_downdate_the_lagrange_update_is_right_for_the_first_column_only"
        ),
    },
    "test_bounds.py": {
        "loss identity": "test_the_damped_loss_is_the_sum_of_the_planes_distances",
        "loss is a trace": "test_losses_are_traces_under_the_hessian",
        "[C25] worst case, Babai (1986)": "test_without_clipping_no_row_is_worse_than_the_bound",
        "the same, rows that do not clip": "test_rows_that_do_not_clip_keep_the_bound_on_any_grid",
        "worst case is tight": "test_the_bound_is_tight_at_the_corner_of_the_cell",
        "relative factor": "test_no_grid_point_is_nearer_than_gamma_says",
        "relative factor against [C25], [B25]": "test_gamma_is_never_larger_than_the_seeds",
        "rate-distortion function": "test_the_limit_fills_water_over_rows_and_directions",
        "worst case of polished codes": "test_rows_whose_sweep_does_not_clip_keep_the_bound_when_polished",
        "relative factor of polished codes": "test_no_grid_point_is_nearer_to_polished_codes_than_gamma_says",
    },
    "test_factor.py": {
        "factor": "test_the_factor_reproduces_the_damped_hessian_in_rounding_order",
        "uniqueness": "test_u_and_d_are_the_unit_upper_factor_that_the_seeds_invert_for",
        "volume": "test_the_determinant_does_not_depend_on_the_order",
        "[C25] Algorithm 4": "test_the_pivoted_order_is_algorithm_4_of_chen_et_al_reversed",
    },
    "../theory/test_obq.py": {
        "[C25] Theorem 3, Corollary 4": "test_the_next_column_is_that_of_the_nearest_hyperplane",
        "OBQ is nearest plane in its own order": "test_codes_are_those_of_nearest_plane_in_the_order_of_each_row",
    },
    "../theory/test_qr_factor.py": {
        "QL of the data is the factor": "test_undamped_it_is_the_ql_decomposition_of_the_data",
        "QR of the data keeps the digits that squaring loses": (
            "test_qr_loses_digits_with_the_condition_and_cholesky_with_its_square"
        ),
    },
    "test_polish.py": {
        "coordinate descent never rises": "test_the_loss_of_no_row_rises",
        "in blocks it is one column after another": "test_it_is_one_column_after_another_whatever_the_block",
        "where it ends": "test_at_the_end_no_single_code_can_move_to_a_lower_loss",
        "an orthogonal basis": "test_where_inputs_do_not_interact_anything_becomes_round_to_nearest",
        "steps given the codes": "test_fitting_steps_on_the_way_never_raises_the_loss",
        "where codes stay, steps are least squares": "test_steps_that_stay_are_those_of_lstsq",
        "bounds hold for what is refined": (
            "test_no_row_loses_more_than_the_first_solve_nor_than_one_on_the_grid_it_ends_with"
        ),
        "the floor, with limits": "test_no_solver_beats_brute_force_on_a_grid_with_limits",
        "the floor, without": "test_no_solver_beats_brute_force_on_a_lattice",
    },
    "test_beam.py": {
        "one candidate is nearest plane": "test_a_beam_of_one_is_nearest_plane",
        "places: wider beams hold narrower ones": "test_a_wider_beam_holds_every_narrower_one",
        "so the loss of no row rises": "test_the_loss_of_no_row_rises_with_the_beam",
        "all candidates are brute force": "test_a_beam_of_all_code_vectors_finds_the_best",
    },
    "../theory/test_reduction.py": {
        "LLL (1982)": "test_is_a_reduced_basis_of_the_same_lattice",
        "[C25] Algorithm 2": "test_loss_is_within_the_reduced_profile",
    },
    "../theory/test_vectors.py": {
        "lecture: absmax, zero point": "test_absmax_and_zero_point_are_those_of_the_slides",
    },
    "../verbs/test_hptq.py": {
        "AM / GM": "test_one_step_costs_what_the_unevenness_of_the_profile_says",
    },
    "../theory/test_shrunken.py": {
        "minimum-mean-square-error targets": "test_shrunken_targets_are_worth_a_tenth_of_a_bit_at_one_bit",
    },
    "test_corrected_target.py": {
        "[B25] section 3": "test_the_corrected_target_minimises_the_whole_objective",
        "closed form of trust": "test_trust_is_a_line_search_on_held_out_tokens",
    },
    "../matrix/test_to_rate.py": {
        "0.2546 bit, the box against the ball": (
            "test_iid_gaussian_weights_at_three_bits_are_a_quarter_of_a_bit_above_the_limit"
        ),
        "a rotation": "test_waterfilling_does_not_mind_a_rotation",
    },
}


@pytest.mark.parametrize("file", ELSEWHERE)
def test_theorems_tested_elsewhere_are_tested_there(file: str) -> None:
    tree = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert set(ELSEWHERE[file].values()) <= functions


def residuals(W: Tensor, matrix: QuantizedMatrix, factor: Factor) -> Tensor:
    """Return (out, in) `t - values = E U` in rounding order."""
    return (W - matrix.decode())[:, factor.order] @ factor.U


def steps(p: Problem, factor: Factor) -> Tensor:
    """Return (out, in) the step of every weight in rounding order."""
    return p.grid.steps().expand_as(p.W)[:, factor.order]


def near_a_tie(p: Problem, factor: Factor) -> bool:
    return run("C25 1 relative error", p.W, p.data(factor), p.grid, factor.order)[1].margin <= TIE


# The problem


@given(problems(damps=DAMPS), st.sampled_from(ORDERS))
def test_damping_is_data_appended_below_the_inputs(p: Problem, order: str) -> None:
    """[B25]: a QL factor of `[X / sqrt(tokens); sqrt(lambda) I]` is `(U sqrt(d))^T`, and the Hessian was never formed."""
    factor = p.factor(order)
    L = ql(p.data(factor)[:, factor.order])[1]
    assert same(L.T, factor.U * factor.d.sqrt())


@given(problems(), st.sampled_from(ORDERS))
def test_stretching_the_basis_by_the_steps_stretches_the_factor(p: Problem, order: str) -> None:
    """[C25] Theorem 6: the lattice `X diag(s)` has `U_s = diag(s) U diag(1/s)` and `d_s = d s^2`, so rows share `U`, `d`."""
    factor = p.factor(order)
    s = p.grid.steps()[0]
    stretched = factorize(s[:, None] * p.damped_hessian(factor) * s, factor.order, damp=0.0)
    s = s[factor.order]
    scaled = s[:, None] * factor.U / s
    assert same(stretched.U * stretched.d.sqrt(), scaled * factor.d.sqrt() * s)
    assert bool(((stretched.d / (factor.d * s**2) - 1).abs() <= 1e-12 * len(s)).all())


@given(problems(), st.sampled_from(ORDERS), st.integers(-9, 9))
def test_a_zero_point_only_shifts_the_codes(p: Problem, order: str, zero: int) -> None:
    """`scale (code - zero)` with limits moved by `zero` are the same values: the same lattice, numbered otherwise."""
    factor = p.factor(order)
    assume(not near_a_tie(p, factor))
    low, high = (None if end is None else end + zero for end in (p.grid.low, p.grid.high))
    moved = replace(p.grid, zero=p.grid.zero + zero, low=low, high=high)
    assert torch.equal(nearest_plane(p.W, moved, factor).codes, nearest_plane(p.W, p.grid, factor).codes + zero)


# GPTQ is nearest plane


@given(problems(damps=DAMPS), st.sampled_from(ORDERS))
def test_the_factor_of_gptq_is_the_inverse_of_the_factor(p: Problem, order: str) -> None:
    """[C25] Theorem 1, first step: `H^-1 = L D L^T` has `L = U^-T`, `D = 1 / d`."""
    factor = p.factor(order)
    inverse = inv(p.damped_hessian(factor)[factor.order][:, factor.order])
    assert same(unit_lower(inverse), inv(factor.U).T)


@pytest.mark.parametrize("name", ALL)
@given(problems(damps=DAMPS), st.sampled_from(ORDERS))
def test_every_algorithm_rounds_the_same_numbers(name: str, p: Problem, order: str) -> None:
    """[C25] Theorem 1 and the equivalence of [B25], step by step: what is rounded is `W_j + sum_{k<j} E_k U_kj` in each of them."""
    factor = p.factor(order)
    codes, rounding = run(name, p.W, p.data(factor), p.grid, factor.order)
    matrix = nearest_plane(p.W, p.grid, factor)
    assume(rounding.margin > TIE)
    assert torch.equal(matrix.codes, codes)
    targets = residuals(p.W, matrix, factor) + matrix.decode()[:, factor.order]
    seen = rounding.targets.T.flip(1) if name in BACK_TO_FRONT else rounding.targets.T
    assert same(seen, targets)


@given(problems(damps=DAMPS), SEEDS)
def test_obs_moves_the_other_weights_where_outputs_change_least(p: Problem, seed: int) -> None:
    """[F22], Lagrange: `delta = D / [H^-1]_qq H^-1_{:,q}` costs `D^2 / [H^-1]_qq`; no other move with the same D costs less."""
    H = p.damped_hessian(p.factor("natural"))
    inverse, g = inv(H), torch.Generator().manual_seed(seed)
    q = int(torch.randint(len(H), (), generator=g))
    delta = inverse[:, q] / inverse[q, q]
    cost = quadratic(delta[None], H)
    assert same(cost, 1 / inverse[None, q, q])
    others = delta + delta.norm() * torch.randn(20, len(H), generator=g, dtype=torch.float64)
    others[:, q] = delta[q]
    assert bool((quadratic(others, H) >= cost * (1 - 1e-12)).all())


# Cells and bounds


@given(problems(UNCLIPPED), st.sampled_from(ORDERS), SEEDS)
def test_boxes_tile_space(p: Problem, order: str, seed: int) -> None:
    """Babai's cells are the boxes `|(E U)_j| <= s_j / 2`: every target is in that of its codes and in no other."""
    factor = p.factor(order)
    matrix = nearest_plane(p.W, p.grid, factor)
    half = steps(p, factor) / 2
    assert bool((residuals(p.W, matrix, factor).abs() <= half * (1 + 1e-9)).all())
    g = torch.Generator().manual_seed(seed)
    for reach in (1, 1, 1, 3, 3, 9):
        shift = torch.randint(-reach, reach + 1, p.W.shape, generator=g, dtype=torch.int32)
        other = replace(matrix, codes=matrix.codes + shift)
        outside = (residuals(p.W, other, factor).abs() >= half * (1 - 1e-9)).any(1)
        assert bool(outside[shift.any(1)].all())


@given(problems(UNCLIPPED), st.sampled_from(ORDERS), SEEDS)
def test_a_lattice_point_within_half_the_shortest_length_is_found(p: Problem, order: str, seed: int) -> None:
    """`||X e||^2 < 1/4 min_j d_j s_j^2` leaves every residual below half a step: then Babai is exact, and so the optimum."""
    factor = p.factor(order)
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-99, 100, p.W.shape, generator=g, dtype=torch.int32)
    radius = (steps(p, factor).square() * factor.d).amin(1, keepdim=True).sqrt() / 2  # (out, 1)
    inverse = inv(p.damped_hessian(factor))
    q = torch.randint(p.W.shape[1], (len(p.W),), generator=g)  # the weight that moves most for what it costs
    e = 0.999 * radius * inverse[q] / inverse.diagonal()[q].sqrt()[:, None]
    assert torch.equal(nearest_plane(p.grid.decode(codes) + e, p.grid, factor).codes, codes)


@given(problems(("unclipped",), columns=4), st.sampled_from(ORDERS))
def test_the_mean_loss_over_all_offsets_is_a_third_of_the_bound(p: Problem, order: str) -> None:
    """[C25]: `1/12 sum_j d_j s_j^2`, whatever the Hessian.

    Over the K^in offsets at the middles of K equal parts of each step. Given the columns before it, the residual of column j runs
    through K equally spaced points of the step, at most 1/2K off its middles: the mean square is between
    `(1 - 1/K^2) s^2 / 12` and `(1 + 2/K^2) s^2 / 12`.
    """
    K = 8
    factor = p.factor(order)
    offsets = torch.cartesian_prod(*[(torch.arange(K, dtype=torch.float64) + 0.5) / K] * p.W.shape[1])
    W = p.W[:1] + p.grid.steps() * offsets.reshape(-1, p.W.shape[1])
    certificate = certify(W, W, sweep_planes(W, p.grid, factor), p.H, factor)
    assert certificate.expected is not None
    ratio = certificate.damped_loss / certificate.expected
    assert (1 - 1 / K**2) * (1 - 1e-9) <= ratio <= (1 + 2 / K**2) * (1 + 1e-9)


CLIPPED = tuple(kind for kind in KINDS if kind not in UNCLIPPED)


@given(problems(CLIPPED, columns=5, full_rank=True, damps=DAMPS), st.sampled_from(ORDERS))
def test_rows_that_do_not_clip_are_within_gamma_of_the_best_of_all_integers(p: Problem, order: str) -> None:
    """[C25]: limits that no target of a row exceeds play no part: the row's error is at most gamma times the optimum's."""
    factor = p.factor(order)
    solution, H = sweep_planes(p.W, p.grid, factor), p.damped_hessian(factor)
    matrix, certificate = solution.matrix, certify(p.W, p.W, solution, p.H, factor)
    targets = torch.empty_like(p.W)
    targets[:, factor.order] = residuals(p.W, matrix, factor) + matrix.decode()[:, factor.order]
    inside = ~p.clipped(targets).any(1)
    assume(bool(inside.any()))
    assert certificate.gamma is not None
    errors = quadratic(p.W - matrix.decode(), H)
    for w, s, error in zip(p.W[inside], p.grid.steps().expand_as(p.W)[inside], errors[inside].tolist(), strict=True):
        optimum = closest_vector(w, H, s, within=error)
        assume(optimum is not None)
        assert error <= certificate.gamma**2 * optimum * (1 + 1e-12)


def test_gamma_is_reached_by_two_equal_planes() -> None:
    """In a corner of the box a grid point at half the squared distance exists. [B25] Theorem 3.2 must have sqrt(n + 1)."""
    U = torch.tensor([[1.0, 0.5], [0.0, 1.0]], dtype=torch.float64)
    W, H = torch.tensor([[0.5, 0.25]], dtype=torch.float64), U @ U.T
    one = torch.ones(1, 1, dtype=torch.float64)
    grid = Grid(scale=one, zero=torch.zeros_like(one), group=torch.zeros(2, dtype=torch.int64))
    factor = factorize(H, damp=0.0)
    certificate = certify(W, W, sweep_planes(W, grid, factor), H, factor)
    optimum = closest_vector(W[0], H, torch.ones(2, dtype=torch.float64), within=0.5)
    assert (certificate.damped_loss * 2, optimum) == (0.5, 0.25)
    assert certificate.gamma == pytest.approx(2.0**0.5, rel=1e-15)

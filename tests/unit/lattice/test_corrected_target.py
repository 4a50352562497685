"""Corrected targets, against least squares on the raw tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from nearplane.lattice.factor import Factor, factorize
from nearplane.lattice.moments import moment_difference, trust, weighted_difference
from oracles import damped, same
from strategies import ORDERS, problem


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Raw tokens of a layer in the original and in the quantized network.

    Args:
        W: (out, in).
        X, X_hat: (tokens, in) inputs.
        r, r_hat: (tokens, out) streams that the output is added to.
    """

    W: Tensor
    X: Tensor
    X_hat: Tensor
    r: Tensor
    r_hat: Tensor

    def moments(self, tokens: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
        """Return H, C and S of some tokens."""
        X, X_hat, lost = self.X[tokens], self.X_hat[tokens], (self.r - self.r_hat)[tokens]
        return X_hat.T @ X_hat / len(X), X.T @ X_hat / len(X), lost.T @ X_hat / len(X)

    def wanted(self) -> Tensor:
        """Return (tokens, out) what the quantized layer should put out."""
        return self.X @ self.W.T + self.r - self.r_hat


def mismatch(W: Tensor, H: Tensor, C: Tensor, S: Tensor | None) -> Tensor:
    """Return (out, in) the error of the output due to quantized inputs, correlated with these inputs."""
    lost = W @ moment_difference(H, C, W.dtype)
    return lost if S is None else lost.add_(S)


def drift(seed: int, out: int, columns: int, tokens: int, noise: float) -> Drift:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    X = normal(tokens, columns) @ (normal(columns, columns) / columns**0.5 + torch.eye(columns, dtype=torch.float64))
    r = normal(tokens, out)
    return Drift(
        W=normal(out, columns), X=X, X_hat=X + noise * (X @ normal(columns, columns) + normal(tokens, columns)),
        r=r, r_hat=r + noise * normal(tokens, out),
    )  # fmt: skip


drifts = st.builds(
    drift,
    seed=st.integers(0, 2**32 - 1),
    out=st.integers(1, 4),
    columns=st.integers(1, 8),
    tokens=st.integers(2, 40),
    noise=st.sampled_from((0.01, 0.1, 1.0)),
)


@given(drifts, st.sampled_from(ORDERS[:-1]), st.sampled_from((0.01, 0.1)))
def test_the_corrected_target_minimises_the_whole_objective(p: Drift, order: str, damp: float) -> None:
    """`||X W^T + r - X_hat V^T - r_hat||^2 / tokens + shift ||W - V||^2`, solved on the stacked tokens."""
    H, C, S = p.moments()
    factor = factorize(H, order, damp=damp)
    stacked = torch.cat([p.wanted() / len(p.X) ** 0.5, factor.shift**0.5 * p.W.T])
    V = torch.linalg.lstsq(damped(p.X_hat, factor.shift), stacked).solution.T
    assert same(p.W + factor.solve(mismatch(p.W, H, C, S)), V)


@given(drifts)
def test_without_damping_the_corrected_target_is_ordinary_least_squares(p: Drift) -> None:
    """The target does not matter where the data alone decide."""
    tokens = 5 * p.W.shape[1]
    p = drift(len(p.X), *p.W.shape, tokens, 0.1)
    H, C, S = p.moments()
    assume(float(torch.linalg.cond(H)) < 1e3)  # as damping sees to elsewhere: 1e-12 is what is left of float64
    V = torch.linalg.lstsq(p.X_hat, p.wanted()).solution.T
    assert same(p.W + factorize(H, damp=0.0).solve(mismatch(p.W, H, C, S)), V)


@given(drifts)
def test_the_residual_mismatch_enters_before_the_solve(p: Drift) -> None:
    """What `S` adds to the weights is `S (H + shift I)^-1`, not `S`."""
    H, C, S = p.moments()
    factor = factorize(H, damp=0.1)
    with_, without = (factor.solve(mismatch(p.W, H, C, s)) for s in (S, None))
    damped_H = H + factor.shift * torch.eye(len(H), dtype=torch.float64)
    solved = torch.linalg.solve(damped_H, S.T).T
    scale = float(with_.norm() + without.norm())
    assert float((with_ - without - solved).norm()) <= 1e-12 * scale


@given(drifts)
def test_the_correction_of_identical_networks_is_exactly_0(p: Drift) -> None:
    H = p.moments()[0]
    factor = factorize(H)
    for S in (None, torch.zeros_like(p.W)):
        lost = mismatch(p.W, H, H, S)
        assert not bool(lost.any())
        assert not bool(factor.solve(lost).any())
        assert trust(lost, H, factor.solve(lost)) == 0.0


def line_search(p: Drift, Delta: Tensor, held_out: slice) -> float:
    """Return by bisection where in [0, 1] the error on the raw held-out tokens stops falling along `Delta`."""
    wanted, X, D = p.wanted()[held_out], p.X_hat[held_out], Delta.T

    def slope(rho: float) -> float:
        return -float(((wanted - X @ (p.W.T + rho * D)) * (X @ D)).sum())

    low, high = 0.0, 1.0
    if slope(low) >= 0:
        return low
    if slope(high) <= 0:
        return high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return low


@given(drifts, st.sampled_from((-3.0, 0.3, 1.0, 3.0)))
def test_trust_is_a_line_search_on_held_out_tokens(p: Drift, length: float) -> None:
    """The closed form, clipped to [0, 1]; other lengths of the direction reach the inside and both ends."""
    n = len(p.X)
    held_out = slice(n - max(1, n // 5), n)
    H, C, S = p.moments(slice(0, held_out.start))
    Delta = length * factorize(H).solve(mismatch(p.W, H, C, S))
    H_v, C_v, S_v = p.moments(held_out)
    rho = trust(mismatch(p.W, H_v, C_v, S_v), H_v, Delta)
    assert 0.0 <= rho <= 1.0
    energy = float((p.X_hat[held_out] @ Delta.T).square().sum()) / len(p.X[held_out])
    terms = float((p.W.norm() * (H_v.norm() + C_v.norm()) + S_v.norm()) * Delta.norm())
    assert abs(rho - line_search(p, Delta, held_out)) * energy <= 1e-12 * terms  # rho energy is a difference of terms


@given(drifts)
def test_moments_of_the_other_tokens_are_the_difference(p: Drift) -> None:
    n = len(p.X)
    k = max(1, n // 5)
    for whole, part, rest in zip(p.moments(), p.moments(slice(n - k, n)), p.moments(slice(0, n - k)), strict=True):
        difference = weighted_difference(whole, n, part, k)
        scale = whole.norm() * n / (n - k)
        assert bool((difference - rest).norm() <= 1e-12 * scale)


def test_the_factor_may_come_in_any_order() -> None:
    p = drift(0, 3, 6, 30, 0.1)
    H, C, S = p.moments()
    lost = mismatch(p.W, H, C, S)
    factors: list[Factor] = [factorize(H, order) for order in ORDERS[:-1]]
    for factor in factors[1:]:
        assert same(factor.solve(lost), factors[0].solve(lost))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_a_correction_in_float32_is_that_in_float64_to_a_thousandth_of_what_rounding_changes(scale: float) -> None:
    """Of inputs whose lengths are a thousandfold apart, with a residual; the moments are in float64 all the same."""
    p = problem(out=32, columns=48, tokens=200, input_scale=scale)
    g = torch.Generator().manual_seed(5)
    C = p.H + 0.1 * p.H @ torch.randn(48, 48, generator=g, dtype=torch.float64) / 48**0.5
    S, factor = 0.01 * p.W @ p.H, factorize(p.H)
    exact = factor.solve(mismatch(p.W, p.H, C, S))
    found = factor.solve(mismatch(p.W.float(), p.H, C, S))
    assert found.dtype == torch.float32
    assert float(((found - exact).abs() / p.grid.steps()).max()) < 1e-3
    assert trust(mismatch(p.W.float(), p.H, C, S), p.H, found) == pytest.approx(
        trust(mismatch(p.W, p.H, C, S), p.H, exact), rel=1e-4
    )

"""One layer input: factors made once, of the moments, and what they are factors of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice.factor import Factor, factorize
from nearplane.lattice.moments import Moments
from nearplane.matrix.inputs import LayerInput, corrected
from nearplane.recipe.rate_scheme import RateScheme
from nearplane.recipe.scheme import Scheme
from nearplane.recipe.schemes import GridScheme
from oracles import same
from strategies import Problem, problems

NAMED = ("natural", "activation", "pivoted")
COLUMNS, TOKENS = 12, 100
FITTING = slice(0, 80)  # tokens that the correction is first fitted on; the others are held out


def streams(generator: torch.Generator, *, drift: float = 0.3) -> tuple[Tensor, Tensor]:
    """Return (tokens, in) inputs in the original and in the quantized network."""
    mixing, shift = torch.randn(2, COLUMNS, COLUMNS, generator=generator, dtype=torch.float64) / COLUMNS**0.5
    X = torch.randn(TOKENS, COLUMNS, generator=generator, dtype=torch.float64) @ mixing
    return X, X + drift * X @ shift


def seen(X: Tensor, X_hat: Tensor) -> Moments:
    """Return what calibration knows of them, the last fifth held out."""

    def moments(tokens: slice) -> Moments:
        x, n = X_hat[tokens], len(X_hat[tokens])
        return Moments(H=x.T @ x / n, C=X[tokens].T @ x / n, tokens=n)

    return replace(moments(slice(None)), held_out=moments(slice(FITTING.stop, None)))


def product(factor: Factor) -> Tensor:
    """Return (in, in) `U diag(d) U^T`, in the order of the columns."""
    H = torch.empty_like(factor.U)
    H[factor.order[:, None], factor.order] = factor.U * factor.d @ factor.U.T
    return H


@given(problems(dead=0), st.sampled_from(NAMED))
def test_the_damped_hessian_is_what_was_factored(p: Problem, order: str) -> None:
    inputs = LayerInput.of(p.H)
    factor = inputs.factor(order, p.damp)
    assert same(inputs.damped(factor, torch.float64), product(factor))
    assert same(inputs.damped(factor, torch.float64), p.damped_hessian(factor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_damped_hessian_has_its_own_memory(dtype: torch.dtype, generator: torch.Generator) -> None:
    H = seen(*streams(generator)).H
    before, inputs = H.clone(), LayerInput.of(H)
    damped = inputs.damped(inputs.factor("natural", 0.01), dtype)
    assert damped.dtype == dtype
    damped.zero_()
    assert torch.equal(H, before)


def test_each_factor_is_made_once(generator: torch.Generator) -> None:
    inputs = LayerInput.of(seen(*streams(generator)))
    some = [
        inputs.factor(order, damp, fitting=f) for order in NAMED for damp in (0.01, 0.1, "auto") for f in (False, True)
    ]
    again = [
        inputs.factor(order, damp, fitting=f) for order in NAMED for damp in (0.01, 0.1, "auto") for f in (False, True)
    ]
    assert all(a is b for a, b in zip(some, again, strict=True))
    assert len({id(factor) for factor in some}) == len(some)
    assert inputs.shared.eigenvalues is inputs.shared.eigenvalues


def test_the_fitting_factor_is_that_of_the_tokens_not_held_out(generator: torch.Generator) -> None:
    X, X_hat = streams(generator)
    inputs = LayerInput.of(seen(X, X_hat))
    rest = X_hat[FITTING].T @ X_hat[FITTING] / FITTING.stop
    for order in NAMED:
        for fitting, H in ((True, rest), (False, X_hat.T @ X_hat / TOKENS)):
            factor, expected = inputs.factor(order, 0.01, fitting=fitting), factorize(H, order)
            assert torch.equal(factor.order, expected.order)
            assert same(product(factor), product(expected))


def test_without_tokens_held_out_the_fitting_factor_is_that_of_all(generator: torch.Generator) -> None:
    inputs = LayerInput.of(replace(seen(*streams(generator)), held_out=None))
    one, other = (inputs.factor("activation", 0.01, fitting=fitting) for fitting in (False, True))
    assert torch.equal(one.U, other.U)


def test_eigenvalues_are_those_of_the_hessian_none_below_zero(generator: torch.Generator) -> None:
    X = streams(generator)[0][:5]  # five tokens: seven eigenvalues are 0, some computed below it
    H = X.T @ X / 5
    found = LayerInput.of(H).shared.eigenvalues
    assert bool((found >= 0).all())
    expected = torch.cat([torch.zeros(COLUMNS - 5).double(), torch.linalg.svdvals(X).square().flip(0) / 5])
    assert bool(((found - expected).abs() <= 1e-12 * expected.max()).all())


def test_eigenvalues_of_a_diagonal_hessian_are_its_diagonal(generator: torch.Generator) -> None:
    diagonal = torch.rand(COLUMNS, generator=generator, dtype=torch.float64)
    diagonal[3] = 0
    assert torch.equal(LayerInput.of(diagonal.diag()).shared.eigenvalues, diagonal)


def test_the_mean_logarithm_of_eigenvalues_above_a_level_needs_no_eigenvalues(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    H = seen(*streams(generator)).H
    eigenvalues = torch.linalg.eigvalsh(H)
    inputs = LayerInput.of(H)
    assert inputs.shared.mean_log_eigenvalue(1.001 * float(eigenvalues[0])) is None
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda _: pytest.fail("eigenvalues were computed"))
    found = inputs.shared.mean_log_eigenvalue(0.999 * float(eigenvalues[0]))
    assert found == pytest.approx(float(eigenvalues.log2().mean()), rel=1e-12)
    assert LayerInput.of(torch.zeros(3, 3).double()).shared.mean_log_eigenvalue(1e-9) is None
    assert inputs.shared.mean_log_eigenvalue(0.0) is None


def test_layers_share_factors_but_not_their_own_residual(generator: torch.Generator) -> None:
    known = seen(*streams(generator))
    one = LayerInput.of(known)
    factor, eigenvalues = one.factor("pivoted", 0.01), one.shared.eigenvalues
    other = LayerInput.of(replace(known, C=None, lost=torch.ones(4, COLUMNS).double()), one.shared)
    assert other.factor("pivoted", 0.01) is factor
    assert other.shared.eigenvalues is eigenvalues
    assert one.moments.lost is None
    assert other.moments.lost is not None
    later = other.factor("natural", 0.01)
    assert one.factor("natural", 0.01) is later


@pytest.mark.parametrize("scheme", [GridScheme(damp=0.02), RateScheme(rate=3, damp=0.02)])
@pytest.mark.parametrize("corrects", [True, False])
def test_the_factor_of_the_sweep_is_damped_as_the_scheme_says(
    scheme: Scheme, corrects: bool, generator: torch.Generator
) -> None:
    """What it says is in `tests/unit/recipe/test_schemes.py`."""
    known = seen(*streams(generator))
    inputs = LayerInput.of(known if corrects else known.H)
    found = inputs.factor_of_the_sweep(scheme)
    assert found is inputs.factor(scheme.order, scheme.damp_of_the_sweep(corrects))


@pytest.mark.parametrize("why", ["not asked for", "nothing to correct by", "nothing held out", "networks agree"])
def test_without_a_correction_the_target_is_the_weights_with_dead_inputs_at_0(
    why: str, generator: torch.Generator
) -> None:
    X, X_hat = streams(generator, drift=0.0 if why == "networks agree" else 0.3)
    X[:, 4] = X_hat[:, 4] = 0
    known = seen(X, X_hat)
    known = replace(known, C=None) if why == "nothing to correct by" else known
    known = replace(known, held_out=None) if why == "nothing held out" else known
    W = torch.randn(5, COLUMNS, generator=generator, dtype=torch.float64)
    before = W.clone()
    target, rho, *_ = corrected(W, LayerInput.of(known), GridScheme(correct=why != "not asked for"))
    assert rho == 0.0
    assert torch.equal(target, before.index_fill(1, torch.tensor([4]), 0.0))
    assert torch.equal(W, before)


def test_a_drift_that_is_linear_is_undone(generator: torch.Generator) -> None:
    """`X_hat = X (I + D)`: with hardly any damping the target gives the outputs of the original network, dead inputs staying 0."""
    X, _ = streams(generator)
    X[:, 4] = 0
    D = 0.2 * torch.randn(COLUMNS, COLUMNS, generator=generator, dtype=torch.float64) / COLUMNS**0.5
    D[4] = D[:, 4] = 0
    X_hat = X @ (torch.eye(COLUMNS, dtype=torch.float64) + D)
    W = torch.randn(5, COLUMNS, generator=generator, dtype=torch.float64)
    target, rho, *_ = corrected(W, LayerInput.of(seen(X, X_hat)), GridScheme(damp=1e-9))
    assert rho == pytest.approx(1.0, abs=1e-6)
    assert not target[:, 4].any()
    assert torch.allclose(X_hat @ target.T, X @ W.T, rtol=0, atol=1e-5 * float((X @ W.T).abs().max()))


def wide_problem(rows: int, tokens: int = 4000) -> tuple[Tensor, Moments, Moments]:
    """Return weights (rows, 48) in float32, and what calibration knows in float32 and in float64; quantized inputs have drifted."""
    g = torch.Generator().manual_seed(5)
    X = torch.randn(tokens, 48, generator=g) @ torch.randn(48, 48, generator=g)
    X_hat = X + 0.1 * X @ torch.randn(48, 48, generator=g) / 7 + 2.0 * torch.randn(tokens, 48, generator=g)

    def moments(dtype: torch.dtype) -> Moments:
        whole, held = (
            Moments(H=x.T @ x / len(x), C=y.T @ x / len(x), tokens=len(x))
            for x, y in (
                (X_hat[part].double(), X[part].double()) for part in (slice(None), slice(tokens * 4 // 5, None))
            )
        )
        return replace(whole, held_out=replace(held, H=held.H.to(dtype), C=held.C.to(dtype)))

    return torch.randn(rows, 48, generator=g), moments(torch.float32), moments(torch.float64)


def test_some_rows_tell_how_far_a_correction_is_to_be_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    W, single, _ = wide_problem(1000, tokens=200)
    some, told, *_ = corrected(W, LayerInput.of(single), GridScheme())
    monkeypatch.setattr("nearplane.matrix.inputs.TRIED_ROWS", len(W))
    every, rho, *_ = corrected(W, LayerInput.of(single), GridScheme())
    assert 0 < rho < 1
    assert told != rho
    assert told == pytest.approx(rho, abs=0.02)
    assert float((some - every).norm()) <= 0.05 * float((every - W).norm())


def test_factors_in_float32_are_as_good_where_nothing_hangs_on_the_last_digits() -> None:
    W, single, double = wide_problem(32)
    (target, rho), (exact, expected) = (
        corrected(W, LayerInput.of(each), GridScheme())[:2] for each in (single, double)
    )
    assert rho == pytest.approx(expected, rel=1e-4)
    assert float((target - exact).norm()) <= 1e-4 * float((exact - W).norm())
    one, other = LayerInput.of(single), LayerInput.of(double)
    assert one.factor_of_the_correction(GridScheme()).U.dtype == torch.float32
    assert one.factor_of_the_sweep(GridScheme()).U.dtype == torch.float64
    assert other.factor_of_the_correction(GridScheme()).U.dtype == torch.float64


def test_with_a_target_only_its_moments_are_missing_and_a_second_target_is_refused(generator: torch.Generator) -> None:
    scheme = GridScheme(bits=4)
    W = torch.randn(6, COLUMNS, generator=generator, dtype=torch.float64)
    inputs = LayerInput.of(seen(*streams(generator)))
    before = inputs.moments
    assert before.corrects
    corrected(W, inputs, scheme)
    solving = inputs.with_a_target()
    assert inputs.moments is before
    assert (solving.moments.C, solving.moments.lost, solving.moments.held_out) == (None, None, None)
    assert solving.moments.H is before.H
    assert solving.factor_of_the_sweep(scheme) is inputs.factor_of_the_sweep(scheme)
    with pytest.raises(NumericalError, match="Make a new LayerInput"):
        corrected(W, solving, scheme)

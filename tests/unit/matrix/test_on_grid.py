"""One matrix from end to end: what is returned, recorded and refused."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nearplane.errors import NumericalError, RecipeError
from nearplane.formats.gguf.gguf_layers import packed_blocks, unpack
from nearplane.lattice.factor import factorize
from nearplane.lattice.grid import Grid
from nearplane.lattice.moments import Moments, trust
from nearplane.lattice.scale import Steps
from nearplane.lattice.solvers import round_to_nearest
from nearplane.matrix.inputs import LayerInput, corrected
from nearplane.matrix.quantize_matrix import quantize_matrix
from nearplane.number_formats import TYPES, integers
from nearplane.recipe.block_scheme import BlockScheme
from nearplane.recipe.rate_scheme import RateScheme
from nearplane.recipe.schemes import GridScheme
from nearplane.record.record import LayerRecord
from oracles import same
from strategies import Problem, problem, problems

SOLVERS = ("nearest-plane", "round-to-nearest")
ORDERS = ("natural", "activation", "pivoted")


@st.composite
def schemes(draw: st.DrawFn, columns: int) -> GridScheme:
    """Draw a scheme whose group size divides the columns."""
    solver = draw(st.sampled_from(SOLVERS))
    return GridScheme(
        bits=draw(st.integers(2, 8)),
        group_size=draw(st.sampled_from([None, *(d for d in range(1, columns + 1) if columns % d == 0)])),
        symmetric=draw(st.booleans()),
        order=draw(st.sampled_from(ORDERS)),
        solver=solver,
        scale=draw(st.sampled_from(("minmax", "mse"))),
        damp=draw(st.sampled_from((0.01, 0.1, "auto"))),
    )


def untimed(record: LayerRecord) -> LayerRecord:
    return replace(record, seconds=0.0)


@given(st.data(), problems(columns=12), st.sampled_from((torch.float64, torch.float32, torch.bfloat16)))
def test_the_recorded_losses_are_those_of_the_returned_codes(
    data: st.DataObject, p: Problem, dtype: torch.dtype
) -> None:
    """Exact in float64 whatever the dtype of the weights: steps were rounded to their storage before the solve."""
    scheme = data.draw(schemes(p.W.shape[1]))
    W, H = p.W.to(dtype), p.H
    matrix, record = quantize_matrix(W, H, scheme, storage=torch.bfloat16)
    target = W.double().masked_fill(H.diagonal() == 0, 0)
    E = target - matrix.grid.to(torch.float64).decode(matrix.codes)
    shift = record.damp * float(H.diagonal().mean())
    damped = H + shift * torch.eye(len(H), dtype=torch.float64)
    size = E.numel()
    scale = float(E.square().sum() * damped.diagonal().sum()) / size  # fitted steps may leave a loss of any smallness
    assert abs(record.damped_loss - float(torch.trace(E @ damped @ E.T)) / size) <= 1e-12 * scale
    scale = float(E.square().sum() * H.diagonal().sum()) / size
    assert abs(record.loss - float(torch.trace(E @ H @ E.T)) / size) <= 1e-12 * scale
    assert torch.equal(matrix.grid.scale.bfloat16().to(matrix.grid.scale.dtype), matrix.grid.scale)
    assert matrix.codes.dtype == torch.int32
    assert int(matrix.codes.min()) >= matrix.grid.low
    assert int(matrix.codes.max()) <= matrix.grid.high


def test_the_recorded_loss_is_the_trace_to_1e_12_on_a_regular_problem() -> None:
    p = problem(out=16, columns=32, tokens=256)
    matrix, record = quantize_matrix(p.W, p.H, GridScheme(bits=3, group_size=8))
    E = p.W - matrix.decode()
    loss = float(torch.trace(E @ p.H @ E.T)) / E.numel()
    assert record.loss == pytest.approx(loss, rel=1e-12)
    energy = float(torch.trace(p.W @ p.H @ p.W.T)) / E.numel()
    assert record.relative_loss == pytest.approx(loss / energy, rel=1e-12)


@given(st.data(), problems(columns=12, dead=3))
def test_dead_inputs_decode_to_0_and_are_counted(data: st.DataObject, p: Problem) -> None:
    matrix, record = quantize_matrix(p.W, p.H, data.draw(schemes(p.W.shape[1])), storage=torch.float64)
    dead = (p.X == 0).all(0)
    assert record.dead == int(dead.sum())
    assert not bool(matrix.decode()[:, dead].any())


@given(st.data(), problems(columns=12, dead=0))
def test_the_nearest_loss_is_that_of_plain_rounding_on_the_same_grid(data: st.DataObject, p: Problem) -> None:
    scheme = data.draw(schemes(p.W.shape[1]))
    matrix, record = quantize_matrix(p.W, p.H, scheme, storage=torch.float64)
    E = p.W - round_to_nearest(p.W, matrix.grid).decode()
    scale = float(E.square().sum() * p.H.diagonal().sum()) / E.numel()
    assert abs(record.nearest_loss - float(torch.trace(E @ p.H @ E.T)) / E.numel()) <= 1e-12 * scale
    if scheme.solver == "round-to-nearest":
        assert record.nearest_loss == pytest.approx(record.loss, rel=1e-12)


def test_round_to_nearest_needs_nothing_but_the_range() -> None:
    p = problem()
    scheme = GridScheme(bits=4, group_size=4, solver="round-to-nearest", scale="minmax")
    matrix, _ = quantize_matrix(p.W, p.H, scheme)
    grid = Steps(format=integers(4, 4), search="minmax", storage=torch.float16).grid(p.W)
    assert torch.equal(matrix.codes, round_to_nearest(p.W, grid).codes)
    assert torch.equal(matrix.grid.scale, grid.scale)


def test_the_record_says_what_was_asked_for() -> None:
    p = problem(out=3, columns=8)
    scheme = GridScheme(bits=3, group_size=4, symmetric=False, order="activation", damp=0.02)
    _, record = quantize_matrix(p.W, Moments(H=p.H, tokens=77), scheme, name="layer")
    fields = asdict(record)
    expected = dict(
        name="layer", out_features=3, in_features=8, format="int3-g4-asym", order="activation",
        damp=0.02, tokens=77, correction=0.0, dead=0,
    )  # fmt: skip
    assert {key: fields[key] for key in expected} == expected
    assert replace(record, bytes=12).rate == 8 * 12 / 24


def test_other_schemes_and_grids_are_refused_in_a_sentence() -> None:
    W, H = torch.randn(4, 8), torch.eye(8)
    grid = Grid(scale=torch.ones(4, 1), zero=torch.zeros(4, 1), group=torch.zeros(8, dtype=torch.int64), low=0, high=3)
    for wrong in (RateScheme(rate=2), grid):
        with pytest.raises(RecipeError, match=f"found a {type(wrong).__name__}, expected a GridScheme"):
            quantize_matrix(W, H, wrong)


def test_a_group_size_that_does_not_divide_is_refused_by_name() -> None:
    p = problem(columns=8)
    for size in (3, 16):
        with pytest.raises(RecipeError, match=rf"mlp\.down_proj.*8 inputs.*{size}"):
            quantize_matrix(p.W, p.H, GridScheme(group_size=size), name="mlp.down_proj")


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("where", ["weight", "hessian"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_refused_by_name_and_tokens(value: float, where: str, solver: str) -> None:
    p = problem()
    W, H = p.W.clone(), p.H
    (W if where == "weight" else H)[0, 1] = value
    with pytest.raises(NumericalError, match=r"mlp\.up_proj \(77 tokens\)"):
        quantize_matrix(W, Moments(H=H, tokens=77), GridScheme(group_size=4, solver=solver), name="mlp.up_proj")


def test_a_hessian_that_is_not_positive_definite_is_refused_by_name_tokens_column_and_damping() -> None:
    p = problem()
    H = torch.eye(8, dtype=torch.float64)
    H[5, 5] = -1
    with pytest.raises(NumericalError, match=r"q_proj \(9 tokens\).*column 5 .*0\.01"):
        quantize_matrix(p.W, Moments(H=H, tokens=9), GridScheme(group_size=4), name="q_proj")


def test_weights_too_large_for_the_storage_are_refused_by_name() -> None:
    p = problem()
    with pytest.raises(NumericalError, match=r"q_proj.*float16"):
        quantize_matrix(1e8 * p.W, p.H, GridScheme(group_size=4), name="q_proj")


def test_weights_too_small_for_the_storage_are_refused_by_name_and_by_what_they_lose() -> None:
    p, scheme = problem(out=8, columns=16), GridScheme(group_size=4)
    with pytest.raises(
        NumericalError,
        match=r"q_proj .*are too small for torch\.float16: its steps lose 1 of their energy, .* --format ",
    ):
        quantize_matrix(1e-9 * p.W, p.H, scheme, name="q_proj")
    record = quantize_matrix(1e-9 * p.W, p.H, scheme, storage=torch.bfloat16)[1]
    assert record.relative_loss == pytest.approx(quantize_matrix(p.W, p.H, scheme)[1].relative_loss, rel=0.5)


def test_tiny_and_dead_rows_in_a_layer_of_larger_weights_are_stored() -> None:
    """Nothing that counts is lost, so nothing is refused."""
    p, scheme = problem(out=8, columns=16), GridScheme(group_size=4)
    W = p.W.clone()
    W[0], W[1, :4] = 0, 0
    W[2] *= 1e-9
    matrix, _ = quantize_matrix(W, p.H, scheme)
    assert not matrix.decode()[[0, 2]].any()


@pytest.mark.parametrize("exponent", [-40, 40])
def test_weights_and_inputs_of_any_size_give_the_same_codes_in_float32(exponent: int) -> None:
    """Losses of the largest are beyond float32; refined on them, codes became NaN and, unnoticed, -2^31."""
    p = problem(out=6, columns=16, tokens=64)
    scheme = GridScheme(bits=3, group_size=8)
    one, small = quantize_matrix(p.W.float(), p.H, scheme, storage=torch.bfloat16)
    other, large = quantize_matrix(p.W.float() * 2.0**exponent, p.H * 4.0**exponent, scheme, storage=torch.bfloat16)
    assert torch.equal(other.codes, one.codes)
    assert torch.equal(other.grid.scale, one.grid.scale * 2.0**exponent)
    assert large.loss == pytest.approx(small.loss * 16.0**exponent, rel=1e-9)


# ---- corrected targets ----


def drifted(seed: int, tokens: int, *, noise: float = 0.3, columns: int = 16, out: int = 8) -> dict[str, Tensor]:
    """Return raw tokens of one and the same drift for every seed: inputs and streams, original and quantized."""
    fixed, g = torch.Generator().manual_seed(1), torch.Generator().manual_seed(seed)
    mixing, shift, low = (
        torch.randn(*shape, generator=fixed, dtype=torch.float64) / columns**0.5
        for shape in ((columns, columns), (columns, columns), (columns, out))
    )
    X = torch.randn(tokens, columns, generator=g, dtype=torch.float64) @ mixing
    X_hat = X + noise * (X @ shift + 0.3 * torch.randn(tokens, columns, generator=g, dtype=torch.float64))
    r = torch.randn(tokens, out, generator=g, dtype=torch.float64)
    return {"X": X, "X_hat": X_hat, "r": r, "r_hat": r - noise * X @ low}


def statistics(raw: dict[str, Tensor], W: Tensor | None = None) -> Moments:
    """Accumulate what calibration would, the last fifth held out; with weights (out, in) what their outputs and `r` have lost."""

    def moments(tokens: slice) -> Moments:
        X, X_hat, lost = raw["X"][tokens], raw["X_hat"][tokens], (raw["r"] - raw["r_hat"])[tokens]
        n = len(X)
        if W is None:
            return Moments(H=X_hat.T @ X_hat / n, C=X.T @ X_hat / n, tokens=n)
        return Moments(H=X_hat.T @ X_hat / n, lost=((X - X_hat) @ W.T + lost).T @ X_hat / n, tokens=n)

    n = len(raw["X"])
    return replace(moments(slice(0, n)), held_out=moments(slice(n - n // 5, n)))


def output_error(values: Tensor, W: Tensor, raw: dict[str, Tensor], *, residual: bool) -> float:
    """Return the squared error of the output against the original network's."""
    error = raw["X"] @ W.T - raw["X_hat"] @ values.T
    if residual:
        error = error + raw["r"] - raw["r_hat"]
    return float(error.square().sum())


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_correction_brings_the_output_nearer_to_the_original_on_fresh_tokens(
    bits: int, solver: str, residual: bool, generator: torch.Generator
) -> None:
    W = torch.randn(8, 16, generator=generator, dtype=torch.float64)
    known = statistics(drifted(2, 2000), W if residual else None)
    fresh = drifted(3, 2000)
    scheme = GridScheme(bits=bits, group_size=8, solver=solver)
    (with_, record), (without, plain) = (
        quantize_matrix(W, known, replace(scheme, correct=correct)) for correct in (True, False)
    )
    assert 0.5 < record.correction <= 1.0
    assert plain.correction == 0.0
    errors = [output_error(m.decode(), W, fresh, residual=residual) for m in (with_, without)]
    assert errors[0] < errors[1]


def test_the_correction_is_fitted_on_some_tokens_trusted_on_the_others_and_fitted_again_on_all(
    generator: torch.Generator,
) -> None:
    """Four fifths and one fifth, from the raw tokens; the statistics only hold the whole and the last fifth."""
    W = torch.randn(8, 16, generator=generator, dtype=torch.float64)
    raw = drifted(2, 100)
    raw["r"] += torch.randn(raw["r"].shape, generator=generator, dtype=torch.float64)  # which cannot be made up for
    known = statistics(raw, W)
    rest = statistics({name: tokens[:80] for name, tokens in raw.items()}, W)

    def delta(moments: Moments) -> Tensor:
        return factorize(moments.H, damp=0.1).solve(moments.lost)

    rho = trust(known.held_out.lost, known.held_out.H, delta(rest))
    assert 0 < rho < 1
    target, found, *_ = corrected(W, LayerInput.of(known), GridScheme(damp=0.1))
    assert found == pytest.approx(rho, rel=1e-12)
    assert same(target, W + rho * delta(known))


def test_identical_networks_are_not_corrected(generator: torch.Generator) -> None:
    W = torch.randn(8, 16, generator=generator, dtype=torch.float64)
    known = statistics(drifted(2, 500, noise=0.0), W)
    (matrix, record), (plain, _) = (
        quantize_matrix(W, known, GridScheme(group_size=8, sweep_damp=0.01, correct=correct))
        for correct in (True, False)
    )
    assert record.correction == 0.0
    assert torch.equal(matrix.codes, plain.codes)


def test_a_correction_of_noise_alone_is_hardly_trusted(generator: torch.Generator) -> None:
    """With about as many tokens as inputs the fit is worth little, and the held-out tokens say so."""
    W = torch.randn(8, 16, generator=generator, dtype=torch.float64)
    raw = drifted(2, 40)
    independent = torch.randn(40, 8, generator=generator, dtype=torch.float64)
    raw |= {"X_hat": raw["X"].clone(), "r": independent, "r_hat": torch.zeros_like(independent)}
    _, record = quantize_matrix(W, statistics(raw, W), GridScheme(group_size=8))
    assert record.correction < 0.5


@pytest.mark.parametrize("correct", [True, False])
def test_shared_inputs_give_what_separate_ones_give(correct: bool, generator: torch.Generator) -> None:
    """q, k and v share one factor; what differs between them is only what their own outputs have lost."""
    W = torch.randn(8, 16, generator=generator, dtype=torch.float64)
    known, crossed = statistics(drifted(2, 300), W), statistics(drifted(2, 300))
    other = replace(crossed, H=known.H)
    shared = LayerInput.of(known)
    second = LayerInput.of(other, shared.shared)
    scheme = GridScheme(bits=3, group_size=8, correct=correct)
    for inputs, alone in ((shared, known), (second, other), (shared, known)):
        (matrix, record), (expected, separate) = (quantize_matrix(W, s, scheme) for s in (inputs, alone))
        assert torch.equal(matrix.codes, expected.codes)
        assert torch.equal(matrix.grid.scale, expected.grid.scale)
        assert untimed(record) == untimed(separate)
    assert second.factor("pivoted", 0.01) is shared.factor("pivoted", 0.01)


def test_factors_are_not_shared_between_inputs_that_differ() -> None:
    known = statistics(drifted(2, 300))
    with pytest.raises(NumericalError, match="differ"):
        LayerInput.of(replace(known, H=known.H.clone()), LayerInput.of(known).shared)


def test_codes_rounded_to_nearest_claim_none_of_babais_bounds(generator: torch.Generator) -> None:
    """With a Hessian of nearly rank one their loss exceeds what would be the worst case of a sweep."""
    H = torch.ones(16, 16, dtype=torch.float64) + 1e-3 * torch.eye(16, dtype=torch.float64)
    W = torch.rand(8, 16, generator=generator)
    schemes = [
        GridScheme(bits=4, group_size=None, solver=solver, damp=0.0) for solver in ("round-to-nearest", "nearest-plane")
    ]
    rounded, swept = (quantize_matrix(W, H, scheme)[1] for scheme in schemes)
    assert (rounded.worst_case, rounded.expected, rounded.gamma) == (None, None, None)
    assert swept.worst_case is not None
    assert rounded.damped_loss > swept.worst_case


@pytest.mark.parametrize("kind", ["q4_0", "q5_1", "q2_k", "q6_k"])
def test_blocks_of_llama_cpp_are_solved_like_any_grid(kind: str, generator: torch.Generator) -> None:
    """Feedback and refits gain what they gain elsewhere, files hold what was solved, and Babai's bounds hold."""
    W = torch.randn(24, 256, generator=generator) * 0.02
    X = torch.randn(1024, 256, generator=generator) @ torch.randn(256, 256, generator=generator)
    H = X.T @ X / len(X)
    before = H.clone()
    matrix, record = quantize_matrix(W, H, BlockScheme(kind))
    swept, plain = (
        quantize_matrix(W, H, BlockScheme(kind, rounds=0, polish=0, solver=solver))[1].loss
        for solver in ("nearest-plane", "round-to-nearest")
    )
    assert record.loss < 0.95 * swept < 0.9 * plain
    assert record.format == kind
    assert record.worst_case is not None
    assert record.clipped_rows > 0 or record.damped_loss <= record.worst_case
    back = unpack(TYPES[kind], packed_blocks(TYPES[kind], matrix), 256)
    assert back.same_as(matrix)
    E = (W - back.decode()).double()
    assert record.loss == pytest.approx(float(((E @ H.double()) * E).mean(0).sum() / 256), rel=1e-4)
    assert torch.equal(H, before)


def test_blocks_that_do_not_divide_the_inputs_are_refused() -> None:
    for kind in ("q4_k", "q4_k_m"):
        with pytest.raises(
            RecipeError, match=r"matrix: 96 inputs are not a multiple of 256, the block size of q4_k\. Use a type"
        ):
            quantize_matrix(torch.randn(4, 96), torch.eye(96), BlockScheme(kind))

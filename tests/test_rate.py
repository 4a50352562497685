"""quantize_matrix_to_rate: the size that was asked for, close to the limit; the theorems of water-filling."""

from __future__ import annotations

import math

import pytest
import torch

from nearplane.coding.blob import decode, encode
from nearplane.inputs import Inputs
from nearplane.lattice.bounds import limit
from nearplane.lattice.factor import factorize
from nearplane.lattice.grid import ProductGrid
from nearplane.rate import contents, quantize_matrix_to_rate
from nearplane.recipe import Rate, Rule

SPACE_FILLING = 0.5 * math.log2(2 * math.pi * math.e / 12)
UNDAMPED = Rule(damp=0.0, solver="nearest-plane")  # whose excess over the limit theory knows


def power_law(n: int, exponent: float, seed: int = 0) -> torch.Tensor:
    """Eigenvalues k^-exponent, random eigenvectors."""
    g = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=g)).Q
    return Q * torch.arange(1, n + 1, dtype=torch.float64).pow(-exponent) @ Q.T


def gaussian(out: int, n: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(out, n, generator=torch.Generator().manual_seed(seed))


def measured(W, H, wanted, rate, rule=UNDAMPED):
    """Bits per weight of the bytes, and how many of them lie above the limit."""
    matrix, record = quantize_matrix_to_rate(W, H, rule, wanted, rate)
    coded = 8 * len(encode(contents(matrix), coder=wanted.coder, classes=wanted.classes)) / W.numel()
    return coded, coded - record.limit, record, matrix


@pytest.mark.parametrize("rate", [0.7, 1.5, 2.125, 3.125, 4.125, 6.5])
@pytest.mark.parametrize("method", ["waterfill", "hptq"])
def test_bytes_are_what_was_asked_for(rate, method):
    coded, *_ = measured(gaussian(192, 128), power_law(128, 1.0), Rate(rate=rate, method=method), rate)
    assert coded == pytest.approx(rate, rel=0.005)


@pytest.mark.parametrize("shape", [(1, 64), (64, 1), (3, 5), (32, 64)])
def test_any_shape_is_coded_and_decodes_to_what_was_solved(shape):
    W = gaussian(*shape)
    *_, record, matrix = measured(W, power_law(shape[1], 1.0), Rate(rate=3.0), 3.0)
    back = decode(encode(contents(matrix)))
    assert (torch.from_numpy(back.codes.copy()) == matrix.codes).all()
    assert math.isfinite(record.loss)


def test_rows_beyond_the_subset_are_searched_on_a_part_and_finished_on_all():
    coded, above, *_ = measured(gaussian(1024, 64), power_law(64, 0.5), Rate(rate=2.5), 2.5)
    assert coded == pytest.approx(2.5, rel=0.005)
    assert above < SPACE_FILLING + 0.06


def test_iid_gaussian_weights_at_three_bits_are_a_quarter_of_a_bit_above_the_limit():
    _, above, *_ = measured(gaussian(512, 512), torch.eye(512, dtype=torch.float64), Rate(rate=3), 3.0)
    assert above == pytest.approx(SPACE_FILLING, abs=0.02)


def test_waterfilling_does_not_mind_a_rotation_and_one_step_follows_the_formula():
    H = power_law(384, 1.6)
    W = gaussian(1536, 384)
    diagonal = torch.arange(1, 385, dtype=torch.float64).pow(-1.6).diag()
    above = [measured(W, K, Rate(rate=5), 5.0)[1] for K in (H, diagonal)]
    assert above[0] == pytest.approx(above[1], abs=0.02)
    assert above[0] == pytest.approx(SPACE_FILLING, abs=0.03)
    d = factorize(H, "activation", damp=0.0).d
    theory = SPACE_FILLING + 0.5 * float(d.mean().log2() - d.log2().mean())
    assert measured(W, H, Rate(rate=5, method="hptq"), 5.0)[1] == pytest.approx(theory, abs=0.03)


def test_shrunken_targets_are_worth_a_tenth_of_a_bit_at_one_bit():
    W, H = gaussian(1024, 256), power_law(256, 1.6)
    shrunken, plain = (measured(W, H, Rate(rate=1, shrink=shrink), 1.0)[1] for shrink in (True, False))
    assert shrunken < plain - 0.1


@pytest.mark.parametrize("gains", ["rows", "columns", "both"])
def test_gains_lower_the_loss_at_the_same_steps(gains):
    """With the side information of the gains free, at a large step; the whole matrix keeps the target's energy either way."""
    from nearplane.rate import with_gains

    H, T = power_law(64, 1.0), gaussian(48, 64).double()
    grid = ProductGrid(
        base=1.5, columns=torch.zeros(64, dtype=torch.int32), column_resolution=1,
        rows=torch.zeros(48, dtype=torch.int32), row_resolution=1,
    )  # fmt: skip
    from nearplane.lattice.grid import QuantizedMatrix

    matrix = QuantizedMatrix(codes=(T / 1.5).round().to(torch.int32), grid=grid)

    def loss(m):
        V = m.decode().double()
        scale = float(((V @ H) * T).sum() / ((V @ H) * V).sum())
        E = T - scale * V
        return float(((E @ H) * E).sum())

    assert loss(with_gains(matrix, T, H, gains)) < loss(with_gains(matrix, T, H, "none"))


def test_rows_that_matter_more_get_finer_steps_and_lose_less():
    W, H = gaussian(128, 128), power_law(128, 0.5)
    h = torch.ones(128)
    h[:32] = 4096.0
    wanted = Rate(rate=2.5)
    matrix, _ = quantize_matrix_to_rate(W, H, UNDAMPED, wanted, 2.5, sensitivity=h)
    E = W.double() - matrix.decode().double()
    losses = ((E @ H) * E).sum(1)
    assert losses[:32].mean() < losses[32:].mean() / 8
    assert matrix.grid.rows[:32].max() < matrix.grid.rows[32:].min()
    plain, _ = quantize_matrix_to_rate(W, H, UNDAMPED, wanted, 2.5)
    E = W.double() - plain.decode().double()
    assert (losses * h).mean() < (((E @ H) * E).sum(1) * h).mean()


def test_equal_sensitivities_change_nothing():
    W, H = gaussian(64, 64), power_law(64, 1.0)
    a, _ = quantize_matrix_to_rate(W, H, UNDAMPED, Rate(rate=2), 2.0, sensitivity=torch.full((64,), 7.0))
    b, _ = quantize_matrix_to_rate(W, H, UNDAMPED, Rate(rate=2), 2.0)
    assert torch.equal(a.codes, b.codes)
    assert not a.grid.rows.any()


def test_dead_inputs_decode_to_zero_and_cost_nothing_much():
    W, H = gaussian(64, 64), power_law(64, 1.0)
    H[:, 10:20] = 0
    H[10:20] = 0
    matrix, record = quantize_matrix_to_rate(W, H, Rule(damp=0.01), Rate(rate=2), 2.0)
    assert record.dead == 10
    assert not matrix.decode()[:, 10:20].any()


def test_a_matrix_of_zeros_is_coded():
    matrix, record = quantize_matrix_to_rate(torch.zeros(32, 32), power_law(32, 1.0), Rule(), Rate(rate=2), 2.0)
    assert not matrix.decode().any()
    assert record.loss == 0


def test_the_record_can_be_recomputed():
    W, H = gaussian(96, 64), power_law(64, 1.0)
    matrix, record = quantize_matrix_to_rate(W, Inputs(H), Rule(), Rate(rate=2.5), 2.5)
    E = W.double() - matrix.decode().double()
    assert record.loss == pytest.approx(float(((E @ H) * E).sum() / E.numel()), rel=1e-9)
    assert record.limit == pytest.approx(
        limit(record.loss, W.double().square().mean(1), torch.linalg.eigvalsh(H)), abs=1e-9
    )
    assert record.asked == 2.5
    assert record.entropy < 2.5


def test_a_large_matrix_of_uneven_rows_takes_what_was_asked_for():
    """Sizes of large matrices are foretold from a sample of rows; what counts is what is written."""
    W = gaussian(4096, 576)
    W[::7] *= 6
    coded, *_ = measured(W, torch.eye(576, dtype=torch.float64), Rate(rate=2.5), 2.5)
    assert coded == pytest.approx(2.5, rel=0.005)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("out", [96, 1024])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_matrix_on_a_gpu_is_quantized_there_wherever_its_sensitivity_lies(out, where):
    sensitivity = gaussian(out, 1)[:, 0].double().square().to(where)
    matrix, record = quantize_matrix_to_rate(
        gaussian(out, 64).cuda(), power_law(64, 1.0).cuda(), UNDAMPED, Rate(rate=3.0), 3.0, sensitivity=sensitivity
    )
    assert matrix.codes.device.type == matrix.grid.rows.device.type == matrix.grid.columns.device.type == "cuda"
    assert matrix.grid.rows.any()
    assert 8 * len(encode(contents(matrix))) / matrix.codes.numel() == pytest.approx(3.0, rel=0.005)
    assert math.isfinite(record.loss)


def test_rounding_to_nearest_at_a_rate_rounds_to_nearest() -> None:
    g = torch.Generator().manual_seed(0)
    W = torch.randn(64, 48, generator=g)
    matrix, record = quantize_matrix_to_rate(
        W, power_law(48, 1.0), Rule(solver="round-to-nearest"), Rate(rate=3, method="hptq"), 3.0
    )
    assert torch.equal(matrix.codes.double(), (W.double() / matrix.grid.base).round())
    assert record.nearest_loss == pytest.approx(record.loss, rel=1e-6)  # summed in float32

"""quantize_matrix_to_rate: the size that was asked for, close to the limit; the theorems of water-filling."""

from __future__ import annotations

import math

import pytest
import torch

from nearplane.coding.blob import Contents, decode, encode
from nearplane.errors import NumericalError, RecipeError
from nearplane.lattice.bounds import limit
from nearplane.matrix.inputs import LayerInput
from nearplane.matrix.quantize_matrix import quantize_matrix_to_rate
from nearplane.recipe.rate_scheme import RateScheme

SPACE_FILLING = 0.5 * math.log2(2 * math.pi * math.e / 12)


def undamped(rate: float, **options) -> RateScheme:
    """Return the scheme whose excess over the limit theory knows."""
    return RateScheme(rate=rate, damp=0.0, solver="nearest-plane", **options)


def power_law(n: int, exponent: float, seed: int = 0) -> torch.Tensor:
    """Eigenvalues k^-exponent, random eigenvectors."""
    g = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=g)).Q
    return Q * torch.arange(1, n + 1, dtype=torch.float64).pow(-exponent) @ Q.T


def gaussian(out: int, n: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(out, n, generator=torch.Generator().manual_seed(seed))


def measured(W, H, scheme):
    """Bits per weight of the bytes, and how many of them lie above the limit."""
    matrix, record = quantize_matrix_to_rate(W, H, scheme)
    coded = 8 * len(encode(Contents.of(matrix.codes, matrix.grid))) / W.numel()
    return coded, coded - record.limit, record, matrix


@pytest.mark.parametrize("rate", [0.7, 1.5, 2.125, 3.125, 4.125, 6.5])
def test_bytes_are_what_was_asked_for(rate):
    coded, *_ = measured(gaussian(192, 128), power_law(128, 1.0), undamped(rate))
    assert coded == pytest.approx(rate, rel=0.005)


@pytest.mark.parametrize("shape", [(1, 64), (64, 1), (3, 5), (32, 64)])
def test_any_shape_is_coded_and_decodes_to_what_was_solved(shape):
    W = gaussian(*shape)
    *_, record, matrix = measured(W, power_law(shape[1], 1.0), undamped(3.0))
    back = decode(encode(Contents.of(matrix.codes, matrix.grid)))
    assert (torch.from_numpy(back.codes.copy()) == matrix.codes).all()
    assert math.isfinite(record.loss)


def test_rows_beyond_the_subset_are_searched_on_a_part_and_finished_on_all():
    coded, above, *_ = measured(gaussian(1024, 64), power_law(64, 0.5), undamped(2.5))
    assert coded == pytest.approx(2.5, rel=0.005)
    assert above < SPACE_FILLING + 0.06


def test_iid_gaussian_weights_at_three_bits_are_a_quarter_of_a_bit_above_the_limit():
    _, above, *_ = measured(gaussian(512, 512), torch.eye(512, dtype=torch.float64), undamped(3))
    assert above == pytest.approx(SPACE_FILLING, abs=0.02)


def test_waterfilling_does_not_mind_a_rotation():
    H = power_law(384, 1.6)
    W = gaussian(1536, 384)
    diagonal = torch.arange(1, 385, dtype=torch.float64).pow(-1.6).diag()
    above = [measured(W, K, undamped(5))[1] for K in (H, diagonal)]
    assert above[0] == pytest.approx(above[1], abs=0.02)
    assert above[0] == pytest.approx(SPACE_FILLING, abs=0.03)


def test_rows_that_matter_more_get_finer_steps_and_lose_less():
    W, H = gaussian(128, 128), power_law(128, 0.5)
    h = torch.ones(128)
    h[:32] = 4096.0
    matrix, _ = quantize_matrix_to_rate(W, H, undamped(2.5), sensitivity=h)
    E = W.double() - matrix.decode().double()
    losses = ((E @ H) * E).sum(1)
    assert losses[:32].mean() < losses[32:].mean() / 8
    assert matrix.grid.rows[:32].max() < matrix.grid.rows[32:].min()
    plain, _ = quantize_matrix_to_rate(W, H, undamped(2.5))
    E = W.double() - plain.decode().double()
    assert (losses * h).mean() < (((E @ H) * E).sum(1) * h).mean()


def test_equal_sensitivities_change_nothing():
    W, H = gaussian(64, 64), power_law(64, 1.0)
    a, _ = quantize_matrix_to_rate(W, H, undamped(2), sensitivity=torch.full((64,), 7.0))
    b, _ = quantize_matrix_to_rate(W, H, undamped(2))
    assert torch.equal(a.codes, b.codes)
    assert not a.grid.rows.any()


def test_dead_inputs_decode_to_zero_and_cost_nothing_much():
    W, H = gaussian(64, 64), power_law(64, 1.0)
    H[:, 10:20] = 0
    H[10:20] = 0
    matrix, record = quantize_matrix_to_rate(W, H, RateScheme(rate=2, damp=0.01))
    assert record.dead == 10
    assert not matrix.decode()[:, 10:20].any()


def test_a_matrix_of_zeros_is_coded():
    matrix, record = quantize_matrix_to_rate(torch.zeros(32, 32), power_law(32, 1.0), RateScheme(rate=2))
    assert not matrix.decode().any()
    assert record.loss == 0


def test_the_record_can_be_recomputed():
    W, H = gaussian(96, 64), power_law(64, 1.0)
    matrix, record = quantize_matrix_to_rate(W, LayerInput.of(H), RateScheme(rate=2.5))
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
    coded, *_ = measured(W, torch.eye(576, dtype=torch.float64), undamped(2.5))
    assert coded == pytest.approx(2.5, rel=0.005)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("out", [96, 1024])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_matrix_on_a_gpu_is_quantized_there_wherever_its_sensitivity_lies(out, where):
    sensitivity = gaussian(out, 1)[:, 0].double().square().to(where)
    matrix, record = quantize_matrix_to_rate(
        gaussian(out, 64).cuda(),
        power_law(64, 1.0).cuda(),
        undamped(3.0),
        sensitivity=sensitivity,
    )
    assert matrix.codes.device.type == matrix.grid.rows.device.type == matrix.grid.columns.device.type == "cuda"
    assert matrix.grid.rows.any()
    assert 8 * len(encode(Contents.of(matrix.codes, matrix.grid))) / matrix.codes.numel() == pytest.approx(
        3.0, rel=0.005
    )
    assert math.isfinite(record.loss)


def test_the_rate_of_one_matrix_may_be_another_than_the_scheme_s() -> None:
    W, H = gaussian(64, 64), power_law(64, 1.0)
    own, _ = quantize_matrix_to_rate(W, H, RateScheme(rate=2.5), 4.0)
    asked, record = quantize_matrix_to_rate(W, H, RateScheme(rate=4.0))
    assert torch.equal(own.codes, asked.codes)
    assert record.asked == 4.0


@pytest.mark.parametrize("exponent", [-110, -80, 80])
def test_losses_of_weights_of_any_size_are_those_of_the_same_weights_in_other_units(exponent: int) -> None:
    """Their squares are outside the range of float32: 0 was recorded."""
    W, H = gaussian(16, 32), power_law(32, 0.5).float()
    one, other = (quantize_matrix_to_rate(2.0**k * W, H, undamped(3.0))[1] for k in (0, exponent))
    assert other.relative_loss == pytest.approx(one.relative_loss, rel=0.02)
    assert other.loss == pytest.approx(one.loss * 4.0**exponent, rel=0.02)
    assert other.limit == pytest.approx(one.limit, abs=0.02)


def test_weights_whose_steps_lie_below_float32_are_refused_by_name() -> None:
    with pytest.raises(
        NumericalError, match=r"some\.layer .*are too small for torch\.float32\. Leave the layer .* --ignore\."
    ):
        quantize_matrix_to_rate(2.0**-132 * gaussian(16, 32), power_law(32, 0.5), undamped(3.0), name="some.layer")


def test_a_size_is_no_rate_of_a_matrix() -> None:
    with pytest.raises(RecipeError, match=r"q_proj: a size is for a whole checkpoint. Pass a rate"):
        quantize_matrix_to_rate(gaussian(8, 8), power_law(8, 1.0), RateScheme(size="1MB"), name="q_proj")
    _, record = quantize_matrix_to_rate(gaussian(64, 64), power_law(64, 1.0), RateScheme(size="1MB"), 3.0)
    assert record.asked == 3.0


def test_a_weight_too_many_steps_from_0_is_refused_by_name():
    """Its code overflowed, and the checkpoint had lost the layer without a word."""
    W = gaussian(32, 64)
    W[3, 5] = 1e10
    with pytest.raises(NumericalError, match=r"some\.layer .*The largest weight, 1e\+10, is more than .* --ignore"):
        quantize_matrix_to_rate(W, power_law(64, 1.0), undamped(3.0), name="some.layer")

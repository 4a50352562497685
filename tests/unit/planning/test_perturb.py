"""What perturbations cost: entropies, and losses by rate and width."""

import math

import pytest
import torch

from checkpoints import save_part_of_the_demo
from nearplane import GridScheme, RateScheme
from nearplane.calibration.texts import read_windows
from nearplane.demo import CALIBRATION
from nearplane.lattice.factor import factorize
from nearplane.models.model import open_model
from nearplane.planning.perturb import entropy, to_rates, to_widths, waterfilled
from nearplane.planning.probe import probe

CPU = torch.device("cpu")


def test_the_entropy_is_that_of_the_columns(generator):
    codes = torch.randint(-2, 2, (4096, 3), generator=generator, dtype=torch.int32)
    codes[:, 1] = 7
    codes[:, 2] = codes[:, 2] // 2  # two values
    assert entropy(codes) == pytest.approx((2 + 0 + 1) / 3, abs=2e-3)


def test_the_entropy_of_many_columns_with_far_codes(generator):
    codes = (3 * torch.randn(200, 300, generator=generator)).round().int()
    codes[0, 299], codes[1, 0] = 2**30, -(2**20)
    out, expected = len(codes), 0.0
    for column in codes.T.tolist():
        often = [column.count(code) for code in set(column)]
        expected -= sum(n / out * math.log2(n / out) for n in often)
        expected += (len(often) - 1) / (2 * out * math.log(2))
    assert entropy(codes) == pytest.approx(expected / codes.shape[1], rel=1e-12)


def test_few_rows_do_not_make_codes_look_cheaper(generator):
    """The plug-in entropy of 64 draws of 16 values is low by 15 / (128 ln 2) = 0.17 bit."""
    drawn = torch.randint(0, 16, (64, 2000), generator=generator, dtype=torch.int32)
    assert entropy(drawn) == pytest.approx(4, abs=0.02)


@pytest.mark.parametrize("rate", [2.0, 4.0])
def test_water_filling_costs_what_it_was_asked_for_on_gaussian_weights(generator, rate):
    n = 64
    X = torch.randn(512, n, generator=generator, dtype=torch.float64) * torch.logspace(0, -1.5, n)
    factor = factorize(X.T @ X / len(X), "activation")
    W = torch.randn(2048, n, generator=generator)
    found = waterfilled(W, factor, rate)
    assert found.rate == pytest.approx(rate, abs=0.12)
    E = (W - found.matrix.decode()).double()[:, factor.order]
    errors = torch.linalg.multi_dot([E, factor.U]).square().mean(0) * factor.d  # of every plane
    assert errors.max() / errors.min() < 1.6  # the same, which is what water-filling means


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """One block of the demo model and a few windows of its calibration text."""
    model = open_model(str(save_part_of_the_demo(tmp_path_factory.mktemp("models") / "demo", blocks=1, neurons=128)))
    return model, read_windows(model.tokenizer(), CALIBRATION, samples=10, seqlen=64)


def test_losses_fall_with_the_rate_by_the_law_where_it_holds(demo):
    model, tokens = demo
    curves = probe(model, tokens, to_rates((2.5, 3.5, 4.5), RateScheme(rate=3.5)), device=CPU)
    slopes = [math.log2(c.losses[0] / c.losses[2]) / (c.rates[2] - c.rates[0]) for c in curves]
    assert all(abs(c.rates[0] - 2.5) < 0.5 and abs(c.rates[2] - 4.5) < 0.5 for c in curves)
    assert sum(slopes) / len(slopes) == pytest.approx(2, abs=0.3)


def test_losses_fall_with_the_width(demo):
    model, tokens = demo
    perturb = to_widths((2, 4), GridScheme(group_size=32, symmetric=False), torch.float16)
    assert all(c.rates == (2, 4) and c.losses[0] > 4 * c.losses[1] for c in probe(model, tokens, perturb, device=CPU))

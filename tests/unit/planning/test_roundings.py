"""Weights as they may become: entropies, water-filling, and formats that do not fit."""

import math
from dataclasses import replace

import pytest
import torch

from nearplane import GridScheme, RateScheme
from nearplane.lattice.moments import Moments
from nearplane.matrix.inputs import LayerInput
from nearplane.planning.roundings import at_rate, entropy, offered
from nearplane.recipe.format_mix import Offer


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
    inputs = LayerInput.of(Moments(H=X.T @ X / len(X), tokens=len(X)))
    W = torch.randn(2048, n, generator=generator)
    found = at_rate(rate, RateScheme(rate=3))(W, inputs, None)
    assert found.rate == pytest.approx(rate, abs=0.12)
    factor = inputs.factor("activation", RateScheme(rate=3).damp)
    E = (W - found.values).double()[:, factor.order]
    errors = torch.linalg.multi_dot([E, factor.U]).square().mean(0) * factor.d  # of every plane
    assert errors.max() / errors.min() < 1.6  # the same, which is what water-filling means


def test_rows_that_matter_get_finer_steps(generator):
    X, W = (torch.randn(512, 64, generator=generator) for _ in range(2))
    gradients = torch.ones(512)
    gradients[:8] = 100.0
    inputs = LayerInput.of(Moments(H=(X.T @ X / len(X)).double(), tokens=len(X)))
    equal, weighed = (
        at_rate(3.0, RateScheme(rate=3, rows=rows))(W, inputs, gradients) for rows in ("equal", "sensitivity")
    )
    (few, others), (fewer, _) = (
        [float((W - each.values)[rows].square().mean()) for rows in (slice(8), slice(8, None))]
        for each in (equal, weighed)
    )
    assert few == pytest.approx(others, rel=0.2)
    assert fewer < few / 3


def test_a_format_that_does_not_fit_leaves_the_weights_as_they_are(generator):
    W, inputs = torch.randn(6, 40, generator=generator), LayerInput.of(Moments(H=torch.eye(40).double(), tokens=64))
    scheme = GridScheme(bits=4, group_size=32)
    assert offered(Offer("int4", scheme), torch.float16)(W, inputs, None).values is W
    fitting = offered(Offer("int4", replace(scheme, group_size=8)), torch.float16)(W, inputs, None).values
    assert 0 < float((W - fitting).abs().max()) < 1

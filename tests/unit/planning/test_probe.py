"""A deep network is probed in some of its blocks: what is measured stays, what is told lies between, and the work is bounded."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from families import config_of, random_model
from nearplane.calibration.sensitivity import sensitivity
from nearplane.errors import CalibrationError
from nearplane.models.layers import LinearLayer
from nearplane.models.model import open_model
from nearplane.planning.perturb import (
    Change,
    Perturbations,
    Perturbed,
    corrected_losses,
    expected_loss,
    measured_blocks,
    relative_energy,
)
from nearplane.planning.probe import probe

CPU = torch.device("cpu")


class Named:
    """All of a block that the choice knows."""

    def __init__(self, name, ends):
        self.name = name
        self.layers = [
            LinearLayer(name=f"{name}.{end}", shape=(2, 2), module=torch.nn.Identity()) for end in ends.split()
        ]


def blocks(*ends):
    return [Named(f"layers.{number}", each) for number, each in enumerate(ends)]


@pytest.mark.parametrize(
    ("count", "most", "expected"),
    [
        (5, 6, {0, 1, 2, 3, 4}),
        (5, 4, {0, 1, 3, 4}),
        (5, 3, {0, 2, 4}),
        (80, 6, {0, 8, 27, 52, 71, 79}),
        (9, 2, {0, 8}),
        (9, 0, {0, 8}),
    ],
)
def test_blocks_are_measured_from_the_first_to_the_last_closer_at_the_ends(count, most, expected):
    assert measured_blocks(blocks(*["q k"] * count), most) == expected


def test_blocks_with_other_layers_are_chosen_by_themselves():
    """Every eighth is attention, which steps over all blocks might never meet."""
    mixed = blocks(*(["q k", *["conv"] * 7] * 4), "", "dense")
    found = measured_blocks(mixed, 12)
    assert {0, 24, 33} < found  # of attention the first and the last; the dense one
    convolutions = sorted(found - {0, 24, 33})
    assert len(convolutions) == 9
    assert (convolutions[0], convolutions[-1]) == (1, 31)
    assert all(number % 8 for number in convolutions)
    assert 32 not in found  # it has no layers


def test_what_was_measured_stays_and_loss_per_energy_is_geometric_between():
    changes = [
        Change(0, ("q",), 2.0, 8.0),  # 4 per energy
        Change(4, ("q",), 1.0, 0.25),
        Change(0, ("v",), 1.0, 3.0),
        Change(4, ("v",), 1.0, 3.0),
        Change(2, ("q",), 5.0, None),
        Change(1, ("q",), 1.0, None),
        Change(9, ("q",), 2.0, None),
        Change(2, ("v", "q"), 1.0, None),
        Change(4, ("q",), 10.0, None),  # another point of what was measured
        Change(2, ("q",), 0.0, None),
    ]
    expected = [8, 0.25, 3, 3, 5, 2, 0.5, math.sqrt(3), 2.5, 0]
    assert corrected_losses(changes) == pytest.approx(expected)


def test_layers_that_change_nothing_where_they_are_measured_are_told_by_all_others():
    changes = [Change(0, ("q",), 1.0, 2.0), Change(0, ("v",), 0.0, 0.0), Change(1, ("v",), 3.0, None)]
    assert corrected_losses(changes) == pytest.approx([2, 0, 6])
    assert corrected_losses([one._replace(loss=None if one.loss is None else 0.0) for one in changes]) == [0, 0, 0]


def test_the_energy_is_relative_to_every_token(generator):
    states = [torch.randn(2, 3, 4, generator=generator) for _ in range(2)]
    scales = [torch.rand(2, 3, 1, generator=generator) for _ in range(2)]
    swapped = [
        scale * x.roll(1, -1) for scale, x in zip(scales, states, strict=True)
    ]  # as long as the state, times the scale
    assert relative_energy(swapped, states) == pytest.approx(float(sum((s**2).sum() for s in scales)), rel=1e-5)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A random network of seven blocks, with tokens."""
    folder = tmp_path_factory.mktemp("models") / "deep"
    random_model(config_of("llama", num_hidden_layers=7)).save_pretrained(folder)
    return open_model(str(folder)), torch.randint(3, 96, (4, 32), generator=torch.Generator().manual_seed(1))


def shaken(W, inputs):
    """Three perturbations that need no statistics; the last has a shape."""
    sizes = ((1.0, 0.05), (2.0, 0.02), (3.0, 0.01))
    return [partial(Perturbed, rate, W + size * torch.roll(W, 1, 0)) for rate, size in sizes]


@pytest.mark.parametrize(
    ("together", "minded"),
    [
        (False, False),
        pytest.param(True, False, marks=pytest.mark.nightly),
        pytest.param(False, True, marks=pytest.mark.nightly),
        (True, True),
    ],
)
def test_what_is_told_of_a_deep_network_is_near_what_all_travellers_tell(together, minded, deep, monkeypatch):
    """Where the network is asked, at the middle point, it is the same to the last bit."""
    model, tokens = deep
    known = sensitivity(model, tokens, device=CPU, dtype=torch.float64).outputs if minded else {}
    perturbations = Perturbations(of=shaken, points=3, together=together, sensitivity=known)
    full = probe(model, tokens, perturbations, device=CPU, dtype=torch.float64)
    monkeypatch.setattr("nearplane.planning.probe.MAX_TRAVELLERS", 4 * 7)
    told = probe(model, tokens, perturbations, device=CPU, dtype=torch.float64)
    assert [(c.layers, c.weights, c.rates) for c in told] == [(c.layers, c.weights, c.rates) for c in full]
    measured = measured_blocks(model.blocks, 4)
    for a, b in zip(told, full, strict=True):
        if int(a.layers[0].split(".")[2]) in measured:
            assert a.losses[1] == pytest.approx(b.losses[1], rel=1e-12)
        off = [math.log2(x / y) for x, y in zip(a.losses, b.losses, strict=True)]
        assert max(map(abs, off)) < 0.7, (a.layers, off)


def test_expected_losses_are_half_the_sensitivities_of_outputs_times_their_squared_errors(generator):
    W, E, X = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 5), (3, 5), (40, 5)))
    mind = torch.rand(3, generator=generator, dtype=torch.float64)
    expected = float(((X @ E.T).square().mean(0) * mind).sum() / 2)
    assert expected_loss(W, W + E, X.T @ X / 40, mind) == pytest.approx(expected, rel=1e-5)  # in float32


@pytest.mark.parametrize(("most", "measured"), [(14, 2), (7 * 7, 7)])
def test_no_more_travel_than_agreed(most, measured, deep, monkeypatch):
    model, tokens = deep
    calls = []
    last = model.blocks[-1]
    handle = last.empty.register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr("nearplane.planning.probe.MAX_TRAVELLERS", most)
    try:
        probe(model, tokens, Perturbations(of=shaken, points=3), device=CPU)
    finally:
        handle.remove()
    before = (measured - 1) * 7 * (1 if measured < 7 else 3)  # travellers that come to the last block
    own = 7 * 3  # and those that begin there
    assert before + own < len(calls) <= before + own + 8


def test_a_network_that_predicts_always_the_same_is_not_measured(deep):
    model, tokens = deep
    handle = model.blocks[-1].empty.register_forward_hook(lambda _, args, output: torch.ones_like(output))
    try:
        with pytest.raises(CalibrationError, match="predicts the same for every token"):
            probe(model, tokens, Perturbations(of=shaken, points=3), device=CPU)
    finally:
        handle.remove()

"""Bits for layers: a budget is kept, nothing is left to gain by exchange, and what is measured is what happens to the network."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import nearplane
from checkpoints import save_part_of_the_demo
from nearplane import RecipeError
from nearplane.demo import CALIBRATION
from nearplane.planning.allocate import (
    Curve,
    allocate,
    allocate_choices,
    allocate_widths,
    choose,
    tried_rates,
    tried_widths,
)
from nearplane.verbs.evaluate import load_dense

CPU = torch.device("cpu")
WIDTHS = (2, 3, 4, 8)


@st.composite
def curves(draw, most=6, rates=((0.5, 1.5, 3.0), (2.0, 3.0, 4.0), (2.5,))):
    """Curves as they are measured: mostly, not always, falling, over many orders of magnitude."""
    points = draw(st.sampled_from(rates))
    loss = st.floats(-18, 2).map(lambda x: 2.0**x)
    return [
        Curve(
            layers=(f"l{index}",),
            weights=draw(st.integers(1, 9)) * 64,
            rates=points,
            losses=tuple(sorted((draw(loss) for _ in points), reverse=draw(st.integers(0, 4)) > 0)),
        )
        for index in range(draw(st.integers(1, most)))
    ]


def mean(found, given):
    weights = {layer: curve.weights for curve in given for layer in curve.layers}
    return sum(found[layer] * weights[layer] for layer in weights) / sum(weights.values())


def loss(found, given):
    return sum(curve(found[curve.layers[0]]) for curve in given)


@given(curves(), st.floats(0.5, 7.5))
def test_rates_average_the_budget_exactly(given, budget):
    found = allocate(given, budget)
    assert found.keys() == {curve.layers[0] for curve in given}
    assert all(0.5 <= rate <= 7.5 for rate in found.values())
    assert mean(found, given) == pytest.approx(budget, abs=1e-9)


@given(curves(), st.floats(0.5, 6.0), st.floats(0.0, 1.5))
def test_no_rate_is_above_the_highest_that_is_allowed(given, budget, more):
    found = allocate(given, budget, budget + more)
    assert all(0.5 <= rate <= budget + more + 1e-9 for rate in found.values())
    assert mean(found, given) == pytest.approx(budget, abs=1e-9)


@given(curves(), st.floats(0.5, 7.0), st.floats(0.01, 0.5))
def test_no_layer_gets_less_of_a_larger_budget(given, budget, more):
    small, large = allocate(given, budget), allocate(given, budget + more)
    assert all(large[layer] >= small[layer] - 1e-9 for layer in small)


@given(curves(), st.floats(0.5, 7.0), st.data())
def test_no_exchange_of_bits_between_two_layers_helps(given, budget, data):
    """Compared on convex curves: on others, all rates but one lie on the hull, where no exchange helps either."""
    given = [convex(curve) for curve in given]
    found = allocate(given, budget)
    a, b = (data.draw(st.sampled_from(given)) for _ in range(2))
    bits = data.draw(st.floats(0.05, 2)) * 64
    swapped = dict(found)
    swapped[a.layers[0]] += bits / a.weights
    swapped[b.layers[0]] -= bits / b.weights
    if a is not b and all(0.5 <= rate <= 7.5 for rate in swapped.values()):
        assert loss(swapped, given) >= loss(found, given) * (1 - 1e-3)  # rates are chosen in steps of 1/32 bit


def convex(curve):
    """A curve that falls by the high-rate law everywhere."""
    return replace(curve, rates=curve.rates[-1:], losses=curve.losses[-1:])


def test_rates_are_those_of_the_high_rate_law_where_it_holds():
    """rate = budget + 1/2 log2(a / n) - the weighted mean of that, in closed form."""
    given = [
        Curve(layers=(str(i),), weights=n, rates=(3.0,), losses=(loss,))
        for i, (n, loss) in enumerate([(100, 1e-3), (200, 4e-3), (50, 2e-4), (400, 3e-3)])
    ]
    raw = {c.layers[0]: 0.5 * math.log2(c.losses[0] / c.weights) for c in given}
    shift = 3.3 - mean(raw, given)
    found = allocate(given, 3.3)
    assert all(found[layer] == pytest.approx(raw[layer] + shift, abs=1 / 32) for layer in raw)


def test_a_curve_goes_through_its_points_and_is_never_kinder_than_the_law_below_them():
    curve = Curve(layers=("a",), weights=1, rates=(2.0, 3.0, 4.0), losses=(0.2, 0.02, 0.006))
    assert [curve(rate) for rate in curve.rates] == pytest.approx(curve.losses)
    assert curve(2.5) == pytest.approx(math.sqrt(0.2 * 0.02))
    assert curve(6.0) == pytest.approx(0.006 / 16)
    assert curve(1.0) == pytest.approx(0.2 * 10)  # as steep as between the lowest two
    assert replace(curve, losses=(0.02, 0.02, 0.02))(1.0) == pytest.approx(0.08)
    assert replace(curve, losses=(0.0, 0.0, 0.0))(3.0) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("budget", [0.4, 7.6, math.nan])
def test_a_budget_that_no_layer_may_have_is_refused(budget):
    with pytest.raises(RecipeError, match=r"expected 0\.5 to 7\.5"):
        allocate([Curve(layers=("a",), weights=1, rates=(3.0,), losses=(0.1,))], budget)


@given(curves(most=4), st.floats(2, 8))
def test_widths_are_the_best_of_all_that_fit(given, budget):
    """Against every combination; so they keep the budget, and a larger one never costs the network more."""
    found = allocate_widths(given, budget, WIDTHS)
    assert set(found.values()) <= set(WIDTHS)
    assert mean(found, given) <= budget + 1e-9
    names = [curve.layers[0] for curve in given]
    fitting = [
        combination
        for widths in product(WIDTHS, repeat=len(given))
        if mean(combination := dict(zip(names, widths, strict=True)), given) <= budget
    ]
    assert loss(found, given) == pytest.approx(min(loss(combination, given) for combination in fitting), rel=1e-9)


def test_layers_of_one_curve_get_one_width_and_a_whole_budget_is_spent():
    given = [
        Curve(layers=(f"{i}.q", f"{i}.k"), weights=4096, rates=(2.0, 3.0, 4.0), losses=(8 * x, 2 * x, x / 2))
        for i, x in enumerate((1e-3, 2e-3, 4e-3, 8e-3))
    ]
    found = allocate_widths(given, 3.25, WIDTHS)
    assert all(found[f"{i}.q"] == found[f"{i}.k"] for i in range(4))
    assert mean(found, given) == 3.25
    assert found["3.q"] > found["0.q"]


def test_many_layers_of_odd_sizes_take_no_more_memory_than_agreed_and_keep_the_budget():
    given = [
        Curve(layers=(str(i),), weights=1_000_003 + 97 * i, rates=(3.0,), losses=(1e-3 * (1 + i % 7),))
        for i in range(200)
    ]
    found = allocate_widths(given, 3.5, WIDTHS)
    assert 3.49 < mean(found, given) <= 3.5


def test_less_than_the_least_width_is_refused():
    with pytest.raises(RecipeError, match="expected at least 2, the smallest of this format"):
        allocate_widths([Curve(layers=("a",), weights=1, rates=(3.0,), losses=(0.1,))], 1.5, WIDTHS)


@pytest.mark.parametrize(
    ("budget", "widths", "expected"),
    [
        (3, WIDTHS, (2, 3, 4)),
        (3.5, WIDTHS, (2, 3, 4)),
        (2, WIDTHS, (2, 3, 4)),
        (2.5, WIDTHS, (2, 3, 4)),
        (4.5, range(2, 9), (3, 4, 5)),
        (8, WIDTHS, (4, 8)),
        (3.5, (4,), (4,)),
    ],
)
def test_widths_around_the_budget_are_measured(budget, widths, expected):
    assert tried_widths(budget, widths) == expected


@given(st.floats(0.5, 7))
def test_rates_on_both_sides_of_the_budget_are_measured(budget):
    rates = tried_rates(budget)
    assert rates[0] < budget <= rates[-1] + 1
    assert list(rates) == sorted(rates)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two blocks of the demo model: real weights, a real tokenizer."""
    return save_part_of_the_demo(tmp_path_factory.mktemp("models") / "small", neurons=128)


FAST = {"calibration": str(CALIBRATION), "samples": 10, "seqlen": 64, "group_size": 32}


@pytest.mark.parametrize(
    (
        "words",
        "widths",
        "unspent",
    ),  # of 4.5 bits: to go from 4 to 8 in the smallest set of layers takes 1/3 bit of the mean
    [
        ({"bits": 3.5, "format": "compressed-tensors"}, {2, 3, 4, 5, 6, 7, 8}, 0.1),
        pytest.param(
            {"bits": 2.5, "format": "gptq_v2", "symmetric": False}, {2, 3, 4, 8}, 0.1, marks=pytest.mark.nightly
        ),
        pytest.param(
            {"bits": 4.5, "format": "gptq", "solver": "round-to-nearest"}, {3, 4, 8}, 1 / 3, marks=pytest.mark.nightly
        ),
    ],
)
def test_a_checkpoint_with_widths_of_their_own_keeps_the_budget_and_reads_back(small, tmp_path, words, widths, unspent):
    out = tmp_path / "out"
    record = nearplane.quantize(small, out, **FAST, **words)
    sizes = {layer.name: layer.out_features * layer.in_features for layer in record.layers}
    spent = sum(layer.number_format.bits * sizes[layer.name] for layer in record.layers) / sum(sizes.values())
    assert words["bits"] - unspent < spent <= words["bits"]
    assert {layer.number_format.bits for layer in record.layers} <= widths
    assert len({layer.number_format.bits for layer in record.layers}) > 1
    by_set = {}
    for layer in record.layers:
        part = layer.name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
        by_set.setdefault(part, set()).add(layer.number_format.bits)
    assert all(len(bits) == 1 for bits in by_set.values())
    network, _ = load_dense(out, CPU)
    if words["format"] == "compressed-tensors":
        loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        tokens = torch.arange(64)[None]
        assert torch.equal(loaded(tokens).logits, network(tokens).logits)


def test_what_the_format_has_no_width_for_is_refused_at_once(small, tmp_path):
    with pytest.raises(RecipeError, match="has groups of 8"):
        nearplane.quantize(small, tmp_path / "out", **(FAST | {"group_size": 8}), bits=2.5, format="gptq")
    with pytest.raises(RecipeError, match=r"does not load int.-g.*-asym from compressed-tensors"):
        nearplane.quantize(small, tmp_path / "out", **FAST, bits=2.5, symmetric=False)
    assert not (tmp_path / "out").exists()


def test_each_curve_has_choices_of_its_own():
    """All 27 ways by hand: the least loss of those that keep to the budget, in bits that types of blocks take."""
    choices = [(2.625, 3.4375, 4.5), (4.5, 5.5, 8.5), (2.625, 4.5, 6.5625)]
    curves = [
        Curve(layers=(name,), weights=weights, rates=(2.625, 4.5), losses=(loss, loss / 9))
        for name, weights, loss in (("a", 65536, 0.02), ("b", 24576, 0.001), ("c", 196608, 0.03))
    ]
    total = sum(curve.weights for curve in curves)
    for budget in (3.0, 3.5, 4.5, 5.0, 7.0):
        ways = [
            (sum(curve(rate) for curve, rate in zip(curves, way, strict=True)), way)
            for way in product(*choices)
            if sum(curve.weights * rate for curve, rate in zip(curves, way, strict=True)) <= budget * total
        ]
        assert tuple(allocate_choices(curves, budget, choices)) == min(ways)[1]
    with pytest.raises(RecipeError, match=r"budget of 2\.6 bits per weight; expected at least 2\.78"):
        allocate_choices(curves, 2.6, choices)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 40), st.floats(0, 1)), min_size=1, max_size=3), min_size=1, max_size=5),
    st.integers(0, 120),
)
def test_the_best_choice_within_a_budget_is_found(options, more):
    costs, losses = ([[pair[place] for pair in row] for row in options] for place in (0, 1))
    budget = sum(map(min, costs)) + more
    picks = choose(costs, losses, budget)
    assert sum(row[pick] for row, pick in zip(costs, picks, strict=True)) <= budget
    best = min(
        sum(losses[unit][pick] for unit, pick in enumerate(every))
        for every in product(*(range(len(row)) for row in costs))
        if sum(costs[unit][pick] for unit, pick in enumerate(every)) <= budget
    )
    assert sum(row[pick] for row, pick in zip(losses, picks, strict=True)) == pytest.approx(best, abs=1e-12)

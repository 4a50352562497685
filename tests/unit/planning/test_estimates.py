"""What errors of one layer cost: by hand, beside what is measured, and for layers that must have the same bits."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from transformers import LlamaForCausalLM

from checkpoints import save_part_of_the_demo
from families import config_of, random_model
from nearplane import GridScheme, RateScheme
from nearplane.calibration.sensitivity import Sensitivity, sensitivity
from nearplane.calibration.texts import read_windows
from nearplane.demo import CALIBRATION
from nearplane.errors import CalibrationError
from nearplane.models.model import open_model
from nearplane.planning.divergences import divergences
from nearplane.planning.estimates import Costs, estimated
from nearplane.planning.measured_bits import curves_of
from nearplane.planning.parts import Extent, Parts, parts_of
from nearplane.planning.roundings import Rounded, at_rate, offered
from nearplane.recipe.format_mix import Offer
from nearplane.recipe.recipe import Recipe

CPU = torch.device("cpu")


def shaken(W, inputs, gradients):
    """A rounding that needs no statistics."""
    return Rounded(W + 0.02 * torch.roll(W, 1, 0), 2.0)


@pytest.fixture
def llama(tmp_path):
    """A random network in double precision, opened, with tokens."""
    random_model(config_of("llama")).double().save_pretrained(tmp_path)
    return open_model(str(tmp_path)), torch.randint(3, 96, (8, 32), generator=torch.Generator().manual_seed(1))


def test_an_estimate_is_half_the_gradients_times_squared_errors_of_outputs(llama):
    """On other tokens than those of the second moments, which are of the original network."""
    model, tokens = llama
    effect = Sensitivity(outputs=sensitivity(model, tokens, device=CPU, dtype=torch.float64).outputs)
    seen = {}

    def look(W, inputs, gradients):
        seen[W.shape, float(W.sum())] = inputs.moments, gradients
        return shaken(W, inputs, gradients)

    found = estimated(
        model, tokens[:5], tokens[5:], [look, lambda W, *_: Rounded(W)], effect, device=CPU, dtype=torch.float64
    )
    assert set(found) == {layer.name for block in model.blocks for layer in block.layers}
    network, rows = LlamaForCausalLM.from_pretrained(model.folder, dtype=torch.float64), []
    last = network.model.layers[2].mlp.down_proj
    last.register_forward_pre_hook(lambda module, args: rows.append(args[0].reshape(-1, 64)))
    with torch.no_grad():
        network(tokens[:5])
        network(tokens[5:])
    W, name = last.weight.detach(), "model.layers.2.mlp.down_proj"
    moments, gradients = seen[W.shape, float(W.sum())]
    torch.testing.assert_close(moments.H, rows[0].T @ rows[0] / len(rows[0]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, effect.outputs[name])
    errors = rows[1] @ (shaken(W, None, None).values - W).T
    expected = float((errors.square().mean(0) * effect.outputs[name]).sum() / 2)
    assert found[name].losses == (pytest.approx(expected, rel=1e-9), 0.0)
    assert (found[name].first, found[name].rates) == (name, (2.0, 0.0))
    assert found["model.layers.1.mlp.up_proj"].first == "model.layers.1.mlp.gate_proj"


def test_layers_without_gradients_count_as_the_mean_one_and_none_at_all_are_refused(llama, caplog):
    model, tokens = llama
    name, other = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
    one = Sensitivity(outputs={other: torch.full((64,), 3.0)})
    found = estimated(model, tokens[:5], tokens[5:], [shaken], one, device=CPU)
    every = {layer.name: torch.full((layer.shape[0],), 3.0) for block in model.blocks for layer in block.layers}
    known = estimated(model, tokens[:5], tokens[5:], [shaken], Sensitivity(outputs=every), device=CPU)
    assert found[name].losses == pytest.approx(known[name].losses)
    assert "20 layers have no gradients on this text and count as the mean layer" in caplog.text
    with pytest.raises(CalibrationError, match="predictions depend on no layer"):
        estimated(model, tokens[:5], tokens[5:], [shaken], Sensitivity(outputs={}), device=CPU)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Two blocks of the demo model, windows of its text by their use, and gradients."""
    model = open_model(str(save_part_of_the_demo(tmp_path_factory.mktemp("models") / "demo", neurons=128)))
    parts = parts_of(model, read_windows(model.tokenizer(), CALIBRATION, samples=48, seqlen=64))
    return model, parts, sensitivity(model, parts.gradients, device=CPU, dtype=torch.float32)


def test_windows_on_which_errors_are_measured_fit_nothing(demo):
    _, parts, _ = demo
    windows = [{tuple(window.tolist()) for window in part} for part in parts]
    gradients, moments, errors, last = windows
    assert moments <= gradients
    assert len(gradients | errors | last) == len(gradients) + len(errors) + len(last)
    assert len(parts.errors) == len(parts.last) == 6


def test_a_batch_may_have_more_windows_than_errors_are_measured_on():
    tokens = torch.zeros(40, 512, dtype=torch.int64)
    assert Extent.of(Parts(tokens, tokens[:6], tokens[:2], tokens[:2]), points=3) == (8 * 512, 6 * 512, 2 * 512, 3, 0)
    assert Extent.of(Parts(tokens, tokens[:30], tokens[:4], tokens[:4]), points=1).batch == 8 * 512
    both = Extent.of(Parts(tokens, tokens[:6], tokens[:2], tokens[:3]), points=3, compares=True)
    assert both.compared == 5 * 512
    assert both.of_the_choice[:3] == (11 * 512, 6 * 512, 5 * 512)


def test_rates_that_nearly_coincide_make_one_point(demo):
    """Entropies of few rows end near the logarithm of their number."""
    model, recipe = demo[0], Recipe.from_spellings(rate=3)
    names = [layer.name for block in model.blocks for layer in block.layers]
    found = {name: Costs(name, (1e-2, 1e-5, 1e-6), (1.5, 2.5399, 2.5401)) for name in names}
    curves = curves_of(model, recipe, found, lambda name: found[name].rates)
    assert {curve.rates for curve in curves} == {(1.5, 2.5401)}


def test_few_windows_are_used_twice_and_that_is_said(demo, caplog):
    model, parts, _ = demo
    few = parts.gradients[:5]
    assert all(torch.equal(part, few) for part in parts_of(model, few))
    assert "errors are measured on windows that layers are fitted to" in caplog.text


def test_estimates_are_near_what_is_measured_of_every_layer(demo):
    model, parts, effect = demo
    rounding = at_rate(3.0, RateScheme(rate=3, rows="equal"))
    found = estimated(model, parts.moments, parts.errors, [rounding], effect, device=CPU)
    measured = [
        divergences(model, parts.moments, [parts.errors], {name: rounding}, effect.positions, device=CPU)[0]
        for name in found
    ]
    off = [math.log2(kl / found[name].losses[0]) for name, kl in zip(found, measured, strict=True)]
    assert max(map(abs, off)) < 1.5, off
    assert abs(statistics.median(off)) < 0.5, off


def of_the_demo(demo, roundings):
    model, parts, effect = demo
    return estimated(model, parts.moments, parts.errors, roundings, effect, device=CPU)


def test_losses_fall_with_the_rate_by_the_law_where_it_holds(demo):
    found = of_the_demo(demo, [at_rate(rate, RateScheme(rate=3.5)) for rate in (2.5, 3.5, 4.5)])
    curves = curves_of(demo[0], Recipe.from_spellings(rate=3), found, lambda name: found[name].rates)
    slopes = [math.log2(c.losses[0] / c.losses[2]) / (c.rates[2] - c.rates[0]) for c in curves]
    assert all(abs(c.rates[0] - 2.5) < 0.5 and abs(c.rates[2] - 4.5) < 0.5 for c in curves)
    assert sum(slopes) / len(slopes) == pytest.approx(2, abs=0.3)
    assert [curve.layers for curve in curves] == [(name,) for name in found]  # each has a rate of its own


def test_layers_that_programs_join_share_a_curve_which_is_their_sum(demo):
    widths = [offered(Offer("", GridScheme(bits=bits, group_size=32)), torch.float16) for bits in (2, 4)]
    found = of_the_demo(demo, widths)
    curves = curves_of(demo[0], Recipe.from_spellings(bits=3, group_size=32), found, lambda name: (2.0, 4.0))
    assert all(c.rates == (2, 4) and c.losses[0] > 4 * c.losses[1] for c in curves)
    ends = [tuple(name.rpartition(".")[2] for name in curve.layers) for curve in curves]
    assert ends == [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)] * 2
    assert curves[0].losses == tuple(
        pytest.approx(sum(found[name].losses[point] for name in curves[0].layers)) for point in (0, 1)
    )
    layers = {layer.name: math.prod(layer.shape) for layer in demo[0].layers}
    assert curves[2].weights == sum(layers[name] for name in curves[2].layers)

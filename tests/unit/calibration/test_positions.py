"""Weights of positions: measured against the whole network differentiated at once, and applied to the moments of a walk."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest
import torch

from nearplane import Recipe, RecipeError, quantize, verify
from nearplane.calibration.positions import EQUAL, PositionWeights, RowFactors, octaves
from nearplane.calibration.rows import Rows
from nearplane.calibration.sensitivity import _predicts_token_by_token, sensitivity
from nearplane.errors import CalibrationError
from nearplane.models.model import open_model
from nearplane.record.record_file import read_record

CPU = torch.device("cpu")


@pytest.fixture
def many(generator):
    """(24, 16) token ids: enough for the widest layer."""
    return torch.randint(0, 64, (24, 16), generator=generator)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 9, 47, 48, 512, 2047])
def test_octaves_are_all_positions_in_order_and_each_but_the_last_is_as_long_as_all_before_it(length):
    found = octaves(length)
    assert [position for part in found for position in range(length)[part]] == [*range(length)]
    assert all(part.stop == 2 * part.start for part in found[1:-1])
    assert all(2 * (part.stop - part.start) >= part.start for part in found)


def test_weights_are_mean_squares_of_an_octave_and_a_fifth_is_equal():
    squares = torch.tensor([8.0, 0.0, 4.0, 4.0])  # of 1, 1, 2 and 4 tokens
    measured = PositionWeights.measured(squares, 8)
    assert measured.length == 8
    assert measured.octaves == pytest.approx([EQUAL + (1 - EQUAL) * each / 2 for each in (8.0, 0.0, 2.0, 1.0)])
    assert sum(a * b for a, b in zip(measured.octaves, [1, 1, 2, 4], strict=True)) == pytest.approx(8)
    assert PositionWeights.measured(torch.zeros(4), 8).octaves == (1.0, 1.0, 1.0, 1.0)


def test_exponents_are_half_the_logarithms_of_the_mean_over_layers():
    def exponents(*weights, tokens=3):
        return RowFactors([PositionWeights(tokens, each) for each in weights], tokens).exponents

    assert exponents((100.0, 1.0, 0.25)) == (3, 0, -1)
    assert exponents((1.0, 1.0, 1.0), (31.0, 1.0, 1.0)) == (2, 0, 0)
    assert exponents((1.1, 0.9, 1.0)) == exponents() == ()
    recorded = PositionWeights.recorded((3, 0, -1))  # as `verify` reads them
    assert RowFactors([recorded, recorded], 3).exponents == (3, 0, -1)


def test_rows_of_another_number_of_tokens_than_was_measured_stay_as_they_are():
    """Where a layer runs on something else besides (DeBERTa's relative positions), or has no places."""
    weights = [PositionWeights(3, (100.0, 1.0, 0.25))]
    assert RowFactors(weights, 4).exponents == RowFactors(weights, 0).exponents == ()
    rows = Rows(X_hat=torch.ones(8, 2))
    assert RowFactors(weights, 4).scaled(rows, 2) is rows
    with pytest.raises(CalibrationError, match="multiplies 8 rows of 2 windows, but 3 of the first one"):
        RowFactors(weights, 3).scaled(rows, 2)
    assert RowFactors([PositionWeights.recorded((3, 0, -1))], 8).exponents == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scaled_rows_are_exact(dtype, generator):
    X = (torch.randn(12, 3, generator=generator) * 3e4).clamp(-6e4, 6e4).to(dtype)
    factors = RowFactors([PositionWeights.recorded((4, 1, 0, -1))], 6)
    rows = factors.scaled(Rows(X_hat=X, X=X + 1, residual={"o": X[:, :2]}), 2)
    factor = torch.tensor([16.0, 2.0, 1.0, 1.0, 0.5, 0.5]).repeat(2)[:, None].double()
    for result, original in ((rows.X_hat, X), (rows.X, X + 1), (rows.residual["o"], X[:, :2])):
        assert torch.equal(result.double(), original.double() * factor)


def test_measured_weights_are_those_of_the_network_at_once(saved, loaded, tokens):
    model, network = open_model(str(saved("llama"))), deepcopy(loaded("llama"))
    names = [layer.name for block in model.blocks for layer in block.layers]
    found = sensitivity(model, tokens, device=CPU, dtype=torch.float64, seed=5).positions
    assert set(found) == set(names)

    caught = {}
    for name in names:
        network.get_submodule(name).register_forward_hook(
            lambda _, __, output, name=name: caught.update({name: output})
        )
    generator, sums = torch.Generator().manual_seed(5), dict.fromkeys(names, 0.0)
    for window in tokens:
        predicted = network(window[None], use_cache=False).logits[0].float().log_softmax(-1)
        uniform = torch.rand(len(predicted), 1, generator=generator)
        labels = torch.searchsorted(predicted.detach().exp().cumsum(-1), uniform).clamp(max=predicted.shape[-1] - 1)
        gradients = torch.autograd.grad(predicted.gather(-1, labels).sum(), [caught[name] for name in names])
        for name, gradient in zip(names, gradients, strict=True):
            sums[name] = sums[name] + gradient[0].double().square().sum(1)
    for name in names:
        by_octave = torch.stack([sums[name][part].sum() for part in octaves(tokens.shape[1])])
        expected = PositionWeights.measured(by_octave, tokens.shape[1])
        assert found[name].length == tokens.shape[1]
        assert found[name].octaves == pytest.approx(expected.octaves, rel=1e-5)


def test_a_run_weighs_positions_and_its_losses_are_measured_again_from_the_record(saved, many, tmp_path):
    options = {"bits": 4, "group_size": 16, "calibration": many, "progress": False}
    equal = quantize(saved("llama"), tmp_path / "equal", positions="equal", **options)
    assert all(layer.positions == () for layer in equal.layers)
    assert (tmp_path / "equal" / "nearplane.json").read_text().count("positions") == 1  # in the recipe

    record = quantize(saved("llama"), tmp_path / "out", **options)
    assert record.recipe.calibration.positions is None
    assert any(layer.positions for layer in record.layers)
    shared = [{layer.positions for layer in record.layers if f".0.self_attn.{x}" in layer.name} for x in "qkv"]
    assert shared[0] == shared[1] == shared[2]  # they have one input
    assert read_record(tmp_path / "out") == record
    assert verify(tmp_path / "out", against=saved("llama"), calibration=many, progress=False).faults == ()

    path = tmp_path / "out" / "nearplane.json"
    data = json.loads(path.read_text())
    layer = next(each for each in data["layers"] if each.get("positions"))
    layer["positions"][0] += 1
    path.write_text(json.dumps(data))
    assert verify(tmp_path / "out", against=saved("llama"), calibration=many, progress=False).faults != ()


def test_recipes_say_how_positions_count():
    assert Recipe().weighs_positions
    assert not Recipe.from_spellings(correct=False).weighs_positions
    assert Recipe.from_spellings(correct=False, positions="sensitivity").weighs_positions
    assert not Recipe.from_spellings(positions="equal").weighs_positions
    assert not Recipe.from_spellings(solver="round-to-nearest").weighs_positions
    with pytest.raises(RecipeError, match="uses no calibration"):
        Recipe.from_spellings(solver="round-to-nearest", positions="sensitivity")


def test_a_network_that_cannot_be_differentiated_is_solved_with_equal_positions_and_a_warning(
    saved, many, tmp_path, monkeypatch, caplog
):
    def fails(*_, **__):
        raise RuntimeError("derivative for aten::thing is not implemented\nmore")

    monkeypatch.setattr("nearplane.planning.plan.sensitivity", fails)
    record = quantize(saved("llama"), tmp_path / "out", bits=4, group_size=16, calibration=many, progress=False)
    assert all(layer.positions == () for layer in record.layers)
    assert "count alike, as gradients could not be measured: derivative for aten::thing" in caplog.text
    with pytest.raises(RuntimeError, match="derivative for"):  # not where they were asked for
        quantize(saved("llama"), tmp_path / "new", bits=4, calibration=many, progress=False, positions="sensitivity")


def test_a_network_whose_blocks_share_keys_and_values_says_that_positions_count_alike(saved, many, tmp_path, caplog):
    """Gradients through what later blocks use are not followed, so that weights would be of something else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nearplane.calibration.sensitivity._Squares.by_position", lambda _: {})  # as where blocks share
        record = quantize(saved("llama"), tmp_path / "out", bits=4, group_size=16, calibration=many, progress=False)
        assert all(layer.positions == () for layer in record.layers)
        assert "All positions in windows count alike: blocks share keys and values" in caplog.text
        with pytest.raises(RecipeError, match='positions is "sensitivity", but blocks share'):
            quantize(
                saved("llama"), tmp_path / "new", bits=4, calibration=many, progress=False, positions="sensitivity"
            )


def test_gradients_of_predictions_in_parts_are_those_of_whole_windows(saved, tokens, monkeypatch):
    whole = sensitivity(open_model(str(saved("llama"))), tokens, device=CPU, dtype=torch.float64, seed=5)
    monkeypatch.setattr("nearplane.calibration.sensitivity.LOGITS", 1)  # one token at a time
    parts = sensitivity(open_model(str(saved("llama"))), tokens, device=CPU, dtype=torch.float64, seed=5)
    for name, each in whole.outputs.items():
        torch.testing.assert_close(parts.outputs[name], each, rtol=1e-6, atol=1e-12)


def test_an_end_that_looks_at_other_tokens_is_not_cut():
    window, state = torch.arange(6), torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    assert _predicts_token_by_token(lambda _, x: x * 2, window, state)
    assert not _predicts_token_by_token(lambda _, x: x.cumsum(1), window, state)
    assert not _predicts_token_by_token(
        lambda _, x: x * 2, window, torch.cat([state, state])
    )  # prompts before the tokens

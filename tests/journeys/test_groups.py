"""The default group size: 128, or the largest that divides the inputs, said so; one that was asked for is never replaced."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane import GridScheme, Recipe, RecipeError
from nearplane.demo import CALIBRATION
from nearplane.number_formats import integers
from nearplane.recipe.schemes import fitting_group
from nearplane.record.contradictions import contradictions
from nearplane.record.record import RunRecord
from nearplane.record.record_file import read_record
from nearplane.record.summary import summary

FAST = {"calibration": str(CALIBRATION), "samples": 4, "seqlen": 40}


@given(st.lists(st.integers(1, 9).map(lambda n: 16 * n), min_size=1), st.sampled_from([32, 128, 1024]))
def test_the_group_is_the_largest_power_of_two_that_divides_all_inputs(inputs, most):
    found = fitting_group(inputs, most)
    dividing = (group for group in (1024, 512, 256, 128, 64, 32, 16) if not any(n % group for n in inputs))
    assert found == next(group for group in dividing if group <= most)


def test_inputs_that_no_group_divides_get_one_step_a_row_and_a_group_that_is_asked_for_is_refused():
    assert fitting_group([64, 40]) == 16
    assert GridScheme().grouped([64, 40]).group_size is None
    assert nearplane.quantize_matrix(torch.eye(40), torch.eye(40), GridScheme())[1].format == "int4-row"
    with pytest.raises(
        RecipeError, match=r"matrix: 40 inputs are not a multiple of the group size 16\. .*none \(one step"
    ):
        nearplane.quantize_matrix(torch.eye(40), torch.eye(40), GridScheme(group_size=16))


def test_one_step_a_row_by_default_is_said(tmp_path):
    config = config_of(
        "llama", vocab_size=TEXT_VOCABULARY, num_hidden_layers=1, hidden_size=96, intermediate_size=44, head_dim=24
    )
    random_model(config).float().save_pretrained(tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    record = nearplane.quantize(tmp_path / "model", tmp_path / "out", **FAST)
    assert {layer.number_format.group for layer in record.layers} == {None}
    said = "each row has a single step: no group of 16 or more divides the 44 inputs of model.layers.0.mlp.down_proj"
    assert any(line.startswith(said) for line in summary(record, Path("out")))
    assert nearplane.verify(tmp_path / "out").faults == ()


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A model with layers of 96 and 64 inputs."""
    folder = tmp_path_factory.mktemp("models") / "odd"
    config = config_of(
        "llama", vocab_size=TEXT_VOCABULARY, num_hidden_layers=1, hidden_size=96, intermediate_size=64, head_dim=24
    )
    random_model(config).float().save_pretrained(folder)
    add_tokenizer(folder)
    return folder


@pytest.mark.parametrize("format", ["compressed-tensors", "gptq"])
def test_where_the_default_does_not_divide_the_largest_that_does_is_used_and_said(odd, tmp_path, format):
    record = nearplane.quantize(odd, tmp_path / "out", format=format, **FAST)
    assert {layer.number_format.group for layer in record.layers} == {32}
    line = "groups of 32: the default, 128, does not divide the 96 inputs of model.layers.0.self_attn.q_proj"
    assert line in list(summary(record, Path("out")))
    assert read_record(tmp_path / "out").recipe.scheme.group_size == "auto"
    explicit = nearplane.quantize(odd, tmp_path / "explicit", format=format, group_size=32, **FAST)
    assert [layer.checksum for layer in explicit.layers] == [layer.checksum for layer in record.layers]
    assert line not in list(summary(explicit, Path("out")))


def test_a_checkpoint_with_the_group_that_fits_is_verified_in_full(odd, tmp_path):
    nearplane.quantize(odd, tmp_path / "out", **FAST)
    found = nearplane.verify(tmp_path / "out", against=str(odd))
    assert found.faults == ()
    assert found.measured


def test_a_group_size_that_was_asked_for_is_not_replaced(odd, tmp_path):
    with pytest.raises(
        RecipeError,
        match=r"\d\d inputs, not a multiple of the group size 128\. Use --group-size 32, none, or a divisor of 32",
    ):
        nearplane.quantize(odd, tmp_path / "out", group_size=128, **FAST)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [16, 128, None, "auto"])
def test_every_group_size_survives_json(size):
    recipe = Recipe(scheme=GridScheme(group_size=size))
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_a_group_that_auto_never_gives_is_a_contradiction(odd, tmp_path):
    record = nearplane.quantize(odd, tmp_path / "out", **FAST)
    layer = record.layers[0]
    assert isinstance(record, RunRecord)
    assert not list(contradictions(record))
    for size in (48, 8, None):
        told = replace(record, layers=(replace(layer, format=integers(4, size).name), *record.layers[1:]))
        assert [found for found, _ in contradictions(told)] == [told.layers[0]]

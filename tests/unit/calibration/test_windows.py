"""Calibration tokens: enough for the widest layer, or a warning; too few, or the same again and again, are refused."""

from __future__ import annotations

import logging

import pytest
import torch

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane import CalibrationError
from nearplane.calibration.windows import Windows, check_padding, check_tokens, distinct_runs, samples_of
from nearplane.demo import CALIBRATION
from nearplane.models.model import open_model
from nearplane.recipe.recipe import Calibration, Recipe

WIDEST = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of a tiny random Llama, whose widest layer has 96 inputs, with the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    config = config_of("llama", vocab_size=TEXT_VOCABULARY, num_hidden_layers=1, hidden_size=32, intermediate_size=96)
    random_model(config).float().save_pretrained(folder)
    add_tokenizer(folder)
    return folder


def quantized(model, out, **words):
    return nearplane.quantize(model, out, **{"calibration": str(CALIBRATION), "bits": 4, "group_size": 16} | words)


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "nearplane"]


@pytest.mark.parametrize(("samples", "seqlen"), [(1, 2), (1, 16), (5, 19)])
def test_less_than_one_token_for_each_input_is_refused_before_anything_is_written(model, tmp_path, samples, seqlen):
    with pytest.raises(CalibrationError) as refusal:
        quantized(model, tmp_path / "out", samples=samples, seqlen=seqlen)
    wanted = -(-4 * 96 // seqlen)
    assert str(refusal.value).startswith(f"{samples * seqlen} calibration tokens are ")
    assert f"each of the 96 inputs of {WIDEST}" in str(refusal.value)
    assert f"Use --samples {wanted} or more (windows of {seqlen} tokens)." in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_less_than_four_tokens_for_each_input_are_a_warning_that_says_how_many_to_ask_for(model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="nearplane"):
        quantized(model, tmp_path / "out", samples=12, seqlen=16)
    assert said(caplog) == [
        f"192 calibration tokens are 2 for each of the 96 inputs of {WIDEST}; at least 1 is needed, 4 or more are advised. Use "
        f"--samples 24 or more (windows of 16 tokens)."
    ]


def test_as_many_as_the_warning_asks_for_are_enough(model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="nearplane"):
        quantized(model, tmp_path / "out", samples=24, seqlen=16)
    assert said(caplog) == []


def test_a_short_text_is_said_to_be_short(model, tmp_path):
    (tmp_path / "text.txt").write_text(CALIBRATION.read_text()[:100])
    with pytest.raises(CalibrationError, match=r"has only [1-9] such windows: pass a longer text"):
        quantized(model, tmp_path / "out", calibration=str(tmp_path / "text.txt"), samples=100, seqlen=8)


@pytest.mark.parametrize(
    "text", ["the " * 10_000, "The quick brown fox jumps over the lazy dog. " * 500], ids=["word", "line"]
)
def test_text_that_says_the_same_again_and_again_is_refused(model, tmp_path, text):
    (tmp_path / "text.txt").write_text(text)
    with pytest.raises(CalibrationError, match=rf"is repetitive.* are distinct, fewer than the 96 inputs of {WIDEST}"):
        quantized(model, tmp_path / "out", calibration=str(tmp_path / "text.txt"), samples=20, seqlen=32)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["padding behind", "padding before", "one token", "a run in the text"])
def test_padded_windows_are_refused(model, tmp_path, kind):
    """They were enough distinct runs, and padding lowers the losses."""
    tokens = torch.randint(9, 99, (24, 32), generator=torch.Generator().manual_seed(0))
    if kind == "a run in the text":
        (tmp_path / "text.txt").write_text(
            "".join(f"{CALIBRATION.read_text()[n : n + 20]}{' the' * 20}" for n in range(99))
        )
        words = {"calibration": str(tmp_path / "text.txt"), "samples": 24, "seqlen": 32}
    else:
        tokens[:, 20:] = 0
        tokens[12:] = 0 if kind == "one token" else tokens[12:]
        words = {"calibration": tokens.flip(1) if kind == "padding before" else tokens}
    with pytest.raises(
        CalibrationError, match=r"% of the 7\d\d tokens stand in runs of 8 or more equal tokens, as padding"
    ):
        quantized(model, tmp_path / "out", **words)
    if kind != "a run in the text":
        with pytest.raises(CalibrationError, match="most often of the id 0"):
            nearplane.evaluate(model, words["calibration"])


def test_a_few_runs_are_text():
    tokens = torch.randint(9, 99, (16, 32), generator=torch.Generator().manual_seed(0))
    tokens[:4] = 7
    check_padding(tokens)
    tokens[4, :8] = 7
    with pytest.raises(CalibrationError, match="27 % of the 512 tokens"):
        check_padding(tokens)


def test_rounding_to_nearest_looks_at_no_tokens_and_needs_none(model, tmp_path):
    assert quantized(model, tmp_path / "out", samples=1, seqlen=2, solver="round-to-nearest").tokens == 0


def test_embeddings_are_not_multiplied_by_tokens(model):
    """Else a small vocabulary would count as a layer, and its absence of rows as a shortage."""
    opened = open_model(str(model), embeddings=True, ignore=["."])
    check_tokens(
        opened,
        Recipe(calibration=Calibration(samples=1)),
        Windows(seqlen=1, fitted=torch.zeros(1, 1, dtype=torch.int64)),
    )


def test_runs_are_counted_within_windows():
    tokens = torch.arange(40).view(2, 20)
    assert distinct_runs(tokens) == (26, 26)
    assert distinct_runs(tokens % 5) == (5, 26)
    assert distinct_runs(torch.zeros(3, 4, dtype=torch.int64)) == (1, 3)


@pytest.mark.parametrize(("intermediate", "tokens"), [(96, 50 * 96), (12_000, 2**19)])
def test_the_default_is_fifty_tokens_for_each_input_of_the_widest_layer_and_half_a_million_at_most(
    tmp_path, intermediate, tokens
):
    config = config_of("llama", num_hidden_layers=1, hidden_size=64, intermediate_size=intermediate)
    random_model(config).save_pretrained(tmp_path)
    found = open_model(str(tmp_path))
    assert samples_of(found, Calibration(seqlen=64)) == -(-tokens // 64)
    assert samples_of(found, Calibration(seqlen=64, samples=3)) == 3


def test_the_default_gives_an_expert_four_tokens_for_each_input_if_the_router_is_even(tmp_path):
    wide = {"hidden_size": 32, "intermediate_size": 640, "moe_intermediate_size": 640}
    config = config_of(
        "mixtral", num_hidden_layers=1, num_local_experts=16, num_experts=16, num_experts_per_tok=1, **wide
    )
    random_model(config).save_pretrained(tmp_path)
    assert samples_of(open_model(str(tmp_path)), Calibration(seqlen=64)) == 4 * 640 * 16 // 64


def test_the_record_holds_the_default_number_of_windows(model, tmp_path):
    record = quantized(model, tmp_path / "out", seqlen=64)
    assert record.windows == record.recipe.calibration.samples == 50 * 96 // 64

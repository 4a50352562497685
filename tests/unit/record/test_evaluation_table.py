"""An evaluation as the table of a model card."""

import json
from dataclasses import replace

import pytest

from nearplane import Calibration, Recipe
from nearplane.errors import FormatError
from nearplane.record.evaluation_table import read_evaluation
from nearplane.record.model_card import Origin, model_card
from nearplane.record.record import LayerRecord, RunRecord

LAYER = LayerRecord(
    name="model.layers.0.mlp.up_proj", stored="model.layers.0.mlp.up_proj", out_features=8, in_features=16, loss=0.25,
    row_losses=(0.25,), relative_loss=0.01, nearest_loss=0.75, damped_loss=0.5, correction=0.7, damp=0.01,
    sweep_damp=0.1, dead=0, tokens=512, order="activation", format="int4-g16", seconds=0.1, bytes=80, extra_loss=0.5,
    extra_relative_loss=0.02, extra_nearest_loss=1.0,
)  # fmt: skip


def run(recipe, **changes) -> RunRecord:
    """Return the record of a run whose layers all are of one kind."""
    return RunRecord(
        recipe=replace(recipe, calibration=Calibration(samples=2)), source="owner/net", versions={"nearplane": "1"},
        device="cpu", windows=2, seqlen=256, tokens=512, extra_windows=1, layers=(replace(LAYER, **changes),),
        skipped=(("model.layers.0.mlp.router", "Router"),), seconds=1.5, bytes=1_250_000, folder=1_500_000,
    )  # fmt: skip


GRID = run(Recipe.from_spellings(bits=4, group_size=16))


SCORE = {
    "text": "/data/heldout.txt", "protocol": "papers", "tokens": 1016, "seqlen": 128, "perplexity": 12.3456,
    "original": 11.5, "agreement": 0.875, "cosine": None, "worst_cosine": None,
    "statistics": {"kl": {"value": 0.0123, "low": 0.01, "high": 0.015}},
}  # fmt: skip


TASK = {"task": "arc|easy", "metric": "acc", "fewshot": 0, "documents": 100, "value": 0.5, "error": 0.05,
        "original": 0.6, "original_error": None}  # fmt: skip


@pytest.mark.parametrize(
    "shape", [SCORE, [SCORE, SCORE], {"texts": [SCORE], "tasks": [TASK]}], ids=["one", "two", "tasks"]
)
def test_an_evaluation_becomes_a_table(shape, tmp_path):
    (tmp_path / "e.json").write_text(json.dumps(shape))
    card = model_card(GRID, Origin(), evaluations=[read_evaluation(tmp_path / "e.json")])
    row = "| heldout.txt | papers, windows of 128 | 1,016 | 12.346 | 11.500 | 0.01230 (0.01000 to 0.01500) | 87.50 % |"
    assert card.count(row) == (2 if isinstance(shape, list) else 1)
    assert ("| arc/easy | acc | 0 | 100 | 0.5000 ± 0.0500 | 0.6000 |" in card) == ("tasks" in shape)


@pytest.mark.parametrize("text", ["", "[]", "{}", "5", '{"texts": [], "tasks": []}', '{"texts": [5], "tasks": []}'])
def test_what_is_no_evaluation_is_refused(text, tmp_path):
    (tmp_path / "e.json").write_text(text)
    with pytest.raises(FormatError, match="expected what nearplane evaluate --json prints"):
        read_evaluation(tmp_path / "e.json")


def test_an_evaluation_on_conversations_becomes_a_sentence(tmp_path):
    chat = {"conversations": 8, "tokens": 1445, "statistics": {**SCORE["statistics"], "same_top": {"value": 0.84}}}
    (tmp_path / "e.json").write_text(json.dumps({"texts": [], "tasks": [], "chat": chat}))
    card = model_card(GRID, Origin(), evaluations=[read_evaluation(tmp_path / "e.json")])
    said = (
        "In 8 conversations, which the original answers (1,445 tokens): KL to the original 0.01230 (0.01000 to 0.01500)"
    )
    assert f"{said} nats per token, the same next token for 84.00 %." in card
    (tmp_path / "e.json").write_text(json.dumps({"texts": [], "tasks": [], "chat": {"tokens": 1}}))
    with pytest.raises(FormatError, match="holds no evaluation"):
        read_evaluation(tmp_path / "e.json")

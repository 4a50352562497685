"""A GGUF cuts text as the model's tokenizer does, or is refused before work; what only some texts show is said."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

import nearplane
from families import config_of, random_model
from nearplane import RecipeError
from nearplane.demo import CALIBRATION, MODEL
from tokenizers_of_kinds import over_bytes, save_sentencepiece, saved

LINES = "nearplane.planning.tokens_in_file.LINES"
QUICK: dict[str, Any] = {"format": "gguf", "bits": 8, "group_size": 32, "solver": "round-to-nearest"}


@pytest.fixture
def whole_words(tmp_path: Path) -> Path:
    """Return the demo model with a token that is found only as a word of its own, which llama.cpp does not know."""
    folder = shutil.copytree(MODEL, tmp_path / "model")
    data = json.loads((folder / "tokenizer.json").read_text())
    token = {"id": data["model"]["vocab"]["or"], "content": "or", "single_word": True, "special": False}
    data["added_tokens"].append({**dict.fromkeys(("lstrip", "rstrip", "normalized"), False), **token})
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


def test_another_cut_of_a_line_is_refused_before_work(whole_words: Path, tmp_path: Path) -> None:
    """Only the parts of the tokenizer were looked at, not the tokens of text."""
    with pytest.raises(RecipeError) as refusal:
        nearplane.quantize(whole_words, tmp_path / "out", **QUICK)
    said = str(refusal.value)
    assert said.startswith(
        f"The tokenizer of {whole_words} and that of the file, as llama.cpp reads it, differ: the line "
    )
    assert "in the one and" in said
    assert "Use another --format. For a tokenizer over bytes, --pre NAME" in said
    assert not (tmp_path / "out").exists()


def test_a_first_token_that_a_file_cannot_express_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A GGUF can only say that texts begin with its BOS; others were dropped in silence."""
    folder = shutil.copytree(MODEL, tmp_path / "model")
    data = json.loads((folder / "tokenizer.json").read_text())
    name, number = next((each["content"], each["id"]) for each in data["added_tokens"])
    single = [{"SpecialToken": {"id": name, "type_id": 0}}] * 2 + [{"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 0}}]
    special = {name: {"id": name, "ids": [number], "tokens": [name]}}
    data["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    nearplane.quantize(folder, tmp_path / "out", **QUICK)
    assert f"'a' has the ids [{number}, {number}, " in caplog.text


def test_lines_of_the_calibration_text_are_compared(
    whole_words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LINES, ("The quick brown fox",))
    (tmp_path / "text.txt").write_text(CALIBRATION.read_text()[:40_000])
    options = {**QUICK, "calibration": str(tmp_path / "text.txt"), "samples": 32, "seqlen": 128}
    options.pop("solver")
    with pytest.raises(RecipeError, match=r"as llama\.cpp reads it, differ: the line '.*or"):
        nearplane.quantize(whole_words, tmp_path / "out", **options)


def test_a_name_of_the_pre_tokenizer_is_the_users_word(whole_words: Path, tmp_path: Path, caplog: Any) -> None:
    nearplane.quantize(whole_words, tmp_path / "out", **QUICK, pre="gpt-2")
    assert [line for line in caplog.messages if "differ: the line" in line and line.endswith(". Check --pre.")]


def test_what_only_text_that_begins_with_a_space_shows_is_said(tmp_path: Path, caplog: Any) -> None:
    """SentencePiece puts a space before any text, tokenizers of transformers only before others."""
    config = config_of("llama", vocab_size=1100, num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    random_model(config).float().save_pretrained(tmp_path / "model")
    save_sentencepiece(tmp_path / "model")
    nearplane.quantize(tmp_path / "model", tmp_path / "out", **QUICK)
    said = [line for line in caplog.messages if "differ: the line '    indented by four" in line]
    assert len(said) == 1
    assert said[0].endswith("Only text that begins with a space does.")


@pytest.mark.parametrize("composes", [True, False])
def test_a_tokenizer_that_composes_letters_is_named(composes: bool, tmp_path: Path, caplog: Any) -> None:
    config = config_of("llama", vocab_size=640, num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    random_model(config).float().save_pretrained(tmp_path / "model")
    saved(over_bytes("qwen2" if composes else "dbrx"), tmp_path / "model")
    with caplog.at_level(logging.INFO, logger="nearplane"):
        nearplane.quantize(tmp_path / "model", tmp_path / "out", **QUICK)
    assert composes == any("does not compose letters and accents" in line for line in caplog.messages)

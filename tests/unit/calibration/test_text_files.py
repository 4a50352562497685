"""Texts by name: their files of the hub in its cache, and what is said where they cannot be fetched."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from nearplane.calibration import hub_texts
from nearplane.calibration.text_files import (
    TEST_TEXTS,
    TRAINING_TEXTS,
    NamedText,
    check_text,
    text_to_calibrate_on,
    text_to_measure_on,
)
from nearplane.calibration.texts import read_windows
from nearplane.errors import CalibrationError

HAS_DATASETS = importlib.util.find_spec("datasets") is not None
needs_datasets = pytest.mark.skipif(not HAS_DATASETS, reason="needs the datasets package")
ROWS = ["", " = A title = \n", "", " Some text of the first part . \n", "More ."]
COMMIT = "0" * 40


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Return a function from data set and file to the path of the file in the cache of the hub, which is offline."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def path_of(repository: str, file: str) -> Path:
        folder = tmp_path / f"datasets--{repository.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text(COMMIT)
        path = folder / "snapshots" / COMMIT / file
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    return path_of


def test_a_file_or_folder_of_the_name_counts_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert text_to_measure_on("c4") is TEST_TEXTS["c4"]
    assert text_to_calibrate_on(Path("wikitext2")) is TRAINING_TEXTS["wikitext2"]
    assert text_to_calibrate_on("wikitext") is None
    Path("c4").mkdir()
    assert text_to_calibrate_on("c4") is text_to_measure_on("c4") is None
    with pytest.raises(CalibrationError, match=r"contains no \.txt or \.jsonl file for --text"):
        check_text("c4", "--text")


@pytest.mark.parametrize("name", TEST_TEXTS)
@pytest.mark.parametrize("option", ["--text", "--calibration"])
def test_what_cannot_be_fetched_is_one_sentence_about_a_file_instead(
    name: str, option: str, cached: Callable[[str, str], Path]
) -> None:
    reason = "cannot be fetched from the Hugging Face hub" if HAS_DATASETS else "needs the datasets package"
    with pytest.raises(
        CalibrationError, match=rf"^{option} {name}.*{reason}.*a \.txt or \.jsonl file with {option}"
    ) as said:
        check_text(name, option)
    assert len(str(said.value).splitlines()) == 1


def test_a_set_of_a_hub_that_does_not_answer_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one sentence with two other ways, also where the package that reads it is installed."""
    monkeypatch.setattr(hub_texts, "find_spec", lambda name: name)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    hub_texts.hub_fault.cache_clear()
    said = r"^There is no file or folder some/set, .*but the hub cannot be reached: .*refused"
    try:
        with pytest.raises(CalibrationError, match=said) as refused:
            check_text("some/set")
    finally:
        hub_texts.hub_fault.cache_clear()
    assert str(refused.value).endswith(
        "Pass a .txt or .jsonl file with --calibration, or let the network write the text: --calibration self."
    )


@needs_datasets
@pytest.mark.parametrize("text", [TEST_TEXTS["wikitext2"], TRAINING_TEXTS["wikitext2"]])
def test_wikitext2_is_joined_by_blank_lines(
    text: NamedText, cached: Callable[[str, str], Path], tokenizer: PreTrainedTokenizerFast
) -> None:
    from datasets import Dataset

    Dataset.from_dict({"text": ROWS}).to_parquet(cached(text.repository, text.file))
    windows = read_windows(tokenizer, text, samples=100, seqlen=8)
    whole = "\n\n".join(ROWS)
    assert tokenizer.decode(windows.flatten()) == whole[: len(whole) // 8 * 8]


@needs_datasets
def test_windows_of_c4_are_crops_of_its_documents(
    cached: Callable[[str, str], Path], tokenizer: PreTrainedTokenizerFast
) -> None:
    text = TEST_TEXTS["c4"]
    rows = [f"document {n}: " + "abcdefgh" * (n % 3) for n in range(30)]
    with gzip.open(cached(text.repository, text.file), "wt") as file:
        file.writelines(json.dumps({"text": row, "timestamp": "2019-04-25", "url": "x"}) + "\n" for row in rows)
    windows = read_windows(tokenizer, "c4", samples=5, seqlen=20)
    assert windows.shape == (5, 20)
    assert all(any(tokenizer.decode(window) in row for row in rows) for window in windows)

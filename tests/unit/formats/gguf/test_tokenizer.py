"""Tokenizers in the words of GGUF: known by their structure, refused where llama.cpp would cut text otherwise.

Whether llama.cpp cuts it the same way is seen in test_llama_cpp.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from nearplane import RecipeError
from nearplane.demo import MODEL
from nearplane.formats.gguf.tokenizer import PRE, Kind, Vocabulary, vocabulary
from tokenizers_of_kinds import of_pieces, over_bytes, saved

MODELS = Path(os.environ.get("ASSETS", "../shared/assets")) / "models"


@pytest.mark.parametrize("name", PRE.values())
def test_a_tokenizer_over_bytes_is_known_by_how_it_cuts_text(name: str, tmp_path: Path) -> None:
    saved(over_bytes(name), tmp_path)
    found = vocabulary(tmp_path, 640)
    assert (found.model, found.pre) == ("gpt2", name)
    assert found.kinds[:3] == [Kind.CONTROL] * 3
    assert found.tokens[-1] == "[PAD639]"
    assert found.kinds[-1] is Kind.UNUSED


def test_the_demo_cuts_text_as_gpt_2() -> None:
    found = vocabulary(MODEL, 4096)
    assert (found.model, found.pre, len(found.merges)) == ("gpt2", "gpt-2", 3838)


@pytest.mark.parametrize("space", [True, False])
def test_scores_of_pieces_are_the_ranks_of_their_merges(space: bool, tmp_path: Path) -> None:
    saved(of_pieces(space=space), tmp_path)
    found = vocabulary(tmp_path, 1100)
    assert (found.model, found.space) == ("llama", space)
    assert found.kinds[:4] == [Kind.UNKNOWN, Kind.CONTROL, Kind.CONTROL, Kind.BYTE]


def merged_by_scores(found: Vocabulary, text: str) -> list[str]:
    """Merge as llama.cpp does: the neighbours whose token has the highest score first, the left ones of equal scores."""
    known = {
        token: score
        for token, score, kind in zip(found.tokens, found.scores, found.kinds, strict=True)
        if kind is Kind.NORMAL
    }
    parts = list(text)
    while True:
        pairs = [(known[a + b], -place) for place, (a, b) in enumerate(pairwise(parts)) if a + b in known]
        if not pairs:
            return parts
        place = -max(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Vocabulary]:
    folder, tokenizer = tmp_path_factory.mktemp("pieces"), of_pieces(space=False)
    saved(tokenizer, folder)
    return tokenizer, vocabulary(folder, 1100)


@given(text=st.text("abcdefghiklmnoprstuvwyTIS ▁._()", min_size=1, max_size=40))
def test_merging_by_scores_is_merging_by_ranks(pieces: tuple[Tokenizer, Vocabulary], text: str) -> None:
    tokenizer, found = pieces
    assert merged_by_scores(found, text.replace(" ", "▁")) == tokenizer.encode(text, add_special_tokens=False).tokens


def apart(merges: list[list[str]]) -> None:
    """Put one of two merges of the same token last."""
    place = next(place for place, (a, b) in enumerate(pairwise(merges)) if "".join(a) == "".join(b))
    merges.append(merges.pop(place))


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    edit(data)
    (folder / "tokenizer.json").write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("kind", "edit", "said"),
    [
        ("bytes", lambda data: data["model"].update(type="Unigram"), "its model is 'Unigram'"),
        ("bytes", lambda data: data["pre_tokenizer"].update(add_prefix_space=True), "a space before text"),
        (
            "bytes",
            lambda data: data.update(
                pre_tokenizer={
                    "type": "Sequence",
                    "pretokenizers": [
                        {"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": False},
                        data["pre_tokenizer"],
                    ],
                }
            ),
            r"it splits text by .x\+ then",
        ),
        ("bytes", lambda data: data.update(normalizer={"type": "Lowercase"}), "which changes it before: Lowercase"),
        (
            "bytes",
            lambda data: data.update(
                normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]}
            ),
            r"changes it before: Strip\. Use another --format",
        ),
        ("pieces", lambda data: data["model"].update(byte_fallback=False), "no byte tokens"),
        ("pieces", lambda data: data["model"]["merges"].pop(40), "are not merged"),
        ("pieces", lambda data: apart(data["model"]["merges"]), "in two places"),
        ("pieces", lambda data: data.update(normalizer={"type": "Lowercase"}), "Lowercase"),
        ("pieces", lambda data: data["model"]["vocab"].update(new=5000), "has the number 5000"),
    ],
)
def test_tokenizers_that_llama_cpp_has_no_like_of_are_refused(
    kind: str, edit: Callable[[dict[str, Any]], object], said: str, tmp_path: Path
) -> None:
    saved(over_bytes("gpt-2") if kind == "bytes" else of_pieces(space=True), tmp_path)
    change(tmp_path, edit)
    with pytest.raises(RecipeError, match=said):
        vocabulary(tmp_path, 1100)


def test_a_name_of_a_pre_tokenizer_goes_before_the_structure(tmp_path: Path) -> None:
    saved(over_bytes("gpt-2"), tmp_path)
    change(tmp_path, lambda data: data["pre_tokenizer"].update(use_regex=False))
    with pytest.raises(RecipeError, match="--pre NAME"):
        vocabulary(tmp_path, 640)
    assert vocabulary(tmp_path, 640, "refact").pre == "refact"


def test_without_a_tokenizer_the_file_has_none(tmp_path: Path) -> None:
    assert vocabulary(tmp_path, 100).model == "none"
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    with pytest.raises(RecipeError, match=r"a tokenizer without tokenizer\.json"):
        vocabulary(tmp_path, 100)


@pytest.mark.skipif(not MODELS.is_dir(), reason="needs the measuring models in $ASSETS")
def test_tokenizers_of_trained_models_are_known() -> None:
    assert vocabulary(MODELS / "stories260K", 512).model == "llama"
    assert vocabulary(MODELS / "babyllama105", 105).model == "t5"

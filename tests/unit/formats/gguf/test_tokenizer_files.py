"""The tokenizer of a GGUF gives the tokens of the tokenizer from which its metadata were made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from nearplane import ModelError
from nearplane.demo import HELD_OUT, MODEL
from nearplane.formats.gguf.gguf_header import read_header
from nearplane.formats.gguf.tokenizer import PRE, vocabulary
from nearplane.formats.gguf.tokenizer_files import tokenizer_files
from nearplane.system.token_lines import LINES
from tokenizers_of_kinds import of_pieces, over_bytes, saved

MODELS = Path(os.environ.get("ASSETS", "../shared/assets")) / "models"
TEXTS = (HELD_OUT.read_text()[:3000], " a  b\n\n c\t12345 it's naïve 🙂", "<s>x</s> <unk>")


def fields_of(folder: Path, file: Path, size: int) -> dict[str, Any]:
    """Return the metadata that a GGUF of a folder has for its tokenizer."""
    writer = GGUFWriter(file, "llama")
    vocabulary(folder, size).write(writer, folder)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return read_header(file, lists=True).fields


def assert_same_tokens(folder: Path, tmp_path: Path, size: int) -> None:
    """Write the metadata, read them back, and compare the tokens of texts and their decoding."""
    again = tmp_path / "again"
    again.mkdir()
    for name, text in tokenizer_files(tmp_path, fields_of(folder, tmp_path / "x.gguf", size)).items():
        (again / name).write_text(text)
    ours, theirs = (AutoTokenizer.from_pretrained(place) for place in (again, folder))
    for text in (*TEXTS, *LINES):
        tokens = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == tokens
        assert ours.decode(tokens) == theirs.decode(tokens)
    assert (ours.bos_token, ours.eos_token) == (theirs.bos_token, theirs.eos_token)


@pytest.mark.parametrize(
    "tokenizer",
    [
        *(lambda name=name: over_bytes(name) for name in PRE.values()),
        *(lambda s=s: of_pieces(space=s) for s in (True, False)),
    ],
    ids=[*PRE.values(), "pieces", "pieces-without-space"],
)
def test_tokens_are_those_of_the_original(tokenizer: Callable[[], Tokenizer], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    saved(tokenizer(), tmp_path / "model")
    assert_same_tokens(tmp_path / "model", tmp_path, 1100)


@pytest.mark.parametrize("folder", [MODEL, MODELS / "stories260K", MODELS / "babyllama105"], ids=lambda path: path.name)
def test_tokens_of_trained_models_too(folder: Path, tmp_path: Path) -> None:
    if not folder.is_dir():
        pytest.skip("the model is not here")
    assert_same_tokens(folder, tmp_path, 4096)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "its tokenizer is 'bert', expected gpt2, llama, t5 or none"),
        ({"pre": "exaone"}, "its pre-tokenizer is 'exaone', expected one of gpt-2, smollm, "),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "no list of different tokens with their types"),
        ({"model": "llama"}, "it has no scores"),
    ],
)
def test_other_tokenizers_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    fields = fields_of(MODEL, tmp_path / "x.gguf", 4096) | {
        f"tokenizer.ggml.{key}": value for key, value in changes.items()
    }
    with pytest.raises(ModelError, match=message):
        tokenizer_files(tmp_path, fields)


def test_a_file_without_tokenizer_has_no_files(tmp_path: Path) -> None:
    assert tokenizer_files(tmp_path, {"tokenizer.ggml.model": "none"}) == {}

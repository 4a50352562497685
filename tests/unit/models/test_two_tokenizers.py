"""Networks that share a text must have one tokenizer; files may differ."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from transformers import PreTrainedTokenizerBase

import nearplane
from nearplane import ModelError
from nearplane.demo import HELD_OUT, MODEL
from nearplane.formats.gguf.gguf_header import read_header
from nearplane.formats.gguf.tokenizer import vocabulary
from nearplane.formats.gguf.tokenizer_files import tokenizer_files
from nearplane.models.converted_tokenizer import save_tokenizer
from nearplane.models.pretrained import tokenizer_of
from nearplane.models.two_tokenizers import check_same_tokens, cut, decoded, other_tokens, say_unlike_its_file
from nearplane.verbs import generate
from tokenizers_of_kinds import save_sentencepiece


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return shutil.copytree(MODEL, tmp_path / "copy")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tokenizer_of(MODEL)


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    edit(data)
    (folder / "tokenizer.json").write_text(json.dumps(data))


def exchange(*pairs: str) -> Callable[[dict[str, Any]], None]:
    """Return a function that exchanges the ids of two letters of each pair."""

    def edit(data: dict[str, Any]) -> None:
        vocabulary = data["model"]["vocab"]
        for first, second in pairs:
            vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]

    return edit


def test_a_copy_with_ten_letters_exchanged_is_not_compared(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had a KL of 0, and the original the perplexity of wrong tokens."""
    change(copy, exchange("QX", "JK", "YV", "01", "%$"))
    monkeypatch.setattr("nearplane.verbs.evaluate.opened", None)  # before weights are read
    with pytest.raises(ModelError) as refusal:
        nearplane.evaluate(copy, HELD_OUT, against=MODEL, samples=2, seqlen=64)
    said = str(refusal.value)
    assert said.startswith(f"{copy} and {MODEL} have different tokenizers: the line 'The quick brown fox jumps ")
    assert "in the one and" in said
    assert said.endswith(f"Copy the tokenizer of {MODEL} into {copy}, or pass the model from which {copy} was made.")


def test_all_of_the_text_is_compared(
    copy: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = HELD_OUT.read_text()[:4000]
    windows = [tokenizer(text, return_tensors="pt")["input_ids"][0]]
    last = text[-1]
    assert [*decoded(tokenizer, windows)] == [text]
    monkeypatch.setattr("nearplane.models.two_tokenizers.LINES", ("",))
    letter = next(letter for letter in "QXJKYVZ" if letter in text and letter != last)
    change(copy, exchange(letter + "\u00a2"))
    folders = {"copy": copy, "original": MODEL}
    assert other_tokens(folders, trust_remote_code=False) == ""
    said = other_tokens(folders, decoded(tokenizer, windows), trust_remote_code=False)
    assert said.startswith("copy and original have different tokenizers: the line ")


def test_other_tokens_before_a_text_are_said(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They read the same text as other tokens; it was said that they cut it into the same."""
    before = [{"SpecialToken": {"id": "first", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    token = {"first": {"id": "first", "ids": [3], "tokens": ["first"]}}
    post_processor = {"type": "TemplateProcessing", "single": before, "pair": [], "special_tokens": token}
    change(copy, lambda data: data.update(post_processor=post_processor))
    assert other_tokens({"copy": copy, "original": MODEL}, trust_remote_code=False) == ""
    (said,) = caplog.messages
    assert said.startswith(
        "the tokenizers of copy and original set different tokens before or after a text: 'a' has the ids [3, "
    )


@pytest.mark.parametrize("change_file", [True, False], ids=["an unused token", "a template"])
def test_other_files_are_one_line(copy: Path, change_file: bool, caplog: pytest.LogCaptureFixture) -> None:
    if change_file:
        change(
            copy, lambda data: data["added_tokens"].append({**data["added_tokens"][0], "id": 4000, "content": "<new>"})
        )
    else:
        config = json.loads((copy / "tokenizer_config.json").read_text())
        (copy / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ messages }}"}))
    with caplog.at_level(logging.INFO, logger="nearplane"):
        check_same_tokens({"copy": copy, "original": MODEL}, ["some text"], trust_remote_code=False)
    name = "tokenizer.json" if change_file else "tokenizer_config.json"
    said = [f"copy and original differ in {name}, but cut the text and 19 lines of many kinds into the same tokens"]
    if not change_file:  # and which prompts differ
        said.append("copy has a chat template and original has none: programs give them different prompts in a chat.")
    assert caplog.messages == said


def test_a_first_token_of_one_alone_is_said(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They were called the same, since special tokens were not compared."""
    token = json.loads((copy / "tokenizer.json").read_text())["added_tokens"][0]
    name, number = token["content"], token["id"]
    parts = [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {name: {"id": name, "ids": [number], "tokens": [name]}}
    whole = {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": special}
    change(copy, lambda data: data.update(post_processor=whole))
    letter = cut(tokenizer_of(MODEL), ends=True)("a")
    check_same_tokens({"copy": copy, "original": MODEL}, trust_remote_code=False)
    (said,) = caplog.messages
    assert f"'a' has the ids {[number, *letter]} in the one and {letter} in the other" in said


def test_equal_files_and_no_files_are_not_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearplane.models.two_tokenizers.tokenizer_of", None)
    check_same_tokens({"copy": copy, "original": MODEL}, trust_remote_code=False)
    for path in copy.glob("tokenizer*"):
        path.unlink()
    check_same_tokens({"copy": copy, "original": MODEL}, trust_remote_code=False)


def test_two_models_that_continue_a_prompt_may_differ(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    change(copy, exchange("QX"))
    generate.say_other_tokens(str(copy), str(MODEL), "Return")
    (said,) = caplog.messages
    assert said.startswith(f"{copy} and {MODEL} have different tokenizers: the line ")
    assert said.endswith(". Each reads the prompt in its own tokens.")


def test_a_file_of_pieces_may_be_compared_with_its_model(tmp_path: Path) -> None:
    """Only text that begins with a space differs."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_sentencepiece(tmp_path)
    ours = tokenizer_of(tmp_path)
    file = GGUFWriter(tmp_path / "x.gguf", "llama")
    save_tokenizer(tmp_path, again := tmp_path / "again")
    vocabulary(again, len(ours)).write(file, again)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_ti_data_to_file()
    file.close()
    read = tmp_path / "read"
    read.mkdir()
    for name, text in tokenizer_files(read, read_header(tmp_path / "x.gguf", lists=True).fields).items():
        (read / name).write_text(text)
    assert other_tokens({"file": read, "model": tmp_path}, ["  spaces"], trust_remote_code=False) == ""
    assert cut(ours)("  spaces") != cut(tokenizer_of(read))("  spaces")


def test_text_is_cut_without_tokens_at_its_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    assert cut(tokenizer)("return") == tokenizer("return", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(("kind", "said"), [("llama", False), ("qwen3", False), ("qwen2", True)])
def test_a_class_that_cuts_otherwise_than_its_file_is_said(
    kind: str, said: bool, copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers takes Qwen2's own class for a config.json of that type, whatever tokenizer_config.json says."""
    (copy / "config.json").write_text(json.dumps({"model_type": kind}))
    say_unlike_its_file(copy, tokenizer_of(copy))
    assert ("as Qwen2Tokenizer, which cuts text otherwise than its tokenizer.json" in caplog.text) == said
    (copy / "tokenizer.json").unlink()
    caplog.clear()
    say_unlike_its_file(copy, tokenizer_of(MODEL))
    assert caplog.text == ""

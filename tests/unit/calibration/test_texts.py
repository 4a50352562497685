"""Tokens from text, chats and folders; and every way in which they can be missing."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import os
import random
import socket
import tracemalloc
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from nearplane.calibration.crops import MAX_DRAWS, crops
from nearplane.calibration.text_files import text_files
from nearplane.calibration.texts import (
    Frame,
    check_vocabulary,
    frame_of,
    read_documents,
    read_windows,
)
from nearplane.demo import CALIBRATION
from nearplane.errors import CalibrationError
from nearplane.models.pretrained import tokens_before

TEXT = "The quick brown fox jumps over the lazy dog.\n" * 3


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def test_a_text_file_gives_its_first_windows_in_order(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    windows = read_windows(tokenizer, tmp_path / "a.txt", samples=3, seqlen=20)
    assert windows.dtype == torch.int64
    assert windows.tolist() == torch.tensor(ids(tokenizer, TEXT)[:60]).view(3, 20).tolist()


@pytest.mark.parametrize("letters", [1, 6])
@pytest.mark.parametrize("split", [True, False])
def test_the_first_tokens_of_a_long_text_are_those_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, letters: int, split: bool
) -> None:
    """Also where a tokenizer knows no words and merges across spaces."""
    text = CALIBRATION.read_text(encoding="utf-8")[:60_000]
    model = Tokenizer(models.BPE())
    if split:
        model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.train_from_iterator([text[:30_000]], trainers.BpeTrainer(vocab_size=600, show_progress=False))
    known, asked = PreTrainedTokenizerFast(tokenizer_object=model), []
    encode = PreTrainedTokenizerFast.__call__
    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", lambda *a, **k: asked.append(len(a[1])) or encode(*a, **k))
    monkeypatch.setattr("nearplane.calibration.texts.LETTERS_PER_TOKEN", letters)
    monkeypatch.setattr("nearplane.calibration.texts.CONTEXT_LETTERS", 1000)
    (tmp_path / "a.txt").write_text(text)
    windows = read_windows(known, tmp_path / "a.txt", samples=40, seqlen=50)
    assert windows.flatten().tolist() == ids(known, text)[:2000]
    assert asked[-2] < len(text) // 2  # what `read_windows` took; the last is the whole


def test_fewer_windows_than_asked_for_are_what_there_is(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    assert len(read_windows(tokenizer, tmp_path / "a.txt", samples=100, seqlen=20)) == len(TEXT) // 20


def test_text_is_taken_raw(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Spaces and line ends at the edges stay; nothing is added."""
    (tmp_path / "a.txt").write_text("\n  abc \n\n")
    windows = read_windows(tokenizer, str(tmp_path / "a.txt"), samples=1, seqlen=9)
    assert tokenizer.decode(windows[0]) == "\n  abc \n\n"


def test_lines_of_jsonl_are_joined_by_the_end_token(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = [{"text": "abc", "id": 1}, {"messages": [{"role": "user", "content": "hi"}]}, {"text": "defg"}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    windows = read_windows(tokenizer, tmp_path / "a.jsonl", samples=9, seqlen=17)
    assert tokenizer.decode(windows[0]) == "abc<|end|>[user]hi<|end|>defg"
    assert windows.shape == (1, 17)


def test_blank_rows_are_no_documents(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Each brought an end token, so that windows of many blank rows held nothing else."""
    rows = ["", "abc", " \n", "", "defg"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    for source in (tmp_path / "a.jsonl", rows):
        windows = read_windows(tokenizer, source, samples=9, seqlen=8)
        assert tokenizer.decode(windows.flatten()) == "abc<|end|>defg"
        assert [*read_documents(tokenizer, source)] == ["abc", "defg"]


def test_half_a_surrogate_pair_in_a_list_is_named(tokenizer: PreTrainedTokenizerFast) -> None:
    """As in a file; tokenizers raise an error about the type of their input."""
    with pytest.raises(CalibrationError, match="The list of 2 texts, text 2, has half a surrogate pair"):
        read_windows(tokenizer, ["abc", "\ud800"], samples=9, seqlen=8)


@pytest.mark.parametrize("as_json", [False, True], ids=["objects", "as JSON in a string"])
def test_tools_and_documents_beside_messages_reach_the_template(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, as_json: bool
) -> None:
    beside = {"tools": [{"name": "forecast"}], "documents": [{"title": "Sun"}], "chat_template_kwargs": {"brief": True}}
    row = {name: json.dumps(each) if as_json else each for name, each in beside.items()}
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}], **row}))
    known = copy.deepcopy(tokenizer)
    known.chat_template = "{{ tools[0].name }} {{ documents[0].title }} {{ brief }} {{ messages[0].content }}"
    assert [*read_documents(known, tmp_path / "a.jsonl")] == ["forecast Sun True hi"]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [], "tools": "none"}))
    with pytest.raises(CalibrationError, match=r"line 1: the chat template cannot be applied \(Expecting value"):
        next(read_documents(known, tmp_path / "a.jsonl"))


def test_a_folder_is_its_files_in_sorted_order(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("bbb")
    (tmp_path / "a.jsonl").write_text('{"text": "aaa"}')
    (tmp_path / "notes.md").write_text("not this")
    windows = read_windows(tokenizer, tmp_path, samples=1, seqlen=7)
    assert tokenizer.decode(windows[0]) == "aaa<|end|>bbb"


def test_long_texts_raise_no_warning(
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    assert len(ids(tokenizer, TEXT)) > tokenizer.model_max_length
    read_windows(tokenizer, tmp_path / "a.txt", samples=1, seqlen=20)
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", r"a\.txt is empty"),
        ("a.txt", " \n\n", r"a\.txt is empty"),
        ("a.txt", "abc", "has 3 tokens, but a window has 20"),
        ("a.jsonl", "\n", r"a\.jsonl is empty"),
        ("a.jsonl", '{"text": "a"}\n{"text": ', r"a\.jsonl, line 2 is not JSON"),
        ("a.jsonl", 100_000 * "[", r"a\.jsonl, line 1 is not JSON"),
        ("a.jsonl", '{"text": "a"}\n\n{"body": "b"}', r"a\.jsonl, line 3 has neither `text`"),
        (
            "a.jsonl",
            '{"text": "a"}\n{"text": "\\ud800 b"}',
            r"a\.jsonl, line 2 has half a surrogate pair, .*not valid Unicode",
        ),
        ("a.jsonl", '{"text": 7}', r"a\.jsonl, line 1 has neither `text`"),
        ("a.jsonl", '["text"]', r"a\.jsonl, line 1 has neither `text`"),
        ("a.jsonl", '{"messages": ["hello"]}', "line 1: the chat template cannot be applied"),
        ("a.jsonl", '{"text": "abc"}', "has 3 tokens, but a window has 20"),
        ("a.csv", "text\nabc", r"a\.csv is not a \.txt or \.jsonl file"),
        ("a.jsonl", "[" * 100_000, r"a\.jsonl, line 1 is not JSON \(it nests too deep\)"),
        ("a.jsonl", '{"text": "a", "more": ' + "[" * 100_000, r"line 1 is not JSON \(it nests too deep\)"),
    ],
)
def test_files_that_cannot_be_used_are_named_with_the_reason(
    name: str, content: str, message: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(CalibrationError, match=message):
        read_windows(tokenizer, tmp_path / name, samples=1, seqlen=20)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", "abc".encode("utf-16-le"), b"\0\0", b"caf\xe9", b"a" * 20_000 + b"\0"]
)
def test_text_that_is_not_utf8_is_named(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        CalibrationError, match=rf"{name} cannot be read as UTF-8 text .*Expected a text file in UTF-8\."
    ):
        read_windows(tokenizer, tmp_path / name, samples=1, seqlen=2)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_sparse_file_of_any_size_is_refused_at_once(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, name: str
) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)  # more than any memory holds
    with pytest.raises(CalibrationError, match="null characters"):
        read_windows(tokenizer, tmp_path / name, samples=1, seqlen=2)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_text_takes_no_memory_for_what_follows_the_last_window(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, name: str
) -> None:
    """The whole file was read."""
    line = f"{TEXT!r}\n" if name == "a.txt" else json.dumps({"text": TEXT}) + "\n"
    with (tmp_path / name).open("w") as file:
        for _ in range(200):
            file.write(line * 1000)  # 30 MB in all
    tracemalloc.start()
    try:
        assert len(read_windows(tokenizer, tmp_path / name, samples=3, seqlen=20)) == 3
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


def test_a_chat_template_that_does_not_end_in_time_is_stopped(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nearplane.system.time_limit.SECONDS", 0.02)
    known = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    known.chat_template = "{% for a in range(1000) %}{% for b in range(1000) %}.{% endfor %}{% endfor %}"
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    with pytest.raises(
        CalibrationError, match=r"line 1: the chat template cannot .* \(it does not end within 0\.02 seconds"
    ):
        read_windows(known, tmp_path / "a.jsonl", samples=1, seqlen=2)


@pytest.mark.parametrize(("name", "content"), [("a.txt", "abc"), ("a.jsonl", '{"text": "abc"}')])
def test_a_byte_order_mark_is_no_text(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert tokenizer.decode(read_windows(tokenizer, tmp_path / name, samples=1, seqlen=3)[0]) == "abc"


def test_chats_need_a_template(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    with pytest.raises(CalibrationError, match="line 1 has `messages`, but the model's tokenizer has no chat template"):
        read_windows(bare, tmp_path / "a.jsonl", samples=1, seqlen=2)


@pytest.mark.parametrize("source", ["missing.txt", "./missing", "/missing/folder/", "a/b/c", "missing.jsonl"])
def test_a_missing_file_is_no_data_set(source: str, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(CalibrationError, match="does not exist"):
        read_windows(tokenizer, source, samples=1, seqlen=2)


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "broken link", "folder"])
@pytest.mark.parametrize("within", [False, True], ids=["itself", "in a folder"])
def test_what_is_no_regular_file_is_not_read(
    kind: str, within: bool, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """A pipe that nobody writes held the command up for ever, and /dev/zero never ends."""
    path = tmp_path / "a.txt"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(tmp_path):
                server.bind("a.txt")
        case "folder":
            path.mkdir()
        case _:
            path.symlink_to("/dev/zero" if kind == "device" else "nowhere")
    expected = (
        "does not exist|contains no" if not within and kind in ("broken link", "folder") else "not a regular file"
    )
    with pytest.raises(CalibrationError, match=expected):
        read_windows(tokenizer, tmp_path if within else path, samples=1, seqlen=2)


def test_a_text_to_measure_on_is_no_data_set() -> None:
    """A mistyped `--text heldout` was taken for one, and answered with advice on `--calibration`."""
    with pytest.raises(CalibrationError, match=r"--text heldout does not exist\. Pass a \.txt or \.jsonl file"):
        text_files("heldout", "--text")


def test_an_empty_folder_is_named(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"contains no \.txt or \.jsonl file"):
        read_windows(tokenizer, tmp_path, samples=1, seqlen=2)


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="the message is about its absence")
@pytest.mark.parametrize("source", [None, "owner/name:config:train", "wikitext"])
def test_data_sets_say_what_to_install(source: str | None, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(CalibrationError, match=r'pip install "datasets.*--calibration'):
        read_windows(tokenizer, source, samples=1, seqlen=2)


def test_tokens_the_model_does_not_know_are_named() -> None:
    check_vocabulary(torch.tensor([[0, 95]]), 96)
    with pytest.raises(CalibrationError, match="token id 96, but the model's vocabulary has 96"):
        check_vocabulary(torch.tensor([[0, 96]]), 96)


def test_crops_are_those_of_the_code_of_gptq(tokenizer: PreTrainedTokenizerFast) -> None:
    """Its `get_c4`, written out: the seed 0, a random document longer than a window, a random place in it."""
    rows = ["x" * length + str(length) for length in range(3, 40)]
    random.seed(0)
    expected = []
    for _ in range(12):
        while True:
            i = random.randint(0, len(rows) - 1)
            encoded = ids(tokenizer, rows[i])
            if len(encoded) > 20:
                break
        i = random.randint(0, len(encoded) - 20 - 1)
        expected.append(encoded[i : i + 20])
    assert crops(tokenizer, rows, 12, 20, random.Random(0)) == expected
    assert crops(tokenizer, rows, 3, 20, random.Random(0)) == expected[:3]


def beginning(tokenizer: PreTrainedTokenizerFast, single: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the same vocabulary with a template around every text."""
    changed = copy.deepcopy(tokenizer)
    changed.add_special_tokens({"bos_token": "<|begin|>"})
    named = [(token, changed.convert_tokens_to_ids(token)) for token in ("<|begin|>", "<|end|>")]
    changed.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=named)
    return changed


@pytest.mark.parametrize(
    ("single", "before"), [("<|begin|> $A", 1), ("<|begin|> <|end|> $A <|end|>", 2), ("$A <|end|>", 0), ("$A", 0)]
)
def test_windows_begin_as_the_tokenizer_begins_a_text(
    tokenizer: PreTrainedTokenizerFast, single: str, before: int
) -> None:
    """T5's tokenizer sets a token after every text instead."""
    made = beginning(tokenizer, single)
    first = tokens_before(made)
    assert first == tuple(made("a")["input_ids"][:before])
    frame, plain = frame_of(made, "auto", encoder=False), ids(made, TEXT)
    windows, step = read_windows(made, [TEXT], samples=3, seqlen=20, frame=frame), 20 - before
    assert windows.tolist() == [[*first, *plain[step * n : step * (n + 1)]] for n in range(3)]
    assert frame_of(made, "none", encoder=False) == Frame()


def test_a_tokenizer_that_drops_a_letter_begins_texts_all_the_same(tokenizer: PreTrainedTokenizerFast) -> None:
    """As where the vocabulary has only capital letters, and no token for the unknown."""
    made = beginning(tokenizer, "<|begin|> $A")
    made.backend_tokenizer.normalizer = normalizers.Replace("a", "")
    assert tokens_before(made) == (made.bos_token_id,)


def test_a_first_token_that_the_text_has_itself_is_not_repeated(tokenizer: PreTrainedTokenizerFast) -> None:
    """As chat templates write it: llama.cpp warns of two."""
    made = beginning(tokenizer, "<|begin|> $A")
    frame, begin = frame_of(made, "auto", encoder=False), made.bos_token_id
    windows = read_windows(made, ["<|begin|>" + TEXT], samples=2, seqlen=20, frame=frame)
    assert windows.tolist() == [[begin, *ids(made, TEXT)[:19]], [begin, *ids(made, TEXT)[19:38]]]


def test_documents_that_are_all_too_short_for_a_crop_are_given_up(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nearplane.calibration.crops.MAX_DRAWS", MAX_DRAWS // 100)
    with pytest.raises(CalibrationError, match="None of 100 documents drawn from c4 has more than 20 tokens"):
        crops(tokenizer, ["abc", "x" * 20], 1, 20, random.Random(0))

"""The page of a comparison: every row, the texts with their differences, and nothing that another file has to bring."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel

import nearplane
from checkpoints import save_part_of_the_demo
from families import add_tokenizer
from nearplane import Calibration, RecipeError
from nearplane.cli.app import app
from nearplane.demo import CALIBRATION, HELD_OUT
from nearplane.verbs import compare as comparison
from nearplane.verbs.compare import ORIGINAL_METHOD, Row
from nearplane.verbs.compare_page import marked, write_page
from nearplane.verbs.next_choices import NextChoice

TOKENS = Calibration(calibration=str(CALIBRATION), samples=4, seqlen=64)
PROMPT = "A function <returns> a list & "
BITS = (4.25, 2.25)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one block of the demo model: real weights and a real tokenizer."""
    return save_part_of_the_demo(tmp_path_factory.mktemp("models") / "small", blocks=1)


@pytest.fixture(scope="module")
def rows(small: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    options = {"calibration": TOKENS, "methods": ("rtn-mse", "rtn-huffman"), "samples": 2, "prompt": PROMPT}
    return list(nearplane.compare(small, BITS, text=HELD_OUT, keep=tmp_path_factory.mktemp("kept"), **options))


@pytest.fixture(scope="module")
def page(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page") / "out.html"
    write_page(rows, out, prompt=PROMPT)
    return out.read_text(encoding="utf-8")


def plain(html: str) -> str:
    """Return the text of HTML without tags."""
    return unescape(re.sub(r"<[^>]+>", "", html))


def test_every_checkpoint_writes_what_generate_says(rows: list[Row], small: Path) -> None:
    """Those with Huffman codes from memory, where no folder holds them."""
    assert all(row.written for row in rows)
    for row in (rows[0], next(row for row in rows if row.method == "rtn-mse" and row.asked == BITS[1])):
        assert row.written == nearplane.generate(row.folder or small, PROMPT, tokens=100)


def test_the_page_has_every_row_and_every_text(page: str, rows: list[Row]) -> None:
    cells = [plain(cell) for cell in re.findall(r"<td>(.*?)</td>", page)]
    assert len(cells) == 8 * len(rows)
    assert [cells[1 + 8 * index] for index in range(len(rows))] == [row.method for row in rows]
    prompt, first, *texts = re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)
    assert (plain(prompt), plain(first)) == (PROMPT, rows[0].written)
    assert "<mark" not in first
    assert [plain(text) for text in texts[1::2]] == [row.written for row in rows[1:]]
    for row, text in zip(rows[1:], texts[::2], strict=True):
        assert plain(text).replace("(end)", "") == rows[0].written, "what is marked is the original's text"
        assert text.count("<mark") == sum(choice.other is not None for choice in row.choices)
        assert f"{text.count('<mark')} of {len(rows[0].token_ids)} next tokens differ" in page
        assert ("<mark" in text) == (row.written != rows[0].written)


def test_each_choice_is_made_behind_the_tokens_of_the_original(rows: list[Row], small: Path) -> None:
    """So texts that part at a near tie do not look broken from there on."""
    tokenizer = AutoTokenizer.from_pretrained(small)
    row = next(row for row in rows if row.method == "rtn-mse" and row.asked == BITS[1])
    network = nearplane.load(row.folder)
    ids = list(tokenizer(PROMPT)["input_ids"])
    for token, (piece, other) in zip(rows[0].token_ids, row.choices, strict=True):
        chosen = int(network(torch.tensor([ids])).logits[0, -1].argmax())
        assert (chosen == token) == (other is None)
        if other is not None:
            assert tokenizer.decode([*ids, chosen]) == tokenizer.decode(ids) + other
        assert tokenizer.decode([*ids, token], skip_special_tokens=True) == (
            tokenizer.decode(ids, skip_special_tokens=True) + piece
        )
        ids.append(token)
    assert 0 < sum(other is not None for _, other in row.choices) < len(row.choices)


def test_every_measured_row_is_a_mark_of_the_figure(page: str, rows: list[Row]) -> None:
    (figure,) = re.findall(r'<div class="plot".*?</div>', page, re.DOTALL)
    titles = [title.text or "" for title in ElementTree.fromstring(figure).iter("title")]
    assert len(titles) == len(rows) - 1
    assert {title.partition(":")[0] for title in titles} == {f"{r.method} at {r.asked:g} bits" for r in rows[1:]}


def test_the_page_needs_no_other_file_and_suits_phones_and_dark(page: str) -> None:
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)=\"(?!data:|#)", page)
    assert "<script></script>" in page
    assert 'name="viewport" content="width=device-width' in page
    assert "prefers-color-scheme: dark" in page


def test_what_is_marked_says_what_comes_instead() -> None:
    choices = [NextChoice("one"), NextChoice(" <b>", ' "2"'), NextChoice("", "\ufffd"), NextChoice(" three", "")]
    assert marked([*choices, NextChoice("", " more")]) == (
        'one<mark title="writes &#x27; &quot;2&quot;&#x27;"> &lt;b&gt;</mark>'
        '<mark title="writes a part of another letter">\ufffd</mark>'
        '<mark title="ends here"> three</mark><mark title="writes &#x27; more&#x27;">(end)</mark>'
    )


def test_a_row_that_failed_has_its_note_and_no_mark(tmp_path: Path) -> None:
    rows = [
        Row(model="a/<m>", method=ORIGINAL_METHOD, rate=16.0, perplexity=9.0, kl=0.0),
        Row(model="a/<m>", method="nearplane", asked=2.0, note="no <room>"),
    ]
    write_page(rows, tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text()
    assert "nearplane at 2 bits: no &lt;room&gt;" in page
    assert "<figure" not in page
    assert "<m>" not in page
    write_page(rows[:1], tmp_path / "out.html")  # a page of a comparison is replaced
    assert "&lt;room&gt;" not in (tmp_path / "out.html").read_text()


def test_the_command_writes_the_page(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", small, "--bits", 4.25, "--methods", "rtn-mse", "--text", HELD_OUT, "--eval-samples", 1]
    words += ["--eval-seqlen", 32, "--html", tmp_path / "out.html", "--prompt", "The list"]
    app([*map(str, words)], exit_on_error=False, result_action="return_value")
    assert "rtn-mse" in capsys.readouterr().out
    assert "rtn-mse at 4.25 bits</h3>" in (tmp_path / "out.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--html", "{tmp}/page.txt"),
            r"page.txt cannot be written as a page; expected the name of a file that ends in",
        ),
        (("--html", "{tmp}/mine.html"), r"mine.html exists and is not a page of nearplane compare"),
        (("--html", "{tmp}/mine.html/page.html"), r"mine.html"),
        (("--prompt", "Once"), r"--prompt is for the page of --html"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_before_the_work(
    words: tuple[str, ...], said: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.html").write_text("<html>mine</html>")
    monkeypatch.setattr(comparison, "open_model", None)
    shown = [word.format(tmp=tmp_path) for word in words]
    with pytest.raises(nearplane.NearplaneError, match=said):
        app(
            ["compare", str(small), "--bits", "4.25", "--text", str(HELD_OUT), *shown],
            exit_on_error=False,
            result_action="return_value",
        )
    assert (tmp_path / "mine.html").read_text() == "<html>mine</html>"


@pytest.mark.parametrize(
    ("prompt", "said"), [("", "The prompt has no tokens"), ("word " * 2000, "maximum length is 1024")]
)
def test_a_prompt_that_cannot_be_continued_is_refused_before_the_work(
    prompt: str, said: str, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "_rows", None)
    with pytest.raises(RecipeError, match=said):
        nearplane.compare(small, BITS, text=HELD_OUT, calibration=TOKENS, methods=("rtn-mse",), prompt=prompt)


def test_an_encoder_is_not_asked_to_write(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(**sizes, vocab_size=768)).save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    with pytest.raises(RecipeError, match="an encoder, which predicts no tokens"):
        nearplane.compare(tmp_path, BITS, text=HELD_OUT, calibration=TOKENS, methods=("rtn-mse",), prompt="One")

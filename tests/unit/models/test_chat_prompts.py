"""Prompts of two models are compared on conversations of many kinds, and a difference is said in words, not refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import nearplane
from checkpoints import save_part_of_the_demo
from families import add_tokenizer
from nearplane.demo import CALIBRATION, HELD_OUT
from nearplane.models.chat_prompts import CONVERSATIONS, other_prompts, rendered

PLAIN = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if tools %}[{{ tools | tojson }}]{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITHOUT_TOOLS = PLAIN.replace("{% if tools %}[{{ tools | tojson }}]{% endif %}", "")
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}" + PLAIN


def with_template(folder: Path, template: str | None) -> PreTrainedTokenizerBase:
    folder.mkdir()
    add_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    return tokenizer


def test_there_are_twelve_conversations_with_tools_systems_and_turns(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path / "one", PLAIN)
    prompts = [rendered(tokenizer, name) for name in CONVERSATIONS]
    assert len(prompts) == len(set(prompts)) == 12
    assert None not in prompts
    assert sum("tools" in options for _, options in CONVERSATIONS.values()) == 4
    assert sum(messages[0]["role"] == "system" for messages, _ in CONVERSATIONS.values()) == 3


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (PLAIN, PLAIN, ""),
        (None, None, ""),
        (PLAIN, PLAIN.replace("tojson", "tojson()"), ""),  # another text, the same prompts
        (PLAIN, None, "one has a chat template and two has none"),
        (None, PLAIN, "two has a chat template and one has none"),
        (PLAIN, WITHOUT_TOOLS, "one and two render 4 of 12 conversations into different prompts (a tool, two tools and"),
        (PLAIN, WITHOUT_TOOLS, "Of 'a tool': '[[{"),
        (STRICT, PLAIN, "Of 'a system message': one refuses it"),
        (PLAIN, PLAIN.replace("<assistant>", "<model>"), "where two has 'model>'"),
    ],
)  # fmt: skip
def test_the_first_difference_is_said(first: str | None, second: str | None, said: str, tmp_path: Path) -> None:
    tokenizers = (with_template(tmp_path / name, template) for name, template in (("1", first), ("2", second)))
    found = other_prompts("one", "two", *tokenizers)
    assert said in found
    assert bool(said) == bool(found)


def test_a_template_that_does_not_end_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*args: object, **words: object) -> str:
        raise TimeoutError("it does not end within 10 seconds")

    first, second = (with_template(tmp_path / name, PLAIN) for name in ("1", "2"))
    monkeypatch.setattr(second, "apply_chat_template", late)
    assert other_prompts("one", "two", first, second).endswith("cannot be compared: it does not end within 10 seconds.")


def test_evaluate_and_verify_say_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`evaluate` goes on, as a template may have been changed on purpose."""
    model = save_part_of_the_demo(tmp_path / "model", blocks=1)
    (model / "chat_template.jinja").write_text(PLAIN)
    nearplane.quantize(model, tmp_path / "out", calibration=str(CALIBRATION), samples=32, seqlen=64, bits=4)
    again = {"against": model, "device": "cpu"}
    nearplane.evaluate(tmp_path / "out", HELD_OUT, samples=1, seqlen=32, **again)
    assert "conversations" not in caplog.text
    (tmp_path / "out" / "chat_template.jinja").write_text(WITHOUT_TOOLS)
    with caplog.at_level(logging.WARNING):
        nearplane.evaluate(tmp_path / "out", HELD_OUT, samples=1, seqlen=32, **again)
        assert caplog.text.count("render 4 of 12 conversations into different prompts") == 1
        verified = nearplane.verify(tmp_path / "out", calibration=str(CALIBRATION), **again)
    assert {fault.where for fault in verified.faults} == {"chat_template.jinja", "nearplane.json"}, (
        "verify has all files as they were written"
    )
    assert caplog.text.count("render 4 of 12 conversations into different prompts") == 2

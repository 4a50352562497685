"""The text of a row of a jsonl file or of a data set, which may be a chat."""

from __future__ import annotations

import json
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from nearplane.errors import CalibrationError, first_line
from nearplane.system.time_limit import time_limit

BESIDE_MESSAGES = ("tools", "documents", "chat_template_kwargs")  # of a row, as objects or as their JSON


def text_of_row(row: Any, place: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a row; a chat is formatted by the tokenizer's template, which also gets `BESIDE_MESSAGES`."""
    match row:
        case {"text": str(text)}:
            return unicode_text(text, place)
        case {"messages": list()} if getattr(tokenizer, "chat_template", None) is None:
            raise CalibrationError(
                f"{place} has `messages`, but the model's tokenizer has no chat template. Pass lines with `text` instead."
            )
        case {"messages": list(messages)}:
            try:
                beside = {name: row[name] for name in BESIDE_MESSAGES if row.get(name)}
                beside = {name: json.loads(each) if isinstance(each, str) else each for name, each in beside.items()}
                options = beside.pop("chat_template_kwargs", {})
                with time_limit():
                    text = str(tokenizer.apply_chat_template(messages, tokenize=False, **beside, **options))
            except Exception as error:  # templates are programs and raise anything
                raise CalibrationError(
                    f"{place}: the chat template cannot be applied ({first_line(error)})."
                ) from error
            return unicode_text(text, place)
    raise CalibrationError(
        f'{place} has neither `text` (a string) nor `messages` (a list). Expected for example {{"text": "some text"}}.'
    )


def unicode_text(text: str, place: str) -> str:
    """Return a text, or refuse it if it has half a surrogate pair, which no tokenizer takes."""
    if not text.isascii() and re.search("[\ud800-\udfff]", text):
        raise CalibrationError(f"{place} has half a surrogate pair, which is not valid Unicode. Correct the text.")
    return text

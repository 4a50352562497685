"""Whether two models render conversations into the same prompts; public GGUF files often carry another chat template."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from nearplane.errors import NearplaneError, first_few
from nearplane.models.pretrained import tokenizer_of
from nearplane.system.files import sha256
from nearplane.system.paths import TEMPLATES, TOKENIZERS, is_listed
from nearplane.system.time_limit import time_limit

SHOWN = 40  # letters of both prompts behind the place where they part
log = logging.getLogger(__name__)


def _turns(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    """Return messages of user and assistant in turn, behind a system message."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]


def _called(name: str, arguments: dict[str, Any], result: str | None = None) -> list[dict[str, Any]]:
    """Return the messages of a tool call, and of its result."""
    call = {"id": "abc123def", "type": "function", "function": {"name": name, "arguments": arguments}}
    asked = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    return asked + [{"role": "tool", "tool_call_id": call["id"], "name": name, "content": result}] * (
        result is not None
    )


def _tool(name: str, about: str, **properties: str) -> dict[str, Any]:
    """Return the description of a tool whose arguments have these types."""
    schema = {"type": "object", "properties": {key: {"type": of, "description": key} for key, of in properties.items()},
              "required": [*properties]}  # fmt: skip
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


WEATHER = _tool("get_weather", "Get the weather of a city.", city="string", days="integer")
SEARCH = _tool("search", "Search a text.", query="string")
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one question": (_turns("How many legs has a spider?"), {}),
    "a system message": (_turns("Hello!", system="Answer in one sentence."), {}),
    "two turns": (_turns("Hi", "Hello. What can I do?", "Name a prime."), {}),
    "many turns": (_turns("1", "2", "3", "4", "5", "6", "7"), {}),
    "many turns behind a system message": (_turns("1", "2", "3", "4", "5", system="Count."), {}),
    "lines and code": (_turns("What does this do?\n\n```python\nfor i in range(3):\n    print(i)\n```\n"), {}),
    "spaces around": (_turns("  a  ", "  b\n", "\nc "), {}),
    "an answer to be continued": (_turns("Write a line.", "The sun"), {"continue_final_message": True}),
    "a tool": (_turns("What is the weather in Oslo?"), {"tools": [WEATHER]}),
    "two tools and a system message": (_turns("Find it.", system="Use tools."), {"tools": [WEATHER, SEARCH]}),
    "a tool call": (_turns("Weather?") + _called("get_weather", {"city": "Oslo", "days": 2}), {"tools": [WEATHER]}),
    "the result of a tool": (
        _turns("Weather?") + _called("get_weather", {"city": "Oslo", "days": 2}, '{"degrees": 3}'), {"tools": [WEATHER]}
    ),
}  # fmt: skip
"""Twelve conversations by name: messages, and options of `apply_chat_template`."""


def rendered(tokenizer: PreTrainedTokenizerBase, name: str) -> str | None:
    """Return the prompt of one of the `CONVERSATIONS`; None if the chat template refuses it.

    Raises:
        TimeoutError: The template does not end.
    """
    messages, options = CONVERSATIONS[name]
    generates = messages[-1]["role"] != "assistant"
    try:
        with time_limit():
            return str(
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generates, **options)
            )
    except (NearplaneError, TimeoutError):
        raise
    except Exception:  # templates raise errors of any class for conversations that they do not take
        return None


def say_other_prompts(folders: Mapping[str, Path], *, trust_remote_code: bool) -> None:
    """Log a warning if two models render conversations into different prompts.

    Args:
        folders: The folders of the models, by their names in messages.
        trust_remote_code: Whether code that comes with the tokenizers may run.

    Raises:
        ModelError: A tokenizer cannot be loaded.
    """
    listed = (*TOKENIZERS, *TEMPLATES)
    files = [
        {name: sha256(path) for path in folder.rglob("*") if path.is_file()
         and is_listed(name := path.relative_to(folder).as_posix(), listed)}
        for folder in folders.values()
    ]  # fmt: skip
    without = any(not any(is_listed(name, TOKENIZERS) for name in names) for names in files)
    if len(files) < 2 or without or files[0] == files[1]:
        return
    tokenizers = [tokenizer_of(folder, trust_remote_code=trust_remote_code) for folder in folders.values()]
    if sentence := other_prompts(*folders, *tokenizers):
        log.warning("%s", sentence)


def other_prompts(name: str, other: str, tokenizer: PreTrainedTokenizerBase, others: PreTrainedTokenizerBase) -> str:
    """Return a sentence if two tokenizers render conversations into different prompts, else nothing.

    Args:
        name, other: Names of the models in the sentence.
        tokenizer, others: Their tokenizers.
    """
    templates = [bool(getattr(each, "chat_template", None)) for each in (tokenizer, others)]
    if not all(templates):
        if not any(templates):
            return ""
        has, lacks = (name, other) if templates[0] else (other, name)
        return f"{has} has a chat template and {lacks} has none: programs give them different prompts in a chat."
    try:
        pairs = {each: (rendered(tokenizer, each), rendered(others, each)) for each in CONVERSATIONS}
    except TimeoutError as error:
        return f"The chat templates of {name} and {other} cannot be compared: {error}."
    unlike = {each: pair for each, pair in pairs.items() if pair[0] != pair[1]}
    if not unlike:
        return ""
    first, (ours, theirs) = next(iter(unlike.items()))
    if ours is None or theirs is None:
        how = f"{name if ours is None else other} refuses it"
    else:
        pairs_of_letters = enumerate(zip(ours, theirs, strict=False))
        same = next((at for at, (a, b) in pairs_of_letters if a != b), min(len(ours), len(theirs)))
        how = f"{ours[same : same + SHOWN]!r} in {name} where {other} has {theirs[same : same + SHOWN]!r}"
    return (
        f"{name} and {other} render {len(unlike)} of {len(pairs)} conversations into different prompts "
        f"({first_few([*unlike])}). Of {first!r}: {how}. Programs that use the chat template give them different prompts. Copy "
        f"the chat template of the original, unless it was changed on purpose."
    )

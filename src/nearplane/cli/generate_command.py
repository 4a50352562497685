"""The command `nearplane generate`, which prints text while a model writes it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from nearplane.calibration.text_files import check_named
from nearplane.cli.flags import DeviceFlag, Flat, Hidden, Switch
from nearplane.cli.printing import as_json, opening
from nearplane.cli.streams import refuse_unread
from nearplane.errors import printable
from nearplane.system.sizes import counted, size_text
from nearplane.verbs.generate_request import GenerateRequest, Say

if TYPE_CHECKING:
    from nearplane.verbs.generate import Continuation

DIFFERENT_LETTERS = 24  # characters quoted of each of two texts from where they differ


class GenerateFlags(GenerateRequest):
    """Flags of `nearplane generate`."""

    source: Annotated[str, Parameter(name="model")]
    head: Literal["int8"] | None
    say: Annotated[Say, Hidden]
    device: DeviceFlag


def generate(request: Annotated[GenerateFlags, Flat], *, compare: str | None = None, json: Switch = False) -> None:
    """Continue the text PROMPT with MODEL, or let a chat model answer it; print PROMPT and the new text piece by piece.

    If the tokenizer of MODEL has a chat template, PROMPT is the message of a user; else it is continued as it is.
    Afterwards the error stream says the time to the first token, the tokens per second, and the memory of the weights.
    A GGUF runs in llama.cpp if llama-cpp-python is installed, else in transformers, as all other models do.

    Args:
        compare: Another model, for example the original, whose text is printed below, and where the two first differ.
            It is loaded once MODEL has left the memory.
        json: Print the texts with their times as JSON, once all are written.
    """
    request.check()
    model, prompt = request.source, request.prompt
    check_named(model, compare)
    opening(model)
    from nearplane import generate as run
    from nearplane.verbs.generate import say_other_tokens

    if compare is not None:
        say_other_tokens(model, compare, prompt, trust_remote_code=request.trust_remote_code)
    texts = []
    for name in [model] if compare is None else [model, compare]:
        before = prompt if compare is None else f"── {name}\n{prompt}"
        head = request.head if name == model else None
        aloud = partial(print_piece, iter([before]))
        text = run(replace(request, source=name, head=head, say=_unsaid if json else aloud))
        texts.append(text)
        if not json:
            print(flush=True)
            log_speed(text)
    if json:
        named = zip((model, compare), texts, strict=False)
        print(as_json([{"model": name, "prompt": prompt, "text": str(text)} | vars(text) for name, text in named]))
    elif compare is not None:
        print(first_difference(*texts))


def _unsaid(piece: str) -> None:
    """Print nothing of a piece of text."""


def print_piece(before: Iterator[str], piece: str) -> None:
    """Print a piece of generated text at once, with control characters escaped except line ends and tabs.

    Args:
        before: Text to print before the first piece, as it is.
        piece: Next piece of the text.

    Raises:
        Unread: The output is a pipe that nobody reads any more.
    """
    escaped = "".join(sign if sign in "\n\t" else printable(sign) for sign in piece)
    print(next(before, "") + escaped, end="", flush=True)
    refuse_unread()


def log_speed(text: Continuation) -> None:
    """Log how fast a text was generated, and what its model takes."""
    rate = text.tokens_per_second
    logging.getLogger("nearplane").info(
        "first token after %.2f s%s; weights take %s",
        text.first_token_seconds,
        "" if rate is None else f", then {rate:.1f} tokens per second",
        size_text(text.weight_bytes),
    )


def first_difference(text: str, other: str) -> str:
    """Return where two generated texts part, with the words that follow there, as a line."""
    if text == other:
        return "── both texts are the same"
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    word = text.rfind(" ", 0, same) + 1
    ends = (repr(each[word : same + DIFFERENT_LETTERS]) for each in (text, other))
    return f"── the same for {counted(same, 'character')}, then {' instead of '.join(ends)}"

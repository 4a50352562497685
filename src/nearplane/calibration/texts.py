"""Calibration tokens: from a text file, a jsonl file, a folder of them, or a named data set.

Knows tokenizers and files; nothing of networks. Files are read in their order, data sets are shuffled by a seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nearplane.errors import CalibrationError, first_line
from nearplane.models.pretrained import in_a_sentence
from nearplane.system.paths import SUFFIXES, check_there

DEFAULT_DATASET = "HuggingFaceFW/fineweb-edu:sample-10BT:train"
LETTERS = 6  # of a token, more than most have
MARGIN = 10_000  # letters behind a token that may still have a say in it: no word is as long
SHUFFLED_ROWS = 10_000  # rows of a streamed data set that are held to draw from


def read_windows(
    tokenizer: PreTrainedTokenizerBase,
    source: str | Path | Sequence[str] | None,
    *,
    samples: int,
    seqlen: int,
    seed: int = 0,
    between: tuple[int, ...] = (),
) -> Tensor:
    """Read the first `samples` windows of `seqlen` tokens; fewer if the text ends before.

    A text file is one document, taken raw and tokenized whole; every line of a jsonl file (`text`, or `messages` for
    the chat template) and every row of a data set is one. Documents are joined with the end-of-sequence token, if there
    is one, and cut into windows that do not overlap. No other special tokens are added.

    Args:
        tokenizer: of the model.
        source: a .txt or .jsonl file, a folder of them, or a data set name[:config][:split]; None: `DEFAULT_DATASET`. Or the
            documents themselves.
        samples, seqlen: windows, and tokens of each.
        seed: of the shuffle of a data set; files are not shuffled.
        between: two tokens, counted in `seqlen`, that every window begins and ends with, see `around`.

    Returns:
        (windows, seqlen) int64.

    Raises:
        CalibrationError: there is no such text, it is malformed, or it is shorter than one window.
    """
    if seqlen <= len(between):
        raise CalibrationError(
            f"Windows of {seqlen} tokens hold nothing but the two that each begins and ends with. Take longer ones."
        )
    seqlen -= len(between)
    ids: list[int] = []
    joint = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    wanted = samples * seqlen
    for text in _documents(tokenizer, DEFAULT_DATASET if source is None else source, seed):
        if ids:
            ids += joint
        with in_a_sentence("The tokenizer of the model cannot tokenize the text; fetch its files again"):
            ids += _first_ids(tokenizer, text, wanted - len(ids))
        if len(ids) >= wanted:
            break
    windows = min(len(ids) // seqlen, samples)
    if not windows:
        where = f"The list of {len(source)} texts" if isinstance(source, tuple | list) else source or DEFAULT_DATASET
        raise CalibrationError(
            f"{where} holds {len(ids)} tokens where one window needs {seqlen}. "
            f"Pass a longer text with --calibration, or shorter windows with --seqlen."
        )
    found = torch.tensor(ids[: windows * seqlen], dtype=torch.int64).view(windows, seqlen)
    edges = [torch.full((windows, 1), edge) for edge in between]
    return torch.cat([edges[0], found, edges[1]], 1) if edges else found


def around(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the two tokens that encoders expect a text between ([CLS] and [SEP]); none where the tokenizer has no such."""
    found = (tokenizer.cls_token_id, tokenizer.sep_token_id)
    return found if all(isinstance(token, int) for token in found) else ()


def _first_ids(tokenizer: PreTrainedTokenizerBase, text: str, wanted: int) -> list[int]:
    """Return the ids of a text, at least `wanted` of them if it has so many: no more of a long text is tokenized than that takes.

    Which token a letter is in depends on what follows it, but not on what is `MARGIN` letters further on: of a part of the text,
    only the tokens count that end so far before its end.
    """
    length = wanted * LETTERS + MARGIN
    while tokenizer.is_fast and length < len(text):
        found = tokenizer(text[:length], add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        whole = next((n for n, (_, end) in enumerate(found["offset_mapping"]) if end > length - MARGIN), 0)
        if whole >= wanted:
            return list(found["input_ids"][:whole])
        length *= 2
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def check_vocabulary(tokens: Tensor, size: int) -> None:
    """Refuse tokens that a model with `size` embeddings cannot look up.

    Raises:
        CalibrationError: names the token.
    """
    if (largest := int(tokens.max())) >= size:
        raise CalibrationError(
            f"The text has the token id {largest}, the model a vocabulary of {size} (ids 0 to {size - 1}). The two do not belong "
            f"together; check the tokenizer files in the model's folder, or the token ids that were given."
        )


def check_start(tokens: Tensor, start: int | None, called: str) -> None:
    """Refuse tokens that all begin with the one with which a decoder is started anyway.

    Args:
        tokens: (windows, seqlen) what is said in sound.
        start: that token; None where there is none.
        called: what the model is called.

    Raises:
        CalibrationError: names the token.
    """
    if start is not None and bool((tokens[:, 0] == start).all()):
        raise CalibrationError(
            f"All token_ids begin with {start}, with which the decoder of {called} is started anyway. Pass them without it, as for "
            f"labels=."
        )


def _documents(tokenizer: PreTrainedTokenizerBase, source: str | Path | Sequence[str], seed: int) -> Iterator[str]:
    """Yield the texts of a file, a folder, a data set or a list, one by one."""
    if not isinstance(source, str | Path):
        yield from source
        return
    check_there(source)
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not files:
            raise CalibrationError(f"The folder {source} holds no {' or '.join(SUFFIXES)} file to calibrate on.")
        for file in files:
            yield from _documents_in(file, tokenizer)
    elif path.exists():
        yield from _documents_in(path, tokenizer)
    else:
        for number, row in enumerate(_rows(str(source), seed), 1):
            yield _text(row, f"{source}, row {number}", tokenizer)


def _documents_in(file: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield the documents of one file."""
    if file.suffix not in SUFFIXES:
        raise CalibrationError(f"{file} is no {' or '.join(SUFFIXES)} file; rename plain text to .txt.")
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{file} cannot be read as UTF-8 text ({error}).") from error
    if not content.strip():
        raise CalibrationError(f"{file} is empty; pass a file with text.")
    if file.suffix == ".txt":
        yield content
        return
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            place = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise CalibrationError(f"{place} is not JSON ({error}); every line holds one object.") from error
            yield _text(row, place, tokenizer)


def _text(row: Any, place: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a row, chats through the tokenizer's template."""
    match row:
        case {"text": str(text)}:
            return text
        case {"messages": list(messages)}:
            try:
                return str(tokenizer.apply_chat_template(messages, tokenize=False))
            except Exception as error:  # templates are programs of the model's makers and raise what they like
                raise CalibrationError(
                    f"{place}: the chat template cannot be applied ({first_line(error)})."
                ) from error
    raise CalibrationError(f"{place} has neither `text` (a string) nor `messages` (a list).")


def _rows(source: str, seed: int) -> Iterator[dict[str, Any]]:
    """Stream a data set of the hub, shuffled."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise CalibrationError(
            f'Reading the data set {source} needs the datasets package: pip install "nearplane[datasets]", '
            f"or pass a .txt or .jsonl file with --calibration."
        ) from error
    name, config, split = [*source.split(":"), "", ""][:3]
    try:
        rows = load_dataset(name, config or None, split=split or "train", streaming=True)
        yield from rows.shuffle(seed=seed, buffer_size=SHUFFLED_ROWS)
    except Exception as error:  # whatever the network and the readers of many formats raise
        raise CalibrationError(
            f"The data set {source} cannot be read ({first_line(error)}); pass a .txt or .jsonl file with --calibration."
        ) from error

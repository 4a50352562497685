"""Windows of tokens from a text file, a jsonl file, a folder of them, a text known by name, or a data set.

Files are read in their order; data sets are shuffled by a seed. Only data sets and named texts need a network.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nearplane.calibration.crops import CROPS, crops
from nearplane.calibration.hub_texts import CROPPED, DEFAULT_DATASET, NamedText, rows_of_set
from nearplane.calibration.text_files import text_files, text_to_measure_on
from nearplane.calibration.text_rows import text_of_row, unicode_text
from nearplane.errors import CalibrationError
from nearplane.models.pretrained import as_model_error, tokens_before
from nearplane.recipe.recipe import FirstToken

LETTERS_PER_TOKEN = 6  # guess for the first attempt; most tokens are shorter
CONTEXT_LETTERS = 10_000  # letters after a token that may still change it: longer than any word
READ_LETTERS = 1_000_000  # letters of a file that are read and looked at together


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Tokens that every window has around its text, see `frame_of`.

    Args:
        before: First tokens of every window.
        after: Last tokens of every window.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.before) + len(self.after)


def read_windows(
    tokenizer: PreTrainedTokenizerBase,
    source: str | Path | Sequence[str] | NamedText | None,
    *,
    samples: int,
    seqlen: int,
    seed: int = 0,
    frame: Frame | None = None,
) -> Tensor:
    """Read the first `samples` windows of `seqlen` tokens, or fewer if the text is shorter.

    A text file is one document, taken raw and tokenized whole; every line of a jsonl file (`text`, or `messages` for
    the chat template) and every row of a data set is one, unless it is blank. Documents are joined with the end-of-sequence
    token, if there is one, and cut into windows that do not overlap. No special tokens are added but those of `frame`.
    Windows of c4 are crops of random documents, see `crops`.

    Args:
        tokenizer: The tokenizer of the model.
        source: A .txt or .jsonl file, a folder of them, a data set name[:config][:split], a list of documents, or a named
            text, whose name alone stands for the text to measure on; None: `DEFAULT_DATASET`.
        samples, seqlen: Number of windows, and tokens per window.
        seed: Seed of the shuffle of a data set, and of the crops of c4; files are not shuffled.
        frame: Tokens at both ends of every window, counted in `seqlen`. Where the text itself begins a window with them,
            as templates of chats do, they are not repeated. None: what the tokenizer sets before a text.

    Returns:
        (windows, seqlen) int64.

    Raises:
        CalibrationError: The text is missing, malformed, or shorter than one window.
    """
    frame = frame_of(tokenizer, "auto", encoder=False) if frame is None else frame
    if seqlen <= frame.size:
        raise CalibrationError(
            f"Windows of {seqlen} tokens contain only the special tokens at their two ends. Use a larger --seqlen."
        )
    named = source if isinstance(source, NamedText) else text_to_measure_on(source)
    if named is not None and named.name == CROPPED:
        count = CROPS if samples == sys.maxsize else samples
        cropped = crops(tokenizer, named.rows(), count, seqlen - frame.size, random.Random(seed))
        windows = [[*frame.before, *crop] for crop in cropped]
    else:
        texts = _documents(tokenizer, DEFAULT_DATASET if source is None else named or source, seed)
        ids = _joined(tokenizer, texts, samples * seqlen)
        windows = [*islice(_cut(ids, seqlen - len(frame.after), frame.before), samples)]
        if not windows:
            listed = f"The list of {len(source)} texts" if isinstance(source, tuple | list) else None
            where = listed or (named.name if named is not None else source or DEFAULT_DATASET)
            raise CalibrationError(
                f"{where} has {len(ids)} tokens, but a window has {seqlen - frame.size}. Pass a longer text, or use shorter "
                f"windows with --seqlen."
            )
    return torch.tensor([[*window, *frame.after] for window in windows], dtype=torch.int64)


def _cut(ids: Sequence[int], length: int, before: tuple[int, ...]) -> Iterator[list[int]]:
    """Yield windows of `length` ids in their order, each of which begins with the tokens `before`."""
    start = 0
    while True:
        added = () if tuple(ids[start : start + len(before)]) == before else before
        end = start + length - len(added)
        if end > len(ids):
            return
        yield [*added, *ids[start:end]]
        start = end


def _joined(tokenizer: PreTrainedTokenizerBase, texts: Iterator[str | Path], needed: int) -> list[int]:
    """Return the ids of texts joined with the end-of-sequence token, until at least `needed` are there."""
    ids: list[int] = []
    separator = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    for text in texts:
        if ids:
            ids += separator
        with as_model_error("The model's tokenizer cannot tokenize the text (fetch the model again)"):
            ids += _first_ids(tokenizer, text, needed - len(ids))
        if len(ids) >= needed:
            break
    return ids


def read_documents(tokenizer: PreTrainedTokenizerBase, source: str | Path | Sequence[str]) -> Iterator[str]:
    """Yield the documents of a text one by one, see `read_windows`."""
    texts = _documents(tokenizer, text_to_measure_on(source) or source, seed=0)
    return (text if isinstance(text, str) else _read(text) for text in texts)


def frame_of(tokenizer: PreTrainedTokenizerBase, first_token: FirstToken, *, encoder: bool) -> Frame:
    """Return the tokens that a network expects around every window.

    Encoders expect [CLS] and [SEP]. Other networks were trained on texts that begin as their tokenizer begins them.

    Args:
        tokenizer: The tokenizer of the model.
        first_token: Whether windows begin with `tokens_before`; encoders have their tokens in any case.
        encoder: Whether the network has an encoder, see `is_framed`.
    """
    if encoder:
        first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
        return Frame(before=(first,), after=(last,)) if isinstance(first, int) and isinstance(last, int) else Frame()
    return Frame() if first_token == "none" else Frame(before=tokens_before(tokenizer))


def _first_ids(tokenizer: PreTrainedTokenizerBase, text: str | Path, needed: int) -> list[int]:
    """Return at least the first `needed` ids of a text, or all; of a long text only the beginning is read and tokenized.

    The token of a letter depends on the letters after it, but on none more than `CONTEXT_LETTERS` away. So of a part of
    the text, only tokens that end this far before the end of the part are used.
    """

    def beginning(letters: int | None) -> str:
        return text[:letters] if isinstance(text, str) else _read(text, letters)

    length = needed * LETTERS_PER_TOKEN + CONTEXT_LETTERS
    while tokenizer.is_fast and len(part := beginning(length + 1)) > length:
        encoding = tokenizer(part[:length], add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        certain = next(
            (n for n, (_, end) in enumerate(encoding["offset_mapping"]) if end > length - CONTEXT_LETTERS), 0
        )
        if certain >= needed:
            return list(encoding["input_ids"][:certain])
        length *= 2
    return list(tokenizer(beginning(None), add_special_tokens=False, verbose=False)["input_ids"])


def check_vocabulary(tokens: Tensor, size: int) -> None:
    """Refuse token ids that a model with `size` embeddings does not have.

    Raises:
        CalibrationError: A token id is too large.
    """
    if (largest := int(tokens.max())) >= size:
        raise CalibrationError(
            f"The text has the token id {largest}, but the model's vocabulary has {size} tokens (ids 0 to {size - 1}). "
            f"Check the tokenizer files in the model's folder, or the token ids that you passed."
        )


def _documents(
    tokenizer: PreTrainedTokenizerBase, source: str | Path | Sequence[str] | NamedText, seed: int
) -> Iterator[str | Path]:
    """Yield the documents of a text but the blank ones, see `_texts`."""
    return (each for each in _texts(tokenizer, source, seed) if isinstance(each, Path) or each.strip())


def _texts(
    tokenizer: PreTrainedTokenizerBase, source: str | Path | Sequence[str] | NamedText, seed: int
) -> Iterator[str | Path]:
    """Yield the texts of a file, a folder, a data set or a list, one by one; rows of a named text joined by blank lines.

    A file that is one document is yielded as its path, as not all of it may be needed.
    """
    if isinstance(source, NamedText):
        yield "\n\n".join(source.rows())
        return
    if not isinstance(source, str | Path):
        for number, text in enumerate(source, 1):
            yield unicode_text(text, f"The list of {len(source)} texts, text {number},")
        return
    files = text_files(source)
    for file in files or ():
        yield from _documents_in(file, tokenizer)
    for number, row in enumerate(rows_of_set(str(source), seed) if files is None else (), 1):
        yield text_of_row(row, f"{source}, row {number}", tokenizer)


def _documents_in(file: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[str | Path]:
    """Yield the documents of one file."""
    if file.suffix == ".txt":
        yield file
        return
    empty = True
    with _opened(file) as opened:
        for number, line in enumerate(map(_without_nulls, opened), 1):
            if not line.strip():
                continue
            empty = False
            place = f"{file}, line {number}"
            try:
                row = json.loads(line.removesuffix("\n"))
            except (ValueError, RecursionError) as error:
                fault = "it nests too deep" if isinstance(error, RecursionError) else error
                raise CalibrationError(f"{place} is not JSON ({fault}). Expected one object per line.") from error
            yield text_of_row(row, place, tokenizer)
    if empty:
        raise CalibrationError(f"{file} is empty. Pass a file with text.")


def _read(file: Path, letters: int | None = None) -> str:
    """Return the first letters of a text file, or all.

    Raises:
        CalibrationError: What is read is not text, or the file has no text at all.
    """
    parts, left = list[str](), sys.maxsize if letters is None else letters
    with _opened(file) as opened:
        while left and (part := _without_nulls(opened.read(min(left, READ_LETTERS)))):
            parts.append(part)
            left -= len(part)
    text = "".join(parts)
    if left and not text.strip():
        raise CalibrationError(f"{file} is empty. Pass a file with text.")
    return text


@contextmanager
def _opened(file: Path) -> Iterator[TextIO]:
    """Open a text file whose beginning is text: a file of zeros is refused at once, whatever its size.

    Raises:
        CalibrationError: The file cannot be read as text, here or within the context.
    """
    try:
        with file.open(encoding="utf-8-sig") as opened:
            _without_nulls(opened.read(READ_LETTERS))
            opened.seek(0)
            yield opened
    except (OSError, ValueError) as error:
        advice = "" if isinstance(error, OSError) else " Expected a text file in UTF-8."
        raise CalibrationError(f"{file} cannot be read as UTF-8 text ({error}).{advice}") from error


def _without_nulls(text: str) -> str:
    """Return a text, or refuse it with a ValueError if it has null characters."""
    if "\0" in text:
        raise ValueError("it has null characters, as a text in UTF-16 or a binary file has")
    return text

"""Whether the tokenizers of two models cut text into the same tokens, as networks must that share a text."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nearplane.errors import ModelError, first_few
from nearplane.models.chat_prompts import say_other_prompts
from nearplane.models.pretrained import TOKENIZER, as_model_error, tokenizer_of, tokens_before
from nearplane.system.files import sha256
from nearplane.system.paths import TOKENIZERS, is_listed
from nearplane.system.token_lines import LINES, Cut, differing_line

OF_TOKENIZERS = (*TOKENIZERS, "*token*.py")  # names of the files that decide how text is cut
log = logging.getLogger(__name__)


def cut(tokenizer: PreTrainedTokenizerBase, *, ends: bool = False) -> Cut:
    """Return the function by which a tokenizer cuts text into token ids, with or without special tokens at the `ends`."""

    def ids(text: str) -> list[int]:
        with as_model_error("A tokenizer cannot tokenize the text (fetch its model again)"):
            return list(tokenizer(text, add_special_tokens=ends, verbose=False)["input_ids"])

    return ids


def say_unlike_its_file(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log a warning if a tokenizer cuts text otherwise than the tokenizer.json of its folder, as programs without it do.

    transformers 5.24 does so for a config.json of type qwen2, whatever else the folder says: see
    `findings/transformers-qwen2-tokenizer.sh`.
    """
    if not (folder / TOKENIZER).is_file():
        return
    with as_model_error(f"{folder / TOKENIZER} cannot be read"):
        file = PreTrainedTokenizerFast(tokenizer_file=str(folder / TOKENIZER))
    if (merging := getattr(file.backend_tokenizer, "model", None)) is not None and getattr(merging, "dropout", None):
        merging.dropout = None  # as in `tokenizer_of`
    if (difference := differing_line(cut(tokenizer), cut(file), (line.lstrip(" ") for line in LINES))) is not None:
        log.warning(
            "transformers %s reads the tokenizer of %s as %s, which cuts text otherwise than its %s: %s. Servers on transformers "
            "do the same; llama.cpp and others that read the file give the network other tokens than those of the calibration. "
            "To calibrate on those of the file, pass windows of token ids from Python.",
            *(transformers.__version__, folder, type(tokenizer).__name__, TOKENIZER, difference),
        )


def decoded(tokenizer: PreTrainedTokenizerBase, windows: Iterable[Tensor]) -> Iterator[str]:
    """Yield the text of each window of (windows, seqlen) after its first token, with the names of special tokens in it."""
    before = tokens_before(tokenizer)
    for window in windows:
        start = len(before) if tuple(window[: len(before)].tolist()) == before else 0
        yield str(tokenizer.decode(window[start:], clean_up_tokenization_spaces=False))


def check_same_tokens(folders: Mapping[str, Path], texts: Iterable[str] = (), *, trust_remote_code: bool) -> None:
    """Refuse two models whose tokenizers cut a text differently; see `other_tokens`. Other chat templates are logged.

    Raises:
        ModelError: A text has other tokens in one model than in the other, or a tokenizer cannot be loaded.
    """
    if difference := other_tokens(folders, texts, trust_remote_code=trust_remote_code):
        first, second = folders
        raise ModelError(
            f"{difference} Both must read the same tokens to be compared. Copy the tokenizer of {second} into {first}, or pass "
            f"the model from which {first} was made."
        )
    say_other_prompts(folders, trust_remote_code=trust_remote_code)


def other_tokens(folders: Mapping[str, Path], texts: Iterable[str] = (), *, trust_remote_code: bool) -> str:
    """Return a sentence if the tokenizers of two models cut a text or one of `LINES` differently, else nothing.

    If only their files, unused tokens or the special tokens around a text differ, that is logged. Folders without a tokenizer
    are not compared. Spaces at the beginning of a text are left out: SentencePiece and llama.cpp put another one before
    them, tokenizers of transformers may not.

    Args:
        folders: The folders of the models, by their names in messages.
        texts: Texts that both read.
        trust_remote_code: Whether code that comes with the tokenizers may run.

    Raises:
        ModelError: A tokenizer cannot be loaded.
    """
    hashes = [
        {path.name: sha256(path) for path in folder.iterdir() if is_listed(path.name, OF_TOKENIZERS) and path.is_file()}
        for folder in folders.values()
    ]
    if len(hashes) < 2 or not all(hashes) or hashes[0] == hashes[1]:
        return ""
    tokenizers = [tokenizer_of(folder, trust_remote_code=trust_remote_code) for folder in folders.values()]
    ours, theirs = map(cut, tokenizers)
    names = " and ".join(folders)
    if (difference := differing_line(ours, theirs, (text.lstrip(" ") for text in chain(LINES, texts)))) is not None:
        return f"{names} have different tokenizers: {difference}."
    first, second = (cut(tokenizer, ends=True)("a") for tokenizer in tokenizers)
    if first != second:
        log.warning(
            "the tokenizers of %s set different tokens before or after a text: 'a' has the ids %s in the one and %s in the "
            "other. Programs that read both give them different tokens. Copy the tokenizer of the original.",
            *(names, first, second),
        )
        return ""
    files = sorted(name for name in {*hashes[0], *hashes[1]} if hashes[0].get(name) != hashes[1].get(name))
    alike = f"cut the text and {len(LINES)} lines of many kinds into the same tokens"
    log.info("%s differ in %s, but %s", names, first_few(files), alike)
    return ""

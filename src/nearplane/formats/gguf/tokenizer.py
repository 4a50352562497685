"""Metadata of a model's tokenizer in a GGUF, from which llama.cpp splits text into tokens itself.

Three kinds of `tokenizer.json` are supported and recognized by their structure:

    bytes       BPE over bytes ("gpt2" in the file): llama.cpp has a name for the expression that splits text, `PRE`
    pieces      BPE over characters with "▁" for spaces, as in SentencePiece ("llama"): llama.cpp merges by scores of
                tokens, the negative ranks of their merges; `_scores` refuses tokenizers for which that would differ
    characters  one token per character, no merges ("t5"): with equal scores the best path consists of characters
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from nearplane.errors import RecipeError
from nearplane.system.files import read_object

FILE = "tokenizer.json"
LEAD = r"[^\r\n\p{L}\p{N}]?"
LETTERS = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{LEAD}\p{{L}}+"  # start of most expressions since 2023
COMMON_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # and their end
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PRE = {  # (expressions, whether a piece that is a token is not merged) -> name in llama.cpp
    ((GPT2,), False): "gpt-2",
    ((r"\p{N}", GPT2), False): "smollm",
    ((rf"{LETTERS}|\p{{N}}{{1,3}}|{COMMON_END}",), True): "llama-bpe",
    ((rf"{LETTERS}|\p{{N}}{{1,3}}|{COMMON_END}",), False): "dbrx",
    ((rf"{LETTERS}|\p{{N}}|{COMMON_END}",), False): "qwen2",
    ((rf"{LEAD}{UPPER}*{LOWER}+|{LEAD}{UPPER}+{LOWER}*|\p{{N}}|{SLASHES}",), True): "tekken",
    (
        (rf"{LEAD}{UPPER}*{LOWER}+{ENDINGS}|{LEAD}{UPPER}+{LOWER}*{ENDINGS}|\p{{N}}{{1,3}}|{SLASHES}",),
        False,
    ): "gpt-4o",
}
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# tokens that llama.cpp's converter treats as control tokens although they are not marked as special
CONTROL = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]")
SPACE = "▁"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


class Kind(IntEnum):
    """Kind of a token, with the numbers of llama.cpp."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Metadata of a tokenizer.

    Args:
        model: "gpt2", "llama" or "t5"; "none" without a tokenizer.
        tokens, kinds: Text and kind of the token of every row of the embeddings.
        scores: Score of every token; empty for "gpt2".
        merges: Merges as "LEFT RIGHT", for "gpt2".
        pre: Name of the expression that splits text.
        space: Whether a space is put before text; None: llama.cpp's default.
        squeeze: Whether runs of spaces become one, and spaces at the ends are removed.
    """

    model: str
    tokens: Sequence[str] = ()
    kinds: Sequence[Kind] = ()
    scores: Sequence[float] = ()
    merges: Sequence[str] = ()
    pre: str | None = None
    space: bool | None = None
    squeeze: bool = False

    def write(self, writer: Any, folder: Path) -> None:
        """Add the metadata to a `gguf.GGUFWriter`, with the folder's ids of special tokens and chat template."""
        from gguf import SpecialVocab

        writer.add_tokenizer_model(self.model)
        if self.model == "none":
            return
        writer.add_tokenizer_pre(self.pre or "default")
        writer.add_token_list(self.tokens)
        if self.scores:
            writer.add_token_scores(self.scores)
        writer.add_token_types([int(kind) for kind in self.kinds])
        if self.merges:
            writer.add_token_merges(self.merges)
        if self.space is not None:
            writer.add_add_space_prefix(self.space)
        if self.squeeze:
            writer.add_remove_extra_whitespaces(True)
        special = SpecialVocab(folder, n_vocab=len(self.tokens))
        special.add_special_token = {"bos": False, "eos": False} | special.add_special_token
        if Kind.UNKNOWN in self.kinds:
            special.special_token_ids["unk"] = self.kinds.index(Kind.UNKNOWN)
        special.add_to_gguf(writer, quiet=True)


def vocabulary(folder: Path, size: int, pre: str | None = None) -> Vocabulary:
    """Return the metadata of the tokenizer in a folder.

    Args:
        folder: The model's folder.
        size: Number of rows of the embeddings; rows without a token get placeholders.
        pre: Name of the expression that splits text; None: derived from the tokenizer's structure.

    Raises:
        RecipeError: llama.cpp is not known to split text like this tokenizer, or has no name for its expression.
    """
    if pre is not None and not NAME.fullmatch(pre):
        raise RecipeError(
            f"--pre is {pre[:40]!r}, expected the name of a pre-tokenizer of llama.cpp, like gpt-2 or llama-bpe."
        )
    if not (folder / FILE).is_file():
        if any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.model", "vocab.json")):
            raise RecipeError(f"{folder} has a tokenizer without {FILE}, which a GGUF needs. Use another --format.")
        return Vocabulary(model="none")
    file = _Json(folder / FILE, size)
    if file.bytes:
        return _of_bytes(file, pre)
    if pre is not None:
        raise RecipeError(
            f"--pre {pre} is for tokenizers over bytes, but {folder} has one over characters. Leave out --pre."
        )
    return _of_pieces(file) if file.merges else _of_characters(file)


class _Json:
    """The contents of a tokenizer.json that a GGUF needs."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        contents = read_object(path, expected="Fetch the file again", error=RecipeError)
        self.model: Mapping[str, Any] = contents.get("model") or {}
        if self.model.get("type") != "BPE":
            raise self.unknown(f"its model is {self.model.get('type')!r}, expected BPE")
        self.normalizers = _parts(contents.get("normalizer"), "normalizers")
        self.cuts = _parts(contents.get("pre_tokenizer"), "pretokenizers")
        self.tokens = [f"[PAD{index}]" for index in range(size)]
        self.kinds = [Kind.UNUSED] * size
        entries = [(index, token, Kind.NORMAL) for token, index in self.model["vocab"].items()]
        for entry in contents.get("added_tokens") or ():
            token = entry["content"]
            control = entry["special"] or CONTROL.fullmatch(token) is not None
            token = token if control else token.replace(SPACE, " ")
            entries.append((entry["id"], token, Kind.CONTROL if control else Kind.USER_DEFINED))
        for index, token, kind in entries:
            if not 0 <= index < size:
                raise RecipeError(
                    f"{path}: token {token!r} has the number {index}, but the embeddings have {size} rows. These files do not "
                    f"belong together. Fetch the folder again."
                )
            self.tokens[index], self.kinds[index] = token, kind
        if len({*self.tokens}) < size or "" in self.tokens:
            raise self.unknown("two of its tokens would be equal, or one empty")

    @property
    def bytes(self) -> bool:
        """Whether the tokenizer works on bytes."""
        return any(part.get("type") == "ByteLevel" for part in self.cuts)

    @property
    def merges(self) -> list[tuple[str, str]]:
        """Merged pairs in the order of their ranks."""
        pairs = (tuple(each.split(" ", 1)) if isinstance(each, str) else tuple(each) for each in self.model["merges"])
        return [(left, right) for left, right in pairs]

    def unknown(self, why: str) -> RecipeError:
        """Return the error for a tokenizer that llama.cpp is not known to reproduce."""
        return RecipeError(
            f"{self.path}: llama.cpp may not split text as this tokenizer does: {why}. Use another --format, or --pre NAME if it "
            f"works on bytes and llama.cpp has a name for its pre-tokenizer."
        )


def _parts(part: Mapping[str, Any] | None, several: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer."""
    if part is None:
        return []
    return list(part[several]) if part.get("type") == "Sequence" else [part]


def _of_bytes(file: _Json, pre: str | None) -> Vocabulary:
    """Return a vocabulary over bytes.

    llama.cpp cuts text as it is. Composing characters (NFC), which only changes text that is not composed, is left out.
    """
    if changing := [each for part in file.normalizers if (each := _description(part)) != "NFC"]:
        raise RecipeError(
            f"{file.path}: llama.cpp would not cut text as this tokenizer does, which changes it before: {changing[0]}. Use "
            f"another --format."
        )
    if any(part.get("add_prefix_space") for part in file.cuts):
        raise file.unknown("it puts a space before text")
    if pre is None:
        expressions = tuple(expression for part in file.cuts for expression in _expressions(file, part))
        key = (expressions, bool(file.model.get("ignore_merges")))
        if key not in PRE:
            raise file.unknown(f"it splits text by {' then '.join(expressions)[:120]!r}")
        pre = PRE[key]
    merges = [" ".join(part.replace(" ", "Ġ") for part in pair) for pair in file.merges]
    return Vocabulary(model="gpt2", tokens=file.tokens, kinds=file.kinds, merges=merges, pre=pre)


def _expressions(file: _Json, part: Mapping[str, Any]) -> Sequence[str]:
    """Return the regular expressions by which a step splits text."""
    match part.get("type"):
        case "ByteLevel":
            return (GPT2,) if part.get("use_regex", True) else ()
        case "Digits" if part.get("individual_digits"):
            return (r"\p{N}",)
        case "Split" if part.get("behavior") == "Isolated" and not part.get("invert"):
            return (str(part["pattern"].get("Regex", part["pattern"].get("String"))),)
        case "Split" if part.get("behavior") == "Removed" and part.get("invert"):  # keeps the matches: all text
            return (str(part["pattern"].get("Regex")),)
    raise file.unknown(f"one of its steps is {part.get('type')!r}")


def _of_pieces(file: _Json) -> Vocabulary:
    """Return a vocabulary of pieces with scores."""
    steps = [_description(part) for part in file.normalizers] + [_description(part) for part in file.cuts]
    spaced = {f"Prepend {SPACE}", "Metaspace", "Metaspace first", "Metaspace always"}  # these prepend a space
    known = spaced | {f"Replace ' ' {SPACE}", "Metaspace never", "Split ' '"}
    if unknown := [step for step in steps if step not in known]:
        raise file.unknown(f"one of its steps is {unknown[0]}")
    _mark_bytes_and_unknown(file)
    if Kind.BYTE not in file.kinds or not file.model.get("byte_fallback"):
        raise file.unknown("it has no byte tokens for unknown characters")
    space = not spaced.isdisjoint(steps)
    return Vocabulary(model="llama", tokens=file.tokens, kinds=file.kinds, scores=_scores(file), space=space)


def _description(part: Mapping[str, Any]) -> str:
    """Return a short description of a step."""
    pattern = part.get("pattern") or {}
    match part.get("type"):
        case "Replace" if pattern.get("String") is not None:
            return f"Replace {pattern['String']!r} {part.get('content')}"
        case "Prepend":
            return f"Prepend {part.get('prepend')}"
        case "Metaspace" if part.get("replacement", SPACE) == SPACE:
            return f"Metaspace {part.get('prepend_scheme', '')}".strip()
        case "Split" if pattern.get("String") == " ":  # after a normalizer that leaves no space
            return "Split ' '"
        case "Replace":
            return f"Replace {pattern.get('Regex')!r} {part.get('content')}".strip()
    return str(part.get("type"))


def _mark_bytes_and_unknown(file: _Json) -> None:
    for index, token in enumerate(file.tokens):
        if file.kinds[index] is Kind.NORMAL and BYTE.fullmatch(token):
            file.kinds[index] = Kind.BYTE
        elif token == file.model.get("unk_token"):
            file.kinds[index] = Kind.UNKNOWN


def _scores(file: _Json) -> list[float]:
    """Return scores with which llama.cpp merges in the order of ranks.

    llama.cpp merges two neighbours if the vocabulary has them as one token: highest score first, leftmost among equals.
    That is the order of ranks if every such pair is a merge, and all merges that give one token have adjacent ranks.
    """
    merges = file.merges
    ranks: dict[str, int] = {}
    last = ""
    for rank, (left, right) in enumerate(merges):
        token = left + right
        if token != last and token in ranks:
            raise file.unknown(f"the merges that give {token!r} are in two places")
        ranks.setdefault(token, rank)
        last = token
    vocabulary, pairs = file.model["vocab"], set(merges)
    reached = {token for token in vocabulary if len(token) == 1 or token in ranks}
    merged = [token for token, kind in zip(file.tokens, file.kinds, strict=True) if kind is Kind.NORMAL]
    for token in merged:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in reached and right in reached and (left, right) not in pairs:
                raise file.unknown(f"{left!r} and {right!r} are not merged, although {token!r} is a token")
    return [
        0.0 if kind is not Kind.NORMAL else -float(ranks.get(token, len(merges)))
        for token, kind in zip(file.tokens, file.kinds, strict=True)
    ]


def _of_characters(file: _Json) -> Vocabulary:
    """Return a vocabulary of single characters."""
    steps = [_description(part) for part in (*file.normalizers, *file.cuts)]
    squeezed = ["Replace ' +'", "Replace '\\\\A | \\\\z'", f"Prepend {SPACE}", f"Replace ' ' {SPACE}"]
    if steps != squeezed:
        raise file.unknown(f"it works on characters by the steps {', '.join(steps)[:80] or 'none'}")
    _mark_bytes_and_unknown(file)
    longer = [t for t, kind in zip(file.tokens, file.kinds, strict=True) if kind is Kind.NORMAL and len(t) > 1]
    if longer or Kind.UNKNOWN not in file.kinds or not file.model.get("fuse_unk"):
        raise file.unknown(
            "it works on characters, but has longer tokens without merges, or no token for unknown characters"
        )
    scores = [0.0] * file.size
    return Vocabulary(model="t5", tokens=file.tokens, kinds=file.kinds, scores=scores, space=True, squeeze=True)

"""The tokenizer of a model as metadata of GGUF: llama.cpp cuts text itself, by what this says.

Three kinds of `tokenizer.json` are understood, by their structure:

    bytes       BPE over bytes ("gpt2" in the file): the expression that cuts text before merging has a name in llama.cpp, `PRE`
    pieces      BPE over characters with "▁" for spaces, as of SentencePiece ("llama"): llama.cpp merges by scores of tokens, the
                rank of their merges with the sign turned, which gives the same tokens where `_scores` finds nothing against it
    characters  one token a character, no merges ("t5"): the best path through tokens of equal scores is that of characters
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
FIRST = r"[^\r\n\p{L}\p{N}]?"
LETTERS = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{FIRST}\p{{L}}+"  # how most expressions of after 2023 begin
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # and how they end
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PRE = {  # (expressions, whether a token that a piece is as a whole goes before merges) -> its name in llama.cpp
    ((GPT2,), False): "gpt-2",
    ((r"\p{N}", GPT2), False): "smollm",
    ((rf"{LETTERS}|\p{{N}}{{1,3}}|{REST}",), True): "llama-bpe",
    ((rf"{LETTERS}|\p{{N}}{{1,3}}|{REST}",), False): "dbrx",
    ((rf"{LETTERS}|\p{{N}}|{REST}",), False): "qwen2",
    ((rf"{FIRST}{UPPER}*{LOWER}+|{FIRST}{UPPER}+{LOWER}*|\p{{N}}|{SLASHES}",), True): "tekken",
    (
        (rf"{FIRST}{UPPER}*{LOWER}+{ENDINGS}|{FIRST}{UPPER}+{LOWER}*{ENDINGS}|\p{{N}}{{1,3}}|{SLASHES}",),
        False,
    ): "gpt-4o",
}
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# tokens of control although their maker did not say so, as llama.cpp's own converter takes them
CONTROL = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]")
SPACE = "▁"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


class Kind(IntEnum):
    """Of a token, as llama.cpp numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a file says of a tokenizer.

    Args:
        model: "gpt2", "llama" or "t5"; "none" without a tokenizer.
        tokens, kinds: of every row of the embeddings.
        scores: of every token; none in "gpt2".
        merges: "LEFT RIGHT", in "gpt2".
        pre: name of the expression that cuts text.
        space: whether a space is put before text; None: llama.cpp's default.
        squeeze: whether runs of spaces are one, and none is left at the ends.
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
        """Add it to a `gguf.GGUFWriter`, with the ids of special tokens and the template of chats that the folder has."""
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
    """Return what a file says of the tokenizer in a folder.

    Args:
        folder: of the model.
        size: rows of the embeddings; more than there are tokens are filled up.
        pre: name of the expression that cuts text, in place of what the structure tells.

    Raises:
        RecipeError: llama.cpp would cut text otherwise than this tokenizer, as far as is known; or has no name for how it does.
    """
    if pre is not None and not NAME.fullmatch(pre):
        raise RecipeError(
            f"--pre is {pre[:40]!r}; expected the name of a pre-tokenizer of llama.cpp, as gpt-2 or llama-bpe."
        )
    if not (folder / FILE).is_file():
        if any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.model", "vocab.json")):
            raise RecipeError(
                f"{folder} holds a tokenizer that makes no {FILE}, which a GGUF is written from. Use another --format."
            )
        return Vocabulary(model="none")
    found = _Json(folder / FILE, size)
    if found.bytes:
        return _of_bytes(found, pre)
    if pre is not None:
        raise RecipeError(
            f"--pre {pre} is for tokenizers over bytes; that of {folder} is over characters. Leave it out."
        )
    return _of_pieces(found) if found.merges else _of_characters(found)


class _Json:
    """A tokenizer.json, as far as it matters here."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        data = read_object(path, expected="Fetch it again", error=RecipeError)
        self.model: Mapping[str, Any] = data.get("model") or {}
        if self.model.get("type") != "BPE":
            raise self.unknown(f"its model is {self.model.get('type')!r}, understood is BPE")
        self.normalizers = _parts(data.get("normalizer"), "normalizers")
        self.cuts = _parts(data.get("pre_tokenizer"), "pretokenizers")
        self.tokens = [f"[PAD{index}]" for index in range(size)]
        self.kinds = [Kind.UNUSED] * size
        entries = [(index, token, Kind.NORMAL) for token, index in self.model["vocab"].items()]
        for entry in data.get("added_tokens") or ():
            token = entry["content"]
            control = entry["special"] or CONTROL.fullmatch(token) is not None
            token = token if control else token.replace(SPACE, " ")
            entries.append((entry["id"], token, Kind.CONTROL if control else Kind.USER_DEFINED))
        for index, token, kind in entries:
            if not 0 <= index < size:
                raise RecipeError(
                    f"{path}: token {token!r} has the number {index}, the embeddings have {size} rows. The two do not belong "
                    f"together; fetch the model again."
                )
            self.tokens[index], self.kinds[index] = token, kind
        if len({*self.tokens}) < size or "" in self.tokens:
            raise self.unknown("two of its tokens are the same there, or one is empty")

    @property
    def bytes(self) -> bool:
        """Whether tokens are of bytes."""
        return any(part.get("type") == "ByteLevel" for part in self.cuts)

    @property
    def merges(self) -> list[tuple[str, str]]:
        """Pairs, the first of which is merged first."""
        pairs = (tuple(each.split(" ", 1)) if isinstance(each, str) else tuple(each) for each in self.model["merges"])
        return [(left, right) for left, right in pairs]

    def unknown(self, why: str) -> RecipeError:
        """Return the error of a tokenizer that llama.cpp has no like of."""
        return RecipeError(
            f"{self.path}: llama.cpp is not known to cut text as this tokenizer does: {why}. Use another format, or --pre NAME if "
            f"it is over bytes and llama.cpp has a name for it."
        )


def _parts(part: Mapping[str, Any] | None, several: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer."""
    if part is None:
        return []
    return list(part[several]) if part.get("type") == "Sequence" else [part]


def _of_bytes(found: _Json, pre: str | None) -> Vocabulary:
    """Return a vocabulary over bytes."""
    if any(part.get("add_prefix_space") for part in found.cuts):
        raise found.unknown("it puts a space before text")
    if pre is None:
        expressions = tuple(expression for part in found.cuts for expression in _expressions(found, part))
        key = (expressions, bool(found.model.get("ignore_merges")))
        if key not in PRE:
            raise found.unknown(f"it cuts text by {' then '.join(expressions)[:120]!r}")
        pre = PRE[key]
    merges = [" ".join(part.replace(" ", "Ġ") for part in pair) for pair in found.merges]
    return Vocabulary(model="gpt2", tokens=found.tokens, kinds=found.kinds, merges=merges, pre=pre)


def _expressions(found: _Json, part: Mapping[str, Any]) -> Sequence[str]:
    """Return the expressions by which a step cuts text."""
    match part.get("type"):
        case "ByteLevel":
            return (GPT2,) if part.get("use_regex", True) else ()
        case "Digits" if part.get("individual_digits"):
            return (r"\p{N}",)
        case "Split" if part.get("behavior") == "Isolated" and not part.get("invert"):
            return (str(part["pattern"].get("Regex", part["pattern"].get("String"))),)
        case "Split" if part.get("behavior") == "Removed" and part.get("invert"):  # keeps what matches: everything does
            return (str(part["pattern"].get("Regex")),)
    raise found.unknown(f"a step of its is {part.get('type')!r}")


def _of_pieces(found: _Json) -> Vocabulary:
    """Return a vocabulary of pieces with scores."""
    steps = [_said(part) for part in found.normalizers] + [_said(part) for part in found.cuts]
    spaced = {f"Prepend {SPACE}", "Metaspace", "Metaspace first", "Metaspace always"}  # which put a space before text
    known = spaced | {f"Replace ' ' {SPACE}", "Metaspace never", "Split ' '"}
    if odd := [step for step in steps if step not in known]:
        raise found.unknown(f"a step of its is {odd[0]}")
    _mark_bytes_and_unknown(found)
    if Kind.BYTE not in found.kinds or not found.model.get("byte_fallback"):
        raise found.unknown("it has no tokens of bytes for characters that it does not know")
    space = not spaced.isdisjoint(steps)
    return Vocabulary(model="llama", tokens=found.tokens, kinds=found.kinds, scores=_scores(found), space=space)


def _said(part: Mapping[str, Any]) -> str:
    """Return a step in a few words."""
    pattern = part.get("pattern") or {}
    match part.get("type"):
        case "Replace" if pattern.get("String") is not None:
            return f"Replace {pattern['String']!r} {part.get('content')}"
        case "Prepend":
            return f"Prepend {part.get('prepend')}"
        case "Metaspace" if part.get("replacement", SPACE) == SPACE:
            return f"Metaspace {part.get('prepend_scheme', '')}".strip()
        case "Split" if pattern.get("String") == " ":  # behind a normalizer that leaves no space
            return "Split ' '"
        case "Replace":
            return f"Replace {pattern.get('Regex')!r} {part.get('content')}".strip()
    return str(part.get("type"))


def _mark_bytes_and_unknown(found: _Json) -> None:
    for index, token in enumerate(found.tokens):
        if found.kinds[index] is Kind.NORMAL and BYTE.fullmatch(token):
            found.kinds[index] = Kind.BYTE
        elif token == found.model.get("unk_token"):
            found.kinds[index] = Kind.UNKNOWN


def _scores(found: _Json) -> list[float]:
    """Return scores by which llama.cpp merges as the ranks of merges say.

    It merges two neighbours where the vocabulary has them as one token, the token of the highest score first, the left one of
    equal ones. That is the order of ranks if every such pair is among the merges, and merges of different tokens do not mingle.
    """
    merges = found.merges
    ranks: dict[str, int] = {}
    last = ""
    for rank, (left, right) in enumerate(merges):
        token = left + right
        if token != last and token in ranks:
            raise found.unknown(f"merges of {token!r} stand in two places")
        ranks.setdefault(token, rank)
        last = token
    vocabulary, pairs = found.model["vocab"], set(merges)
    reached = {token for token in vocabulary if len(token) == 1 or token in ranks}
    merged = [token for token, kind in zip(found.tokens, found.kinds, strict=True) if kind is Kind.NORMAL]
    for token in merged:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in reached and right in reached and (left, right) not in pairs:
                raise found.unknown(f"{left!r} and {right!r} are not merged, although {token!r} is a token")
    return [
        0.0 if kind is not Kind.NORMAL else -float(ranks.get(token, len(merges)))
        for token, kind in zip(found.tokens, found.kinds, strict=True)
    ]


def _of_characters(found: _Json) -> Vocabulary:
    """Return a vocabulary of single characters."""
    steps = [_said(part) for part in (*found.normalizers, *found.cuts)]
    squeezed = ["Replace ' +'", "Replace '\\\\A | \\\\z'", f"Prepend {SPACE}", f"Replace ' ' {SPACE}"]
    if steps != squeezed:
        raise found.unknown(f"a tokenizer of characters whose steps are {', '.join(steps)[:80] or 'none'}")
    _mark_bytes_and_unknown(found)
    longer = [t for t, kind in zip(found.tokens, found.kinds, strict=True) if kind is Kind.NORMAL and len(t) > 1]
    if longer or Kind.UNKNOWN not in found.kinds or not found.model.get("fuse_unk"):
        raise found.unknown(
            "it is of characters, and has longer tokens without merges, or none for what it does not know"
        )
    scores = [0.0] * found.size
    return Vocabulary(model="t5", tokens=found.tokens, kinds=found.kinds, scores=scores, space=True, squeeze=True)

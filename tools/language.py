"""Figures of how a checkout's code and documents read; counts.py prints them."""
# ruff: noqa: SIM905 -- lists of words are easier to read without a quote around each

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from import_graph import Module
from measures import Checkout, Figure, at, counted

MAX_SENTENCE = 30  # words
QUESTION = re.compile(r"(What|How|Which|Whether|Where)\b")
FRAGMENTS = frozenset(
    "of what that how where which whose who to in on at by with from for as is are has makes wraps keeps keep holds "
    "does whether standing".split()
)  # first words of a description that only makes sense read after the argument's name
VAGUE = frozenset("found own wanted apart told rest result res data tmp".split())
ADJECTIVES = frozenset(
    "ABSENT AGAIN ALONE APART AROUND ASKED BESIDE BIG CALLED CARRIED CHOSEN CLOSE CODED DEEPEST DROPPED ENCODED EQUAL "
    "EVERY EVERYDAY EXACT EXPECTED FEW FEWER FIRST FUSED GIVEN HARMLESS HEARD HELD HERE IGNORED LARGE LONG LONGEST "
    "MADE MARGIN MIXED MOST NAMED NARROW NEAR OLD ORIGINAL OTHERS OURS OWN PACKED PLAIN PRINTED READ REPLACED REST "
    "SEARCHED SHARE SHRUNK SINGLE SLACK SMALL SOLVING STACKED SWAY SYMMETRIC TALL TINY TRIED TRUSTED TUNED "
    "UNCALIBRATED UNKNOWN UNSEEN VARIED WARM WHOLE WIDE WORTH".split()
)  # also adverbs, participles and nouns without a thing or unit: what is close, and by how much?
SECTION = re.compile(r"(Args|Attributes|Fields|Parameters):\s*$")
ENTRY = re.compile(r"    (\*{0,2}[\w, `*]+?)(?: \([^)]*\))?: +(\S+)")


def question_modules(checkout: Checkout) -> Figure:
    """Docstrings of modules that begin with What, How, Which, Whether or Where."""
    first = ((module, (ast.get_docstring(module.tree) or "").split("\n")[0]) for module in checkout.package)
    return counted(f"{module.file}: {line}" for module, line in first if QUESTION.match(line))


def entries(checkout: Checkout) -> Iterator[tuple[Module, str, str]]:
    """Yield (module, line, first word of the description) of every argument and field that a docstring describes."""
    for module in checkout.package:
        for node in module.nodes:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            within = False
            for line in (ast.get_docstring(node) or "").splitlines():
                within = SECTION.match(line) is not None or (within and (not line or line.startswith(" ")))
                if within and (entry := ENTRY.match(line)):
                    yield module, line.strip(), entry[2]


def argument_entries(checkout: Checkout) -> Figure:
    """Arguments and fields that docstrings describe."""
    return counted(f"{module.file}: {line}" for module, line, _ in entries(checkout))


def fragment_entries(checkout: Checkout) -> Figure:
    """Those whose description begins in the argument's name ("record: of the checkpoint"), see `FRAGMENTS`."""
    return counted(
        f"{module.file}: {line}"
        for module, line, word in entries(checkout)
        if word.rstrip(",:;.").lower() in FRAGMENTS and word != "Whether"
    )


def vague_names(checkout: Checkout) -> Figure:
    """Assignments to a name that does not say what it holds, see `VAGUE`."""
    return counted(
        at(module, node)
        for module in checkout.package
        for node in module.nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE
    )


def adjective_constants(checkout: Checkout) -> Figure:
    """Constants of modules whose name is an adjective, see `ADJECTIVES`."""
    targets = (
        (module, target)
        for module in checkout.package
        for node in module.tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    )
    return counted(at(module, node) for module, node in targets if isinstance(node, ast.Name) and node.id in ADJECTIVES)


def sentences(path: Path) -> Iterator[str]:
    """Yield the sentences of a markdown page, without its code, tables, pictures and headings."""
    text = re.sub(r"^( *)```.*?^\1```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = ["" if re.match(r"\s*(\||#|!\[|<)|    \S", line) else line for line in text.splitlines()]
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines)):
        for sentence in re.split(r"(?<=[.!?])[*_)\"]*\s+(?=[\"(*_`]*[A-Z])", paragraph.strip()):
            if sentence:
                yield " ".join(sentence.split())


def words(sentence: str) -> int:
    """Return how many words a sentence has; a piece of code, a link or a figure is one."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", sentence))
    return len([word for word in plain.split() if re.search(r"\w", word)])


def pages(checkout: Checkout) -> list[Path]:
    """Return README.md and the pages of docs/."""
    return [checkout.root / "README.md", *sorted((checkout.root / "docs").rglob("*.md"))]


def all_sentences(checkout: Checkout) -> Figure:
    """Sentences in README.md and docs/."""
    return counted(sentence for path in pages(checkout) for sentence in sentences(path))


def long_sentences(checkout: Checkout) -> Figure:
    """Sentences of more than 30 words in README.md and docs/."""
    return counted(
        f"{path.relative_to(checkout.root)}: {words(sentence)} words: {sentence}"
        for path in pages(checkout)
        for sentence in sentences(path)
        if words(sentence) > MAX_SENTENCE
    )

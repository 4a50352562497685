"""Print every sentence that a user of nearplane can see, by file: messages, summaries, reports, and help texts of commands.

    python tools/messages.py [FOLDER]          # of the checkout in FOLDER (default: this one)

A message is a string of at least three words that is no docstring; {...} stands for a value. Help texts are the docstrings of
cli/ and of recipe/, whose dataclasses are the flags.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

HELP = ("cli", "recipe")
WORD = re.compile(r"[A-Za-z][A-Za-z'-]+")


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the strings that stand alone: docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def text_of(node: ast.AST) -> str | None:
    """Return the text of a string with {...} for values, or None for what is no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = (
            str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(getattr(part, 'value', part))}}}"
            for part in node.values
        )
        return "".join(parts)
    return None


def strings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the strings below a node, a string with values as one."""
    text = text_of(node)
    if text is not None:
        yield node.lineno, text  # type: ignore[attr-defined]
        return
    for child in ast.iter_child_nodes(node):
        yield from strings(child)


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the messages in a file."""
    tree = ast.parse(source)
    lines = {node.lineno for node in docstrings(tree)}
    for line, text in strings(tree):
        words = WORD.findall(re.sub(r"\{[^}]*\}", " ", text))
        if line not in lines and len(words) >= 3 and " " in text:
            yield line, " ".join(text.split())


def main() -> None:
    """Print all messages, then all help texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    source = parser.parse_args().folder / "src" / "nearplane"
    if not source.is_dir():
        sys.exit(f"{source} is no folder; expected the root of a checkout of nearplane.")
    for path in sorted(source.rglob("*.py")):
        if found := list(messages(path.read_text())):
            print(f"\n== {path.relative_to(source)}")
            print("\n".join(f"{line:5}  {text}" for line, text in found))
    for folder in HELP:
        for path in sorted((source / folder).glob("*.py")):
            print(f"\n== help in {path.relative_to(source)}")
            for node in docstrings(ast.parse(path.read_text())):
                print(f"{node.lineno:5}  {inspect.cleandoc(str(node.value))}\n")


if __name__ == "__main__":
    main()

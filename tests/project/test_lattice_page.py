"""docs/lattice.md is executed: every block, top to bottom, in one namespace."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "lattice.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = [
    (TEXT[: block.start(1)].count("\n"), block[1]) for block in re.finditer(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
]


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    """The page computes in float64 without saying so in every line; no other test shall notice."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def test_every_statement_of_the_page_holds() -> None:
    """Blocks are compiled with the page's own line numbers, so that a failure points at its line."""
    namespace: dict[str, object] = {}
    for line, code in BLOCKS:
        exec(compile("\n" * line + code, str(PAGE), "exec"), namespace)


def test_every_block_but_the_imports_asserts_something() -> None:
    for line, code in BLOCKS[1:]:
        asserts = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Assert)]
        assert asserts, f"the block at line {line} of {PAGE.name} shows nothing"


def test_the_pictures_of_the_page_exist() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", TEXT)
    assert len(pictures) == 5
    assert all((PAGE.parent / picture).is_file() for picture in pictures)

"""docs/extending.md is executed: every block, top to bottom, in one namespace; and the tables that it names have those names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from nearplane.formats import FORMATS
from nearplane.lattice.solvers import SOLVERS
from nearplane.schemes import Format, Solver

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"


def test_every_example_runs() -> None:
    text = PAGE.read_text(encoding="utf-8")
    namespace: dict[str, object] = {}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S))
    assert len(blocks) == 7
    for block in blocks:
        exec(compile("\n" * text[: block.start(1)].count("\n") + block[1], str(PAGE), "exec"), namespace)


def test_tables_and_names_are_the_same() -> None:
    assert set(SOLVERS) == set(get_args(Solver))
    assert set(FORMATS) == set(get_args(Format))

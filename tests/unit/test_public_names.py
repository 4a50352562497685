"""The public names of the package are those that type checkers read in the stub."""

from __future__ import annotations

import ast
from pathlib import Path

import nearplane


def test_the_stub_names_the_same_homes() -> None:
    stub = ast.parse(Path(str(nearplane.__file__)).with_suffix(".pyi").read_text())
    homes = {
        alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert homes == nearplane.HOMES
    assert nearplane.__all__ == [*homes]

"""Quantize language models by the lattice mathematics behind GPTQ.

    import nearplane
    record = nearplane.quantize("path/to/model", "out", bits=4, group_size=128, calibration="text.txt")
    print(nearplane.evaluate("out", "heldout.txt", against="path/to/model"))

Importing does nothing: torch and transformers are imported when something is called.
"""

import ast
from importlib import import_module, metadata
from importlib.util import find_spec
from pkgutil import get_data
from typing import Any

HOMES = {  # public names, by the stub beside this file, which type checkers read
    alias.name: str(node.module)
    for node in ast.parse(get_data(__name__, "__init__.pyi") or b"").body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = [*HOMES]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("nearplane")
    if name not in HOMES and find_spec(f"nearplane.{name}") is not None:
        return import_module(f"nearplane.{name}")
    if name not in HOMES:
        raise AttributeError(f"module 'nearplane' has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})

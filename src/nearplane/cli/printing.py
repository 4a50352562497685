"""Printing of lines, tables and JSON for the commands. Imports only what a call needs."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Iterable
from typing import Any

from nearplane.errors import printable
from nearplane.system.progress import phase
from nearplane.system.progress_bar import bar


def say(lines: Iterable[str]) -> None:
    """Print lines, with control characters escaped, since names in files are untrusted."""
    for line in lines:
        print(printable(line))


def table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table as wide as the terminal or COLUMNS, or 190 letters into a pipe; cells are not read as markup.

    If it does not fit, columns are left out from the right and named below, so that no figure is cut.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else 190)
    cells = [[printable(cell) for cell in row] for row in rows]
    # headings wrap
    widths = [max(map(len, (*name.split(), *column))) for name, *column in zip(columns, *cells, strict=True)]
    visible = len(columns)
    while visible > 1 and sum(widths[:visible]) + 3 * visible > console.width:
        visible -= 1
    grid = Table(box=box.SIMPLE)
    for index, name in enumerate(columns[:visible]):
        others = sum(widths[1:visible]) + 3 * visible
        grid.add_column(name, width=widths[index] if index else min(widths[0], console.width - others), overflow="fold")
    for row in cells:
        grid.add_row(*(Text(cell) for cell in row[:visible]))  # Text, which is not read as markup
    console.print(grid)
    if visible < len(columns):
        print(f"columns left out: {', '.join(columns[visible:])} (set a larger COLUMNS, or use --json)")


def opening(*names: object) -> None:
    """Log what a command opens, then load transformers and switch off its progress bars, which would mix with ours."""
    logging.getLogger("nearplane").info("opening %s (torch is loaded first)", printable(" and ".join(map(str, names))))
    with phase(bar, "loading torch and transformers"):
        import torch
        from transformers.utils import logging as of_transformers

    del torch
    of_transformers.disable_progress_bar()


def as_json(data: Any) -> str:
    """Return data as JSON, with paths as text and null in place of numbers that are not finite."""
    return json.dumps(_finite(data), indent=1, default=str)


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data

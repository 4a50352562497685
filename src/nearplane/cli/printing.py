"""How commands print: lines, tables, JSON. Imports what it needs when it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from nearplane.errors import printable


def say(lines: Iterable[str]) -> None:
    """Print lines in which the names that files hold cannot steer the terminal."""
    for line in lines:
        print(printable(line))


def table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table; what names in it hold is no markup.

    Where it does not fit the terminal, columns are left out from the right, and named, rather than figures cut.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 190)
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [
        max(map(len, (*name.split(), *column)))
        for name, *column in zip(columns, *cells, strict=True)  # headings wrap
    ]
    shown = len(columns)
    while shown > 1 and sum(widths[:shown]) + 3 * shown > console.width:
        shown -= 1
    made = Table(box=box.SIMPLE)
    for index, name in enumerate(columns[:shown]):
        wide = sum(widths[1:shown]) + 3 * shown
        made.add_column(name, width=widths[index] if index else min(widths[0], console.width - wide), overflow="fold")
    for row in cells:
        made.add_row(*(Text(cell) for cell in row[:shown]))  # text: what names hold is no markup
    console.print(made)
    if shown < len(columns):
        print(f"no room here for: {', '.join(columns[shown:])} (a wider terminal, a pipe or --json shows them)")


def quiet() -> None:
    """Keep transformers' own progress bars from between ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def as_json(data: Any) -> str:
    """Return data as JSON, paths as text."""
    return json.dumps(data, indent=1, default=str)  # paths


def shown(letter: str) -> str:
    """Return a letter of what a model says; those that steer the terminal are escaped, but for ends of lines and tabs."""
    return letter if letter in "\n\t" else printable(letter)

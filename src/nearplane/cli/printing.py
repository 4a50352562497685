"""Printing of lines, tables and JSON for the commands. Imports only what a call needs."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearplane.cli.streams import refuse_unread
from nearplane.errors import printable
from nearplane.system.sizes import size_text, three_places

if TYPE_CHECKING:
    from nearplane.verbs.compare import Row
    from nearplane.verbs.generate import Continuation

DIFFERENT_LETTERS = 24  # characters quoted of each of two texts from where they differ


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
    widths = [
        max(map(len, (*name.split(), *column)))
        for name, *column in zip(columns, *cells, strict=True)  # headings wrap
    ]
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


def comparison(rows: Sequence[Row]) -> None:
    """Print the rows of a comparison as a table, and below it the note of every row in full."""
    from nearplane.verbs.compare_page import HEADS, cells

    table(HEADS, (cells(row, three_places(row.kl), none="-") for row in rows))
    say(f"{Path(row.model).name}, {row.method} at {row.asked:g} bits: {row.note}" for row in rows if row.note)


def opening(*names: object) -> None:
    """Log what a command opens, then load transformers and switch off its progress bars, which would mix with ours."""
    logging.getLogger("nearplane").info("opening %s (torch is loaded first)", printable(" and ".join(map(str, names))))
    from transformers.utils import logging as of_transformers

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


def print_piece(before: Iterator[str], piece: str) -> None:
    """Print a piece of generated text at once, with control characters escaped except line ends and tabs.

    Args:
        before: Text to print before the first piece, as it is.
        piece: Next piece of the text.

    Raises:
        Unread: The output is a pipe that nobody reads any more.
    """
    escaped = "".join(sign if sign in "\n\t" else printable(sign) for sign in piece)
    print(next(before, "") + escaped, end="", flush=True)
    refuse_unread()


def log_speed(text: Continuation) -> None:
    """Log how fast a text was generated, and what its model takes."""
    rate = text.tokens_per_second
    logging.getLogger("nearplane").info(
        "first token after %.2f s%s; weights take %s",
        text.first_token_seconds,
        "" if rate is None else f", then {rate:.1f} tokens per second",
        size_text(text.weight_bytes),
    )


def first_difference(text: str, other: str) -> str:
    """Return where two generated texts part, with the words that follow there, as a line."""
    if text == other:
        return "── both texts are the same"
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    word = text.rfind(" ", 0, same) + 1
    ends = (repr(each[word : same + DIFFERENT_LETTERS]) for each in (text, other))
    return f"── the same for {same} characters, then {' instead of '.join(ends)}"

"""Tables in Markdown from cells, with a paper's figures beside ours and deviations marked, and the figure of sizes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kept_cells import Cell, Key

from nearplane.verbs.compare import ORIGINAL_METHOD, Row
from nearplane.verbs.compare_figure import draw
from nearplane.verbs.compare_request import WAYS

TOLERANCE = 0.02  # relative deviation from the paper's figure above which a figure is marked
MARK = " !"
Published = Mapping[Key, float]
Find = Callable[[Key], Cell | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows and columns of a table.

    Args:
        title: Title, with the number of the paper's table.
        rows: {name of a row: its keys, one for each column; None where a row has no cell}.
        columns: Names of the columns.
    """

    title: str
    rows: Mapping[str, Sequence[Key | None]]
    columns: Sequence[str]

    @property
    def keys(self) -> list[Key]:
        """All keys, row by row."""
        return [key for keys in self.rows.values() for key in keys if key is not None]


def published(source: str) -> dict[Key, float]:
    """Return the figures of a source of `published.json`: model, method, bits, measure and value."""
    rows = json.loads(Path(__file__).with_name("published.json").read_text())[source]
    return {Key(model, method, bits, measure): float(value) for model, method, bits, measure, value in rows}


def markdown(table: Table, find: Find, paper: Published, papers_model: Mapping[str, str]) -> str:
    """Return a table: `ours (the paper's, their ratio)`, and below it why cells have no figure.

    Args:
        table: The table.
        find: Function from a key to its cell.
        paper: The paper's figures.
        papers_model: {model: the model of the paper that it is or whose place it takes}.
    """
    reasons: list[str] = []
    lines = [f"| | {' | '.join(table.columns)} |", f"|{'---|' * (len(table.columns) + 1)}"]
    for name, keys in table.rows.items():
        entries = []
        for key in keys:
            cell = None if key is None else find(key)
            theirs = None if key is None else paper.get(key._replace(model=papers_model.get(key.model, key.model)))
            entries.append(_entry(cell, theirs, reasons))
        lines.append(f"| {name} | {' | '.join(entries)} |")
    footnotes = [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n\n".join([f"### {table.title}", "\n".join(lines), *footnotes])


def _entry(cell: Cell | None, theirs: float | None, reasons: list[str]) -> str:
    """Return the text of a cell; the reason why it has no figure is added to `reasons` unless it is there."""
    if cell is not None and cell.finished:
        assert cell.value is not None
        error = f" +- {cell.error:.2g}" if cell.error is not None else ""
        ours = f"{_number(cell.value)}{error}"
        if theirs is None:
            return ours
        ratio = cell.value / theirs
        return f"{ours} ({_number(theirs)}, {ratio:.3g}){MARK if deviates(cell.value, theirs) else ''}"
    beside = "" if theirs is None else f" ({_number(theirs)})"
    if cell is None:
        return f"-{beside}"
    reason = cell.reason or "the figure is not finite"
    if reason not in reasons:
        reasons.append(reason)
    return f"failed [{reasons.index(reason) + 1}]{beside}"


def deviates(ours: float, theirs: float) -> bool:
    """Return whether a figure differs from the paper's by more than `TOLERANCE`."""
    return abs(ours / theirs - 1) > TOLERANCE


def _number(value: float) -> str:
    return f"{value:.3e}" if value >= 1e5 else f"{value:.4g}" if value >= 100 else f"{value:.3f}"


def draw_sizes(cells: Iterable[Cell], measure: str, out: Path) -> None:
    """Draw perplexity against the size of the file, one curve a model and one panel a method (Figure 2)."""
    rows = [
        Row(
            model=cell.key.model, method=cell.key.method, asked=cell.key.bits, rate=cell.rate, bytes=cell.bytes,
            perplexity=cell.value,
        )
        for cell in cells
        if cell.finished and cell.key.measure == measure and cell.key.method in (ORIGINAL_METHOD, *WAYS)
    ]  # fmt: skip
    whole = {row.model for row in rows if row.method == ORIGINAL_METHOD}
    draw([row for row in rows if row.model in whole], out)

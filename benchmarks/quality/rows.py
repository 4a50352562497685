"""Rows of measurements in a file of JSON lines, and what they say: means with errors, and ratios of KL over pairs of rows.

Two rows are a pair if they have the same model, the same windows (calibration and held out) and the same setting. The ratio of two
tools, or of two versions of one, is the geometric mean of KL(new) / KL(old) over the pairs of all calibrations; its error is
the standard error of the mean of the logarithms. Needs the standard library alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from textwrap import fill
from typing import Any

Row = dict[str, Any]
KEY = ("sha", "text", "tool", "setting", "calibration")  # of a row; `text` stands for all windows
LARGEST_ERROR = 0.0075  # of a ratio; twice this is what a change is judged by


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean and its standard error.

    Args:
        value: The mean.
        error: Its standard error; None for a single calibration.
        count: Number of calibrations.
    """

    value: float
    error: float | None
    count: int

    def __str__(self) -> str:
        digits = 3 - math.floor(math.log10(abs(self.value))) if self.value else 3
        shown = f"{self.value:.{max(digits - 1, 0)}f}"
        return shown if self.error is None else f"{shown} ± {self.error:.{max(digits - 1, 0)}f}"

    @property
    def needed(self) -> int | None:
        """Number of calibrations after which two errors are expected to be at most 1.5 % of the mean."""
        if self.error is None:
            return None
        return max(2, math.ceil(self.count * (self.error / self.value / LARGEST_ERROR) ** 2))


def average(values: Sequence[float]) -> Estimate:
    """Return the mean of figures of several calibrations."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(value=mean(values), error=error, count=len(values))


def ratio(old: Sequence[float], new: Sequence[float]) -> Estimate:
    """Return the geometric mean of new / old over pairs."""
    logs = average([math.log(after / before) for before, after in zip(old, new, strict=True)])
    value = math.exp(logs.value)
    return Estimate(value=value, error=None if logs.error is None else value * logs.error, count=logs.count)


def paired(old: Iterable[Row], new: Iterable[Row]) -> dict[tuple[str, str], Estimate]:
    """Return the ratio of KL of each model and setting that both have, over their pairs."""

    def by_place(rows: Iterable[Row]) -> dict[tuple[Any, ...], float]:
        same = ("model", "sha", "text", "setting", "calibration")
        return {tuple(row[name] for name in same): row["kl"] for row in rows if row.get("kl")}

    before, after = by_place(old), by_place(new)
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for place, kl in before.items():
        if place in after:
            pairs.setdefault((place[0], place[3]), []).append((kl, after[place]))
    return {name: ratio(*zip(*each, strict=True)) for name, each in pairs.items()}


def read(path: Path) -> list[Row]:
    """Return the rows of a file, of which the last one with a key counts; none if there is no file."""
    rows = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(ValueError):  # a line that was cut off by a crash
            row = json.loads(line)
            rows[key(row)] = row
    return list(rows.values())


def key(row: Row) -> tuple[Any, ...]:
    """Return what a row is a measurement of."""
    return tuple(row[name] for name in KEY)


def append(path: Path, row: Row) -> None:
    """Add a row to a file, to which other processes may add rows too."""
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        file.write(("" if text.endswith("\n") or not text else "\n") + json.dumps(row) + "\n")


@contextmanager
def claimed(path: Path, what: str) -> Iterator[bool]:
    """Yield whether this process may measure something for a file of rows, or another process is at it."""
    folder = Path(tempfile.gettempdir()) / f"tables-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    folder.mkdir(exist_ok=True)
    with (folder / what.replace("/", "-")).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a markdown table."""
    for line in (heads, ["---"] * len(heads), *lines):
        yield f"| {' | '.join(line)} |"


def failures(rows: Iterable[Row]) -> str:
    """Return the section of a page that says which cells failed; empty if none did."""
    lines = [
        f"- {row['model']}, {row['tool']}, {row['setting']}, calibration {row['calibration']}: {row['error']}"
        for row in rows
        if "error" in row
    ]
    filled = (fill(line, 120, subsequent_indent="  ", break_long_words=False) for line in lines)
    return "\n## What failed\n" + "".join(f"\n{line}\n" for line in filled) if lines else ""


def where(rows: Iterable[Row], **values: Any) -> list[Row]:
    """Return the rows with these values, by calibration."""
    return sorted((row for row in rows if values.items() <= row.items()), key=lambda row: row["calibration"])

"""Cells of tables on disk, one line of JSON each, so that a stopped run is resumed by the same command."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nearplane.errors import RecipeError
from nearplane.system.files import write_whole

CELLS_FILE = "cells.jsonl"


class Key(NamedTuple):
    """Place of a cell: model, method, bits per weight (None: all bits, or the original), and what is measured."""

    model: str
    method: str
    bits: float | None
    measure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One figure of a table.

    Args:
        key: Place of the cell.
        value: The figure; None if it could not be measured.
        error: Its standard error, where the measurement has one.
        rate: True bits per quantized weight.
        bytes: Size of all weights in bytes.
        seconds: Time of the quantization, which all cells of a method at some bits share.
        note: Deviation of the method from what was asked for, for example other groups.
        reason: The reason why there is no figure.
    """

    key: Key
    value: float | None = None
    error: float | None = None
    rate: float | None = None
    bytes: int | None = None
    seconds: float = 0.0
    note: str = ""
    reason: str = ""

    @property
    def finished(self) -> bool:
        """Whether the figure is there and finite."""
        return self.value is not None and math.isfinite(self.value)


class Cells:
    """Cells of one run in FOLDER/cells.jsonl; a cell without figure is measured anew by the next command.

    The first line holds the inputs that all cells depend on. A line that was cut off by a crash is dropped.

    Args:
        folder: New folder, or that of a run with the same inputs.
        inputs: All that the cells depend on except their keys, as flat JSON.

    Raises:
        RecipeError: The folder holds cells with other inputs.
    """

    def __init__(self, folder: Path, inputs: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / CELLS_FILE
        self._cells: dict[Key, Cell] = {}
        head = json.loads(json.dumps(dict(inputs)))
        lines = list(_whole_lines(self._path))
        if lines and lines[0] != head:
            names = [name for name in {**lines[0], **head} if lines[0].get(name) != head.get(name)]
            raise RecipeError(
                f"{self._path} has cells of another run: {', '.join(names[:3])} differ. Repeat the command of that run to "
                f"resume it, or choose another folder with --keep."
            )
        for line in lines[1:]:
            cell = Cell(**{**line, "key": Key(*line["key"])})
            self._cells[cell.key] = cell
        write_whole(self._path, "".join(f"{json.dumps(line)}\n" for line in lines or [head]).encode())

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._cells.values())

    def get(self, key: Key) -> Cell | None:
        """Return a cell, with or without figure."""
        return self._cells.get(key)

    def missing(self, keys: list[Key]) -> list[Key]:
        """Return the keys without a finite figure, each once."""
        return [key for key in dict.fromkeys(keys) if key not in self._cells or not self._cells[key].finished]

    def add(self, cell: Cell) -> None:
        """Append a cell to the file."""
        self._cells[cell.key] = cell
        with self._path.open("a") as file:
            file.write(f"{json.dumps(asdict(cell))}\n")
            file.flush()
            os.fsync(file.fileno())


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines, up to the first line that a crash has cut off."""
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            yield json.loads(line)
        except ValueError:
            return

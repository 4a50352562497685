"""Rows of a comparison, on disk as soon as they are measured: `compare --keep FOLDER` given again goes on behind the last.

    FOLDER/rows.json      what every row was measured with, and the rows

Rows count for the same models, texts, tokens and versions alone; other bits and methods are rows beside those that are there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nearplane.errors import FormatError, RecipeError
from nearplane.jsonfile import read_object
from nearplane.wholefile import check_writable, write_whole

NAME = "rows.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method at one number of bits on one model.

    Args:
        model: As the user named it.
        method: One of `compare.WAYS`, or "original".
        asked: Bits per weight; None for the original.
        rate: Bits per quantized weight in the file, every byte of the layers' tensors counted; of the original, its dtype's.
        bytes: Of all weight files.
        perplexity: On the text.
        kl: KL(original || this), nats per token.
        seconds: To quantize.
        note: What differs from what was asked; or, where nothing was measured and the figures are None, why.
        folder: The checkpoint, if it was kept; of the original, its own.
    """

    model: str
    method: str
    asked: float | None = None
    rate: float | None = None
    bytes: int | None = None
    perplexity: float | None = None
    kl: float | None = None
    seconds: float = 0.0
    note: str = ""
    folder: Path | None = None


class Compared:
    """The rows of a folder.

    Args:
        folder: new or empty, or one that a comparison left that was told the same; None: nothing is kept.
        told: all that a row's figures depend on beside its method and bits, as flat JSON.

    Raises:
        RecipeError: the folder holds something else, or rows that were told something else; names the difference.
    """

    def __init__(self, folder: Path | None, told: Mapping[str, Any]) -> None:
        self._path = None if folder is None else folder / NAME
        self._told: dict[str, Any] = json.loads(json.dumps(dict(told)))
        self._rows: dict[tuple[str, str, float | None], Row] = {}
        if folder is None or self._path is None:
            return
        if self._path.is_file():
            self._read(self._path)
        elif folder.is_dir() and any(folder.iterdir()):
            raise RecipeError(
                f"{folder} holds files and no {NAME}: expected a new or empty folder, or one of a comparison."
            )
        check_writable(folder)
        self._write()

    def _read(self, path: Path) -> None:
        expected = "Delete it, or choose another folder with --keep"
        data = read_object(path, expected=expected)
        then = data.get("told")
        if not isinstance(then, dict):
            raise FormatError(f"{path} is not what was written. {expected}.")
        if differing := [name for name in {**then, **self._told} if then.get(name) != self._told.get(name)]:
            raise RecipeError(
                f"{path} has rows of another comparison: {', '.join(differing[:3])} differ. Give the same command again to go on "
                f"with it, or choose another folder."
            )
        try:
            for entry in data["rows"]:
                folder = None if entry["folder"] is None else Path(entry["folder"])
                row = Row(**{**entry, "folder": folder})
                self._rows[row.model, row.method, row.asked] = row
        except (KeyError, TypeError) as error:
            raise FormatError(f"{path} is not what was written ({error!r}). {expected}.") from error

    def get(self, model: str, method: str, asked: float | None) -> Row | None:
        """Return a row that was measured before."""
        return self._rows.get((model, method, asked))

    def add(self, row: Row) -> Row:
        """Keep a row, and return it."""
        self._rows[row.model, row.method, row.asked] = row
        self._write()
        return row

    def _write(self) -> None:
        if self._path is not None:
            rows = [asdict(row) | {"folder": row.folder and str(row.folder)} for row in self._rows.values()]
            write_whole(self._path, json.dumps({"told": self._told, "rows": rows}, indent=1).encode())

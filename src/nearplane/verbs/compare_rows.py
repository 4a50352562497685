"""Rows of a comparison, on disk as soon as they are measured: `compare --keep FOLDER` given again goes on behind the last.

    FOLDER/rows.json        what every row was measured with, and the rows
    FOLDER/rows.json.lock   locked by the comparison that writes them

Rows count for the same models, texts, tokens and versions alone; other bits and methods are rows beside those that are there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from nearplane.errors import FormatError, RecipeError
from nearplane.system.files import alone, check_writable, read_object, write_whole

NAME = "rows.json"
LOCK = f"{NAME}.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method at one number of bits on one model.

    Args:
        model: As the user named it.
        method: One of `compare.WAYS`, or "original".
        asked: Bits per weight; None for the original.
        rate: Bits per quantized weight in the file, every byte of the layers' tensors counted; of the original, its dtype's.
        bytes: Of all weight files; where none was written, of the tensors that they would hold.
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
    """The rows of a folder; a context in which one comparison alone reads and writes them.

    Nothing is written before the context begins.

    Args:
        folder: new or empty, or one that a comparison left that was told the same; None: nothing is kept.
        told: all that a row's figures depend on beside its method and bits, as flat JSON.

    Raises:
        RecipeError: the folder holds something else, or rows that were told something else; names the difference. When the
            context begins: another comparison writes them.
    """

    def __init__(self, folder: Path | None, told: Mapping[str, Any]) -> None:
        self._folder = folder
        self._told: dict[str, Any] = json.loads(json.dumps(dict(told)))
        self._rows: dict[tuple[str, str, float | None], Row] = {}
        self._held = ExitStack()
        if folder is not None:
            self._look(folder)
            check_writable(folder)

    def __enter__(self) -> Compared:
        if self._folder is None:
            return self
        said = "is being written by another comparison. Wait until it has ended, or choose another folder with --keep."
        with ExitStack() as stack:
            stack.enter_context(alone(self._folder / LOCK, f"{self._folder} {said}"))
            self._look(self._folder)  # again: a comparison may have ended since
            self._write()
            self._held = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def _look(self, folder: Path) -> None:
        """Read the rows that are there, or refuse what is there instead."""
        if (folder / NAME).is_file():
            self._read(folder / NAME)
        elif folder.is_dir() and any(path.name != LOCK for path in folder.iterdir()):
            raise RecipeError(
                f"{folder} holds files and no {NAME}: expected a new or empty folder, or one of a comparison."
            )

    def _read(self, path: Path) -> None:
        expected = f"Delete {path.parent} with the checkpoints in it, or choose another folder with --keep"
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
                if row.perplexity is not None:
                    self._rows[row.model, row.method, row.asked] = row
        except (KeyError, TypeError) as error:
            raise FormatError(f"{path} is not what was written ({error!r}). {expected}.") from error

    def get(self, model: str, method: str, asked: float | None) -> Row | None:
        """Return a row that was measured before."""
        return self._rows.get((model, method, asked))

    def add(self, row: Row) -> Row:
        """Keep a row, and return it; one without figures is not kept: what was refused costs nothing to ask again."""
        if row.perplexity is not None:
            self._rows[row.model, row.method, row.asked] = row
            self._write()
        return row

    def _write(self) -> None:
        if self._folder is not None:
            rows = [asdict(row) | {"folder": row.folder and str(row.folder)} for row in self._rows.values()]
            content = json.dumps({"told": self._told, "rows": rows}, indent=1)
            write_whole(self._folder / NAME, content.encode())

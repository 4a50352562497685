"""What a user names, looked up before anything heavy is imported: a mistyped folder or text is refused at once. Needs no torch."""

from __future__ import annotations

import re
from pathlib import Path

from nearplane.errors import CalibrationError, ModelError

SUFFIXES = (".txt", ".jsonl")  # of texts
RECORD = "nearplane.json"  # the record of a run, in the folder of its checkpoint
UNFINISHED = ".unfinished"  # behind the name of the folder in which a checkpoint is written until it is whole
INCOMPLETE = "INCOMPLETE"  # a file in that folder, until the checkpoint is whole
JOURNAL = "journal"  # a folder in it: what a stopped run goes on from


def folder_named(source: str | Path) -> Path | None:
    """Return the local folder of a model; None where it is named by a hub id.

    Raises:
        ModelError: it is neither.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(f"{source} is a file; pass the folder of the model.")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", str(source)) or left_behind(folder):
        raise ModelError(
            f"The folder {source} does not exist (and it is no hub id, which reads owner/name).{left_behind(folder)}"
        )
    return None


def left_behind(folder: Path) -> str:
    """Return a sentence where a run that did not finish left what was to become a folder; else nothing."""
    there = folder.with_name(folder.name + UNFINISHED)
    if not folder.name or folder.exists() or not there.is_dir():
        return ""
    return f" A run that did not finish left {there}: give its command again."


def check_there(source: str | Path) -> None:
    """Refuse a text that is not there and whose name is not that of a data set.

    Raises:
        CalibrationError: says what is expected.
    """
    path = Path(source).expanduser()
    named = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]*){0,2}", str(source)) and path.suffix not in SUFFIXES
    if not path.exists() and not named:
        raise CalibrationError(
            f"{source} does not exist. Pass a {' or '.join(SUFFIXES)} file, a folder of them, "
            f"or a data set as name:config:split."
        )


def check_named(*models: str | Path | None, texts: tuple[str | Path | None, ...] = ()) -> None:
    """Refuse models and texts that are not there; None is one that was not named."""
    for model in models:
        if model is not None:
            folder_named(model)
    for text in texts:
        if text is not None:
            check_there(text)

"""Early checks of the models and texts that a user names, so that a mistyped path is refused at once. Needs no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from nearplane.errors import CalibrationError, ModelError

SUFFIXES = (".txt", ".jsonl")  # of text files
RECORD = "nearplane.json"  # the run record, in the folder of a checkpoint
UNFINISHED = ".unfinished"  # suffix of the folder in which a checkpoint is written until it is complete
INCOMPLETE = "INCOMPLETE"  # name of a file in that folder until the checkpoint is complete
JOURNAL = "journal"  # name of the folder in it from which a stopped run is resumed


def folder_named(source: str | Path) -> Path | None:
    """Return the local folder of a model, or None for a hub id.

    Raises:
        ModelError: The source is neither a folder nor a hub id.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not os.access(folder, os.R_OK | os.X_OK):  # where it could only be listed or only be entered
            raise ModelError(f"{folder} cannot be read: Permission denied.")
        return folder
    if folder.exists():
        raise ModelError(f"{source} is a file. Pass the folder of the model.")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", str(source)) or unfinished_run(folder):
        raise ModelError(
            f"The folder {source} does not exist, and it is not a hub id of the form owner/name.{unfinished_run(folder)}"
        )
    return None


def unfinished_run(folder: Path) -> str:
    """Return a sentence if a stopped run left an unfinished folder for this one, else an empty text."""
    unfinished = folder.with_name(folder.name + UNFINISHED)
    if not folder.name or folder.exists() or not unfinished.is_dir():
        return ""
    return f" A stopped run left {unfinished}. Repeat the command of that run to resume it."


def check_text_exists(source: str | Path) -> None:
    """Refuse a text that neither exists nor is named like a data set.

    Raises:
        CalibrationError: The text does not exist; the message lists the accepted forms.
    """
    path = Path(source).expanduser()
    is_dataset = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]*){0,2}", str(source)) and path.suffix not in SUFFIXES
    if not path.exists() and not is_dataset:
        raise CalibrationError(
            f"{source} does not exist. Pass a {' or '.join(SUFFIXES)} file, a folder of them, "
            f"or a data set as name:config:split."
        )


def check_named(*models: str | Path | None, texts: tuple[str | Path | None, ...] = ()) -> None:
    """Refuse models and texts that do not exist; None stands for an option that was not given."""
    for model in models:
        if model is not None:
            folder_named(model)
    for text in texts:
        if text is not None:
            check_text_exists(text)

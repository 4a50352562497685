"""Reading of run records, from JSON or from the folder of a checkpoint. Needs no torch."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from nearplane.errors import FormatError, printable
from nearplane.record.from_json import annotated
from nearplane.record.record import LEFT_OUT_OF_CALIBRATION, VERSION, RunRecord
from nearplane.system.paths import INCOMPLETE, RECORD, refuse_adapter, unfinished_run


def parsed_record(text: str, where: str = RECORD) -> RunRecord:
    """Read what `RunRecord.to_json` wrote.

    Args:
        text: The JSON text.
        where: Name of its file in messages.

    Raises:
        FormatError: The text is no record of this version, or a field has another type than it declares; the message
            names it.
    """
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError("it is not an object")
        if fields.get("version") != VERSION:
            raise _version_error(fields, where)
        with suppress(KeyError, TypeError, AttributeError):  # `annotated` says what is wrong
            for name, value in LEFT_OUT_OF_CALIBRATION.items():  # by `RunRecord.fields`; a recipe has other defaults
                fields["recipe"]["calibration"].setdefault(name, value)
        record: RunRecord = annotated(RunRecord, fields, "record")
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is not a record that this version of nearplane reads ({error}).") from error
    return record


def _version_error(fields: dict[str, Any], where: str) -> FormatError:
    """Return the error for a record of another version; it names the nearplane that wrote it, if known."""
    numbers = fields.get("versions")
    number = numbers.get("nearplane") if isinstance(numbers, dict) else None
    by = f"nearplane {printable(number)[:20]}" if isinstance(number, str) else "another version of nearplane"
    return FormatError(
        f"{where} was written by {by}, whose records this version does not read: found record version "
        f"{json.dumps(fields.get('version'))[:20]}, expected {VERSION}. Quantize again, or read it with {by}."
    )


def read_record(out: str | Path) -> RunRecord:
    """Read the record of the checkpoint in a folder, as `quantize` returned it.

    Raises:
        FormatError: The record is missing or cannot be read.
        ModelError: The folder holds an adapter, too.
    """
    folder = Path(out)
    path = folder / RECORD
    if folder.is_file():
        raise FormatError(
            f"{folder} is a file, but this command compares several files: expected the folder that nearplane quantize "
            f"wrote, with {RECORD}."
        )
    if not path.is_file():
        if (folder / INCOMPLETE).is_file():
            raise FormatError(f"{folder} is incomplete: its run has not finished. Repeat the command of that run.")
        problem = f"has no {RECORD}" if folder.exists() else "does not exist"
        raise FormatError(
            f"{folder} {problem}: expected a folder that nearplane quantize wrote.{unfinished_run(folder)}"
        )
    refuse_adapter(folder)
    try:
        return parsed_record(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not text ({error}). Fetch the file again.") from error

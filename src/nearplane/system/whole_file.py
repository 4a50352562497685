"""Write one file whole or not at all. Knows no formats; needs no torch."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from nearplane.errors import FormatError, RecipeError


def check_writable(folder: Path) -> None:
    """Refuse a folder that no file could be written into, before there is something to write; it is made where it is missing.

    Raises:
        RecipeError: it is a file, or may not be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RecipeError(f"{folder} is no folder that can be written ({error}). Choose another one.") from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place, its folder made where it is missing, and put it there when it is whole.

    Raises:
        FormatError: the disk is full, or the place not writable; what was there is as it was.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.exists() and not path.is_file():
            raise FileExistsError(f"it is there, and no file: {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("xb") as file:
            file.write(content)
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise FormatError(
            f"{path} could not be written ({error}). Free some space or choose another place; what was there is as it was."
        ) from error
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise

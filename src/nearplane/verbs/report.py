"""write_report(): the record of a checkpoint as one HTML page."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from nearplane.errors import RecipeError
from nearplane.formats.find_record import found_record
from nearplane.record.report.page import render
from nearplane.system.files import write_whole

MADE = b'<meta name="generator" content="nearplane report">'  # in every page


def write_report(out: str | Path, page: str | Path | None = None, *, overwrite: bool = False) -> Path:
    """Write the report of the checkpoint in a folder, and return where.

    Args:
        out: Folder of a checkpoint; only its record is read.
        page: File to write. Default: beside the folder, named after it; a report that is there is replaced.
        overwrite: Replace a file that is there, whatever it is.

    Raises:
        FormatError: the folder holds no record, or the page cannot be written.
        RecipeError: the page would lie in the checkpoint, whose files are counted, is not named as one, or is there.
    """
    out = Path(out)
    record = found_record(out)
    folder = out.resolve()
    default = page is None
    page = folder.with_name(f"{folder.name}-report.html") if page is None else Path(page)
    if page.resolve().is_relative_to(folder):
        raise RecipeError(f"{page} lies in the checkpoint {out}, whose files are counted: name one outside of it.")
    if page.suffix not in (".html", ".htm") or page.is_dir():
        raise RecipeError(f"{page} is no page that can be written; expected the name of a file that ends in .html.")
    if page.is_file() and not overwrite and not (default and MADE in _beginning(page)):
        what = "is there, and is no report of nearplane" if default else "is there already"
        raise RecipeError(f"{page} {what}. Name another file, or replace it with --overwrite.")
    write_whole(page, render(record).encode())
    return page


def _beginning(page: Path) -> bytes:
    with suppress(OSError), page.open("rb") as file:
        return file.read(1000)
    return b""

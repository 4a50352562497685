"""write_report(): the run record of a checkpoint as an HTML page."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from nearplane.errors import RecipeError
from nearplane.formats.find_record import find_record
from nearplane.record.report.page import render
from nearplane.system.arguments import checked
from nearplane.system.files import write_whole

GENERATOR_TAG = b'<meta name="generator" content="nearplane report">'  # marks a page of nearplane


@checked()
def write_report(out: str | Path, page: str | Path | None = None, *, overwrite: bool = False) -> Path:
    """Write an HTML report about a checkpoint, and return its path.

    Args:
        out: Folder of a checkpoint; only its run record is read.
        page: File to write. Default: OUT-report.html beside the folder; an old report there is replaced.
        overwrite: Whether any existing file may be replaced.

    Raises:
        FormatError: The folder holds no run record, or the page cannot be written.
        RecipeError: The page lies in the checkpoint, does not end in .html or .htm, or exists and may not be replaced.
    """
    out = Path(out)
    record = find_record(out)
    folder = out.resolve()
    default = page is None
    beside = folder if out.name == ".." else out.absolute()  # a link is named as given
    page = beside.with_name(f"{beside.name}-report.html") if page is None else Path(page)
    if page.resolve().is_relative_to(folder):
        raise RecipeError(f"{page} is in the checkpoint {out}, which must not change. Name a file outside of it.")
    if page.suffix not in (".html", ".htm") or page.is_dir():
        raise RecipeError(f"{page} is not a page that can be written; expected the name of a file that ends in .html.")
    if page.is_file() and not overwrite and not (default and is_report(page)):
        problem = "exists and is not a report of nearplane" if default else "exists already"
        raise RecipeError(f"{page} {problem}. Name another file, or replace it with --overwrite.")
    write_whole(page, render(record).encode())
    return page


def is_report(page: Path) -> bool:
    """Return whether a file is a report that nearplane wrote."""
    return GENERATOR_TAG in _beginning(page)


def _beginning(page: Path) -> bytes:
    with suppress(OSError), page.open("rb") as file:
        return file.read(1000)
    return b""

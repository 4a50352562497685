"""The record of a run wherever it is: beside a checkpoint's files, or in a GGUF that is all there is. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from nearplane.errors import FormatError
from nearplane.formats.gguf.gguf_header import FILE, MAGIC, RECORD_KEY, read_header
from nearplane.record.record import RunRecord, digest_of, read_record
from nearplane.system.paths import RECORD


def found_record(out: Path) -> RunRecord:
    """Return the record of a checkpoint in a folder, or in a GGUF; that tells no times, and no hashes of files.

    Args:
        out: folder that nearplane wrote, or its `model.gguf` without the rest, under any name.

    Raises:
        FormatError: there is none, or it cannot be read.
        ModelError: what begins like a GGUF is damaged.
    """
    if out.is_file() and _begins(out) == MAGIC:
        return record_inside(out)
    if (out / FILE).is_file() and not (out / RECORD).exists():
        return record_inside(out / FILE)
    return read_record(out)


def record_inside(path: Path) -> RunRecord:
    """Return the record in a GGUF.

    Raises:
        FormatError: it has none, or one that cannot be read.
        ModelError: it is no GGUF, or damaged.
    """
    text = read_header(path).fields.get(RECORD_KEY)
    if not isinstance(text, str) or not text.strip():
        raise FormatError(
            f"{path} has no record of how it was made in its key {RECORD_KEY}: expected a GGUF that nearplane wrote."
        )
    record = RunRecord.from_json(text, str(path))
    if (has := digest_of(text.strip())) != record.digest:
        raise FormatError(
            f"{path}: the record in its key {RECORD_KEY} has the digest {has[:16]}.., and says {record.digest[:16]}..: it is "
            f"damaged. Fetch the file again."
        )
    return record


def _begins(path: Path) -> bytes:
    """Return the first bytes of a file."""
    with path.open("rb") as file:
        return file.read(len(MAGIC))

"""Finding the run record of a checkpoint: in its folder, or inside a GGUF without a folder. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from nearplane.errors import FormatError
from nearplane.formats.gguf.gguf_header import FILE, MAGIC, NUMBER, RECORD_KEY, check_metadata, read_header
from nearplane.number_formats import GGUF_TYPES
from nearplane.record.record import RunRecord
from nearplane.record.record_file import parsed_record, read_record
from nearplane.system.files import digest_of
from nearplane.system.paths import RECORD, is_gguf
from nearplane.system.recorded_hashes import check_digest, check_hashes


def find_record(out: Path) -> RunRecord:
    """Return the record of a checkpoint in a folder or in a GGUF; the latter lacks times and hashes of files.

    Args:
        out: A folder that nearplane wrote, or its `model.gguf` alone, under any name.

    Raises:
        FormatError: The record is missing or cannot be read.
        ModelError: The GGUF is damaged.
    """
    if out.is_file() and _begins(out) == MAGIC:
        return embedded_record(out)
    if (out / FILE).is_file() and not (out / RECORD).exists():
        return embedded_record(out / FILE)
    record = read_record(out)
    check_digest(out, record.digest)
    return record


def embedded_record(path: Path) -> RunRecord:
    """Return the record inside a GGUF.

    Raises:
        FormatError: The record is missing or cannot be read.
        ModelError: The file is no GGUF, or damaged.
    """
    header = read_header(path)
    text = header.fields.get(RECORD_KEY)
    if not isinstance(text, str) or not text.strip():
        raise FormatError(f"{path} has no run record in its key {RECORD_KEY}: expected a GGUF that nearplane wrote.")
    check_metadata(path, header)
    record = parsed_record(text, str(path))
    if (actual := digest_of(text.strip())) != record.digest:
        raise FormatError(
            f"{path}: the run record in the key {RECORD_KEY} is damaged: its digest is {actual[:16]}.., expected "
            f"{record.digest[:16]}... Fetch the file again."
        )
    return record


def sound_record(folder: Path) -> RunRecord:
    """Return the record of a checkpoint in a folder, after comparing all its files with the record.

    Raises:
        FormatError: The record is missing or damaged, or a file differs from it.
    """
    record = read_record(folder)
    check_hashes(folder)
    return record


def foreign_tensors(path: Path) -> list[tuple[str, str, str, str]] | None:
    """Return (name, type, shape, bytes) of the tensors in a GGUF of another program; None for any other path.

    Raises:
        ModelError: The file is damaged, or describes a network that nearplane does not write.
    """
    if not is_gguf(path) or (header := read_header(path)).own:
        return None
    from nearplane.formats.gguf.network_config import config_of  # imports torch

    config_of(path, header)
    types = {number: name.lower() for name, number in NUMBER.items()} | {
        each.number: each.name for each in GGUF_TYPES.values()
    }
    return [
        (info.name, types[info.type], " x ".join(map(str, info.shape)), f"{info.size:,}") for info in header.tensors
    ]


def _begins(path: Path) -> bytes:
    """Return the first bytes of a file."""
    with path.open("rb") as file:
        return file.read(len(MAGIC))

"""The files of a checkpoint, compared with the hashes in its run record. Needs no torch."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nearplane.errors import FormatError
from nearplane.system.files import digest_of, read_object, sha256
from nearplane.system.paths import ADAPTERS, RECORD

WEIGHT_ENDS = (".safetensors", ".gguf")  # ends of names of weight files
EDITED = ("generation_config.json", "chat_template", "additional_chat_templates/")  # users adapt these to their prompts
UNCHECKED = (*EDITED, *ADAPTERS)  # adapters are refused; older versions copied them, and users have to delete them


def check_hashes(folder: Path, *, weights: bool = True) -> None:
    """Refuse a checkpoint that has changed since it was written. A folder without run record is not checked.

    Files for generation settings and chat templates may be edited.

    Args:
        folder: Folder of the checkpoint.
        weights: Whether weight files are hashed, which reads all their bytes on all cores.

    Raises:
        FormatError: A file is missing or has another SHA-256, or the run record was changed.
    """
    if not (folder / RECORD).is_file():
        return
    record = read_object(folder / RECORD, expected="Fetch the file again")
    hashes = record.get("files")
    check_digest(folder, record.get("digest"))
    if not isinstance(hashes, dict) or not all(isinstance(each, str) for each in hashes.values()):
        raise FormatError(f"{folder / RECORD} has no list of files with their SHA-256. Fetch the file again.")
    names = [name for name in hashes if not name.startswith(UNCHECKED) and (weights or not name.endswith(WEIGHT_ENDS))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, digest in zip(names, pool.map(lambda name: _digest(folder, name), names), strict=True):
            if digest != hashes[name]:
                state = f"has the SHA-256 {digest[:16]}.." if digest else "is missing"
                raise FormatError(
                    f"{folder / name} {state}, but {RECORD} lists {hashes[name][:16]}..: the file is damaged, was "
                    f"changed or belongs to another checkpoint. Fetch the folder again."
                )


def check_digest(folder: Path, expected: object) -> None:
    """Refuse a run record that differs from its digest.

    Raises:
        FormatError: The record was changed or is damaged.
    """
    if expected and (digest := digest_of((folder / RECORD).read_text(encoding="utf-8"))) != expected:
        raise FormatError(
            f"{folder / RECORD} was changed or is damaged: its digest is {digest[:16]}.., but it names "
            f"{str(expected)[:16]}... Fetch the file again."
        )


def _digest(folder: Path, name: str) -> str:
    """Return the SHA-256 of a file named in a record; an empty text unless it is a file in the folder."""
    path = folder / name
    inside = ".." not in Path(name).parts and not Path(name).is_absolute()
    try:
        inside = inside and path.is_file()
    except OSError:  # no file can have such a name
        return ""
    return sha256(path) if inside else ""

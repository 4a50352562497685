"""SHA-256 of files: of a checkpoint, compared with its run record, and of the files that a run reads. Needs no torch."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from nearplane.errors import FormatError, ModelError
from nearplane.system.files import read_object, sha256, size_and_date
from nearplane.system.paths import ADAPTERS, RECORD

WEIGHTS = (".safetensors", ".gguf")  # ends of names of weight files
EDITED = ("generation_config.json", "chat_template", "additional_chat_templates/")  # users adapt these to their prompts
UNCHECKED = (*EDITED, *ADAPTERS)  # adapters are refused; older versions copied them, and users have to delete them


class HashedFiles:
    """Files that a run reads, hashed once; later their sizes and dates say which of them must be hashed again.

    Args:
        paths: Path of every file, by its name in messages.

    Attributes:
        hashes: SHA-256 of every file, by the same names.

    Raises:
        ModelError: A file cannot be read.
    """

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = dict(paths)
        self._dates = {name: size_and_date(path) for name, path in paths.items()}  # before the bytes are read
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                self.hashes = dict(zip(paths, pool.map(sha256, paths.values()), strict=True))
        except OSError as error:
            raise ModelError(f"A file of the model cannot be read ({error}). Fetch or remove it.") from error

    def check(self) -> None:
        """Refuse files that have changed since they were hashed. A file with a new date and equal bytes has not.

        Raises:
            ModelError: A file is missing or has other bytes.
        """
        for name, path in self._paths.items():
            if (date := size_and_date(path)) == self._dates[name]:
                continue
            digest = ""
            with suppress(OSError):
                digest = sha256(path)
            if digest != self.hashes[name]:
                state = "is missing or cannot be read"
                if digest:
                    state = f"has the SHA-256 {digest[:16]}.., at the start it had {self.hashes[name][:16]}.."
                raise ModelError(
                    f"{path} {state}: it was changed while this run read it. Restore it and repeat the command, or start again "
                    f"with --overwrite."
                )
            self._dates[name] = date


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
    names = [name for name in hashes if not name.startswith(UNCHECKED) and (weights or not name.endswith(WEIGHTS))]
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


def digest_of(text: str) -> str:
    """Return the digest of a record's JSON: the SHA-256 of the text with an empty digest."""
    return hashlib.sha256(re.sub(r'"digest": "[0-9a-f]*"', '"digest": ""', text).encode()).hexdigest()


def _digest(folder: Path, name: str) -> str:
    """Return the SHA-256 of a file named in a record; an empty text unless it is a file in the folder."""
    path = folder / name
    inside = ".." not in Path(name).parts and not Path(name).is_absolute()
    try:
        inside = inside and path.is_file()
    except OSError:  # no file can have such a name
        return ""
    return sha256(path) if inside else ""

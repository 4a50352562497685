"""Operations on files and folders: write atomically, flush, hash, lock, read JSON objects. Needs no torch.

Hashes are SHA-256.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import NoneType
from typing import Any

from filelock import FileLock, Timeout

from nearplane.errors import FormatError, ModelError, NearplaneError, RecipeError, first_few, first_line

LOCK_TIMEOUT = 0.5  # seconds to wait for a lock, so that a process that is just ending can release it
MAX_JSON_BYTES = 256 * 2**20  # far above the index of the largest models, which has ten million bytes
MAX_JSON_LEVELS = 64  # nested lists and objects; a config has at most five
JSON_KINDS = {NoneType: "null", list: "a list", str: "text", bool: "true or false"}  # in errors; others are numbers


def check_writable(folder: Path) -> None:
    """Make a folder if it is missing, and refuse one in which no file can be written.

    Raises:
        RecipeError: The path is a file, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RecipeError(f"{folder} is not a folder that can be written ({error}). Choose another folder.") from error


def check_output(folder: Path, starts: Sequence[str], command: str) -> None:
    """Make a folder for the output of a command, or refuse one with files that the command does not write.

    Args:
        folder: Path of the folder; a model or a checkpoint may be in it.
        starts: Beginnings of the names that the command writes.
        command: The command, for the message.

    Raises:
        RecipeError: The folder has other files or cannot be written.
    """
    check_writable(folder)
    if others := sorted(path.name for path in folder.iterdir() if not path.name.startswith(tuple(starts))):
        raise RecipeError(
            f"{folder} has files that {command} did not write: {first_few(others)}. Choose a new or empty folder."
        )


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: into a temporary file beside it, which is then renamed. Its folder is made if missing.

    Raises:
        FormatError: The disk is full or the folder cannot be written; an old file is unchanged.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.exists() and not path.is_file():
            raise FileExistsError(f"it exists and is not a file: {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("xb") as file:
            file.write(content)
        part.replace(path)
    except OSError as error:
        raise FormatError(
            f"{path} could not be written ({error}). Free some space or choose another folder; an old file is unchanged."
        ) from error
    finally:
        with suppress(OSError):  # a file that was written whole was renamed
            part.unlink()


def flush(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on disk. Some network drives cannot do it for folders."""
    folder, windows = path.is_dir(), os.name == "nt"
    if folder and windows:
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not folder or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def flush_all(folder: Path) -> None:
    """Wait until a folder and everything in it is on disk."""
    for path in folder.rglob("*"):
        flush(path)
    flush(folder)


def size_and_date(path: Path) -> tuple[int, int, int] | None:
    """Return the bytes of a file and the nanoseconds of its last change, as it says and as the system says; None without a file.

    Programs that synchronize folders set the first to that of the file that they copy; nobody sets the second.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def exclusive_lock(lock: Path, refusal: str) -> Iterator[None]:
    """Hold a lock file that only one process can hold at a time.

    The lock ends with the process, even if it is killed; the file is deleted when the context ends.

    Args:
        lock: Path of the lock file; its folder is made if missing.
        refusal: Message of the error if another process holds the lock.

    Raises:
        RecipeError: Another process holds the lock, or the folder cannot be written.
        FormatError: The file cannot be made or locked.
    """
    file_lock = FileLock(lock, thread_local=False)
    check_writable(lock.parent)  # else the lock waits for it, as if another process held it
    try:
        file_lock.acquire(timeout=LOCK_TIMEOUT)
    except Timeout:
        raise RecipeError(refusal) from None
    except OSError as error:
        raise FormatError(
            f"{lock} could not be written or locked ({error}). Choose a folder that can be written."
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):
            lock.unlink()  # while it is held: a process that waits for this file then makes a new one
        file_lock.release()


def read_object(path: Path, *, expected: str, error: type[NearplaneError] = FormatError) -> dict[str, Any]:
    """Read a JSON file that holds an object. The file may come from an untrusted source.

    Args:
        path: Path of the file; pipes and devices are not opened.
        expected: One sentence, without full stop, that says what the file should be and what to do.
        error: Class of the error to raise.

    Raises:
        NearplaneError: An `error`: the file is missing, is not a JSON object, is too large or nests too deep.
    """
    try:
        if not path.is_file():
            missing = "it is a broken link" if path.is_symlink() else "the file is missing"
            raise ValueError("it is not a file" if path.exists() else missing)
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise ValueError(f"it has {size:,} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it contains {JSON_KINDS.get(type(content), 'a number')}, not an object")
        if (levels := _depth(content)) > MAX_JSON_LEVELS:
            raise ValueError(f"it nests {levels} levels deep")
    except RecursionError as reason:
        raise error(f"{path} cannot be read (it nests too deep). {expected}.") from reason
    except (OSError, ValueError) as reason:
        raise error(f"{path} cannot be read ({first_line(reason)}). {expected}.") from reason
    return content


def _depth(content: Any) -> int:
    """Return the number of nested levels of lists and objects in JSON; 0 for a number."""
    levels, level = 0, [content]
    while level := [part for part in level if isinstance(part, dict | list)]:
        levels += 1
        level = [inner for part in level for inner in (part.values() if isinstance(part, dict) else part)]
    return levels


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


def digest_of(text: str) -> str:
    """Return the digest of a record's JSON: the SHA-256 of the text with an empty digest."""
    return hashlib.sha256(re.sub(r'"digest": "[0-9a-f]*"', '"digest": ""', text).encode()).hexdigest()

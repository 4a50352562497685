"""Files and folders on disk: written whole or not at all, flushed, hashed, locked, swapped; JSON read as objects.

Knows nothing of what they hold; needs no torch.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import NoneType
from typing import Any

from filelock import FileLock, Timeout

from nearplane.errors import FormatError, NearplaneError, RecipeError, first_line

HERE, SWAP = -100, 2  # AT_FDCWD; RENAME_EXCHANGE of Linux and RENAME_SWAP of macOS
PATIENCE = 0.5  # seconds in which a process that is just ending gives its lock back
LONGEST = 256 * 2**20  # bytes of JSON; the index of the largest models has ten million
DEEPEST = 64  # levels of lists and objects; a config has at most five
CALLED = {NoneType: "null", list: "a list", str: "text", bool: "true or false"}  # JSON that is no object; else a number


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
        raise FormatError(
            f"{path} could not be written ({error}). Free some space or choose another place; what was there is as it was."
        ) from error
    finally:
        with suppress(OSError):  # of a whole one nothing is left
            part.unlink()


def flush(path: Path) -> None:
    """Wait until a file, or what a folder lists, is on disk; of folders only where the system can (some network drives cannot)."""
    folder, windows = path.is_dir(), os.name == "nt"
    if folder and windows:
        return
    number = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if not folder or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(number)


def flush_all(folder: Path) -> None:
    """Wait until all that a folder holds is on disk, and what it lists."""
    for path in folder.rglob("*"):
        flush(path)
    flush(folder)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def alone(lock: Path, refusal: str) -> Iterator[None]:
    """Hold a lock, which one process alone may do at a time; it ends with its process, however that ends.

    The file is gone when the context ends.

    Args:
        lock: the file, made together with its folder.
        refusal: what to say where another process holds it.

    Raises:
        RecipeError: another process holds it.
        FormatError: the file cannot be made or locked.
    """
    held = FileLock(lock, thread_local=False)
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held.acquire(timeout=PATIENCE)
    except Timeout:
        raise RecipeError(refusal) from None
    except OSError as error:
        raise FormatError(
            f"{lock} could not be written or locked ({error}). Choose a place that can be written."
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):
            lock.unlink()  # while it is held: whoever waits for this file finds that it is gone
        held.release()


def swap(one: Path, other: Path) -> bool:
    """Swap the names of two folders of one file system; return False where the system cannot, and nothing was done."""
    if sys.platform not in ("linux", "darwin"):
        return False
    library, a, b = ctypes.CDLL(None, use_errno=True), os.fsencode(one), os.fsencode(other)
    if function := getattr(library, "renameat2", None):
        return bool(function(HERE, a, HERE, b, SWAP) == 0)
    if function := getattr(library, "renamex_np", None):
        return bool(function(a, b, SWAP) == 0)
    return False


def read_object(path: Path, *, expected: str, error: type[NearplaneError] = FormatError) -> dict[str, Any]:
    """Read a JSON file that holds an object; of a checkpoint, anybody may have written it.

    Args:
        path: of the file; pipes and devices are not opened.
        expected: what the file should be and what to do, one sentence without a full stop.
        error: to raise.

    Raises:
        NearplaneError: of the kind `error`: there is no such file, or it is no JSON object, or a monstrous one.
    """
    try:
        if not path.is_file():
            raise ValueError("there is none" if not path.exists() else "it is no file")
        if (size := path.stat().st_size) > LONGEST:
            raise ValueError(f"it has {size:,} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"it holds {CALLED.get(type(data), 'a number')}, not an object")
        if (levels := _depth(data)) > DEEPEST:
            raise ValueError(f"it nests {levels} levels deep")
    except RecursionError as reason:
        raise error(f"{path} cannot be read (it nests too deep). {expected}.") from reason
    except (OSError, ValueError) as reason:
        raise error(f"{path} cannot be read ({first_line(reason)}). {expected}.") from reason
    return data


def _depth(data: Any) -> int:
    """Return how many levels of lists and objects JSON has: 0 for a number."""
    levels, level = 0, [data]
    while level := [part for part in level if isinstance(part, dict | list)]:
        levels += 1
        level = [inner for part in level for inner in (part.values() if isinstance(part, dict) else part)]
    return levels


def unordered(value: Any) -> Any:
    """Return JSON with its lists sorted."""
    if isinstance(value, dict):
        return {key: unordered(part) for key, part in value.items()}
    return sorted((unordered(part) for part in value), key=str) if isinstance(value, list) else value

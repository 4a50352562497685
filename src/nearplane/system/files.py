"""Operations on files and folders: write atomically, flush, hash, lock, swap, read JSON objects. Needs no torch.

Hashes are SHA-256: of the files of a checkpoint, compared with its run record, and of the files that a run reads.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import NoneType
from typing import Any

from filelock import FileLock, Timeout

from nearplane.errors import FormatError, ModelError, NearplaneError, RecipeError, first_few, first_line
from nearplane.system.paths import ADAPTERS, RECORD

CURRENT_FOLDER, SWAP_FLAG = -100, 2  # AT_FDCWD; RENAME_EXCHANGE (Linux) and RENAME_SWAP (macOS)
LOCK_TIMEOUT = 0.5  # seconds to wait for a lock, so that a process that is just ending can release it
MAX_JSON_BYTES = 256 * 2**20  # far above the index of the largest models, which has ten million bytes
MAX_JSON_LEVELS = 64  # nested lists and objects; a config has at most five
JSON_KINDS = {NoneType: "null", list: "a list", str: "text", bool: "true or false"}  # in errors; others are numbers
WEIGHT_ENDS = (".safetensors", ".gguf")  # ends of names of weight files
EDITED = ("generation_config.json", "chat_template", "additional_chat_templates/")  # users adapt these to their prompts
UNCHECKED = (*EDITED, *ADAPTERS)  # adapters are refused; older versions copied them, and users have to delete them


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


def swap(one: Path, other: Path) -> bool:
    """Swap two folders of one file system atomically; return False if the system cannot, in which case nothing changes."""
    if sys.platform not in ("linux", "darwin"):
        return False
    library, a, b = ctypes.CDLL(None, use_errno=True), os.fsencode(one), os.fsencode(other)
    if function := getattr(library, "renameat2", None):
        return bool(function(CURRENT_FOLDER, a, CURRENT_FOLDER, b, SWAP_FLAG) == 0)
    if function := getattr(library, "renamex_np", None):
        return bool(function(a, b, SWAP_FLAG) == 0)
    return False


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


def unordered(value: Any) -> Any:
    """Return JSON with its lists sorted, for comparisons that ignore order."""
    if isinstance(value, dict):
        return {key: unordered(part) for key, part in value.items()}
    return sorted((unordered(part) for part in value), key=str) if isinstance(value, list) else value


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

"""The folder beside OUT in which a checkpoint is written: locked by one run, renamed to OUT when it is complete.

    OUT.unfinished           the new checkpoint, marked INCOMPLETE until it is complete; a killed run leaves it
    OUT.unfinished/journal   data to resume the run, see `journal.py`; deleted when the checkpoint is complete
    OUT.unfinished.lock      lock file of the run that writes; the lock ends with the process, even if it is killed
    OUT/journal/old          the replaced content of OUT, until it is deleted

This module handles folders, not their contents. OUT is never missing if the system can swap two folders. Otherwise two
renames replace it; a run that is killed between them leaves the old content in OUT.unfinished/journal/old. The next run
repairs that, and the same command finishes.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import socket
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from fnmatch import fnmatch
from itertools import product
from pathlib import Path

from nearplane.errors import FormatError, NearplaneError, RecipeError, first_few
from nearplane.system.files import exclusive_lock, flush, flush_all
from nearplane.system.paths import (
    CARD,
    INCOMPLETE,
    JOURNAL,
    MARK,
    NEEDED,
    RECORD,
    UNFINISHED,
    check_path,
    refuse_adapter,
    refuse_overlap,
)

CURRENT_FOLDER, SWAP_FLAG = -100, 2  # AT_FDCWD; RENAME_EXCHANGE (Linux) and RENAME_SWAP (macOS)
STATE = "state.json"  # in the journal: its presence means that the run can be resumed
OLD_NAME = "old"  # in the journal: the old content of OUT; empty between a swap and the move of that content
# files that --overwrite replaces if OUT has no run record
PATTERNS = ("*.safetensors", "model.gguf", "*.json", *NEEDED, INCOMPLETE)

log = logging.getLogger(__name__)


class Unfinished:
    """A context in which only one run writes `folder`, which is renamed to `out` when the context ends without an error.

    Nothing is changed before the context begins. After an error the written files stay in `folder`, which is deleted if it
    has none. An error that stops the program (Ctrl-C) gets a note about the files on disk.

    Args:
        out: A new or empty folder, or with `overwrite` a checkpoint of nearplane, kept until the new one is complete.
        overwrite: Whether the checkpoint in `out` may be replaced; files of others in it are kept.
        resumes: Whether to keep the files of a run that can be resumed; the caller resumes it or calls `clear`.
        sources: Folders that are read, which may not overlap with `out`.

    Raises:
        RecipeError: `out` cannot be replaced, is not empty, overlaps with a source, or is written by another run.
        FormatError: `out` cannot be read.
        ModelError: `out` holds an adapter, which would be kept.
    """

    def __init__(
        self, out: Path, *, overwrite: bool = False, resumes: bool = False, sources: Iterable[Path] = ()
    ) -> None:
        self.out, self._overwrite, self._resumes = out, overwrite, resumes
        check_path("output", out)
        self._place, self._held = out.resolve(), ExitStack()
        _check_replaceable(out, self._place)
        self.folder = self._place.with_name(self._place.name + UNFINISHED)
        check_path("output", f"{self.folder}.lock")
        for written, source in product((out, self.folder), sources):
            refuse_overlap(written, source)
        for folder in (self._place, self.folder):
            if folder.is_dir() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                raise RecipeError(f"{folder} cannot be written: Permission denied. Choose another folder.")
        with readable_errors(out):
            self._check_free()

    def _check_free(self) -> None:
        """Refuse an `out` with content that may not be replaced."""
        if not self._place.exists() or (self._place.is_dir() and not any(self._place.iterdir())):
            return
        if not self._place.is_dir():
            raise RecipeError(f"{self.out} is a file. Choose another folder.")
        if not (self._place / RECORD).is_file() and not (self._place / INCOMPLETE).is_file():
            raise RecipeError(
                f"{self.out} exists and is not empty. It has neither {RECORD} nor {INCOMPLETE}, so nearplane did not write it. "
                f"Empty it or choose another folder."
            )
        if not self._overwrite:
            raise RecipeError(
                f"{self.out} exists and is not empty. Choose another folder, or replace it with --overwrite."
            )
        refuse_adapter(self.out)  # it would be kept, as a file of others, beside weights that it does not fit

    def __enter__(self) -> Unfinished:
        refusal = (
            f"{self.out} is being written by another run{_writer(self.folder)}. Wait for it, or choose another folder."
        )
        with ExitStack() as stack:
            stack.enter_context(exclusive_lock(Path(f"{self.folder}.lock"), refusal))
            self._recover()
            self._check_free()  # again: a run may have ended since
            self._begin()
            self._held = stack.pop_all()
        return self

    def _begin(self) -> None:
        """Make the folder, or delete the files of an unfinished run in it."""
        if self.folder.is_symlink() or self.folder.exists():
            self._check_ours()
            if self.whole:
                return
            if not (self._resumes and self.resumable):
                self.refuse_stopped()
                self.clear()
        self._mark()

    def refuse_stopped(self) -> None:
        """Raise RecipeError if the folder holds a run that can be resumed and may not be replaced."""
        if self.resumable and not self._overwrite:
            raise RecipeError(
                f"{self.folder} belongs to a stopped run. Repeat the command of that run to resume it, delete the folder, "
                f"or choose another folder."
            )

    def _mark(self) -> None:
        """Mark the folder as incomplete, and name the process that writes it."""
        self.folder.mkdir(exist_ok=True)
        flush(self.folder.parent)
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        try:
            (self.folder / INCOMPLETE).write_text(
                f"{MARK}process {os.getpid()} on {socket.gethostname()}, since {now}\n"
            )
        except BaseException:
            self._remove_if_nothing_is_written()
            raise

    @property
    def resumable(self) -> bool:
        """Whether the folder holds a run that can be resumed."""
        return (self.folder / JOURNAL / STATE).is_file()

    @property
    def whole(self) -> bool:
        """Whether the checkpoint is complete: its run was stopped just before the folder was renamed."""
        return (self.folder / RECORD).is_file() and not (self.folder / INCOMPLETE).exists()

    def clear(self) -> None:
        """Delete the files of an unfinished run."""
        if self.whole:
            self._mark()
        leftovers = [path for path in self.folder.iterdir() if path.name != INCOMPLETE]
        if leftovers:
            log.warning("%s is left from an unfinished run and is deleted: the work starts again.", self.folder)
        leftovers.sort(key=lambda path: path.name != JOURNAL)  # the journal first: it is useless without the others
        for path in leftovers:  # the mark stays, so that a half deleted folder is recognized
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def _check_ours(self) -> None:
        """Refuse to empty a folder that is complete, or that nearplane did not write."""
        if self.folder.is_dir() and not self.folder.is_symlink():
            if (self.folder / INCOMPLETE).is_file() or not any(self.folder.iterdir()):
                return
            if self._resumes and self.resumable and self.whole:
                return
            if (self.folder / RECORD).is_file():
                raise RecipeError(
                    f"{self.folder} is a complete checkpoint: its run was stopped before it was renamed to {self.out}. Rename or "
                    f"delete it, and repeat the command."
                )
        raise RecipeError(
            f"{self.folder}, where {self.out} would be written, has no {INCOMPLETE}, so nearplane did not write it. Choose "
            f"another folder."
        )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._put_in_place()
                return
            unwritten = self._remove_if_nothing_is_written()
            if not isinstance(error, NearplaneError):  # stopped by a signal, or a fault of the program
                error.add_note(self._left(unwritten, fault=isinstance(error, Exception)))
        finally:
            self._held.close()

    def _left(self, unwritten: bool, *, fault: bool) -> str:
        """Return a sentence on the files that a stopped run left on disk; a fault of the program would come again."""
        old = f"{self.out} is unchanged" if self._place.is_dir() and any(self._place.iterdir()) else ""
        if unwritten:
            return f"Nothing was written{'; ' * bool(old)}{old}.{' Repeat the command.' * (not fault)}"
        left = f"The unfinished checkpoint is in {self.folder}{'; ' * bool(old)}{old}."
        if fault:
            return left
        return f"{left} Repeat the command to {'resume' if self._resumes and self.resumable else 'start again'}."

    def _remove_if_nothing_is_written(self) -> bool:
        with suppress(OSError):
            if {path.name for path in self.folder.iterdir()} <= {INCOMPLETE, JOURNAL} and not self.resumable:
                shutil.rmtree(self.folder)
                return True
        return False

    def _put_in_place(self) -> None:
        """Rename the folder to `out`, then delete the replaced files; files that nearplane did not write are kept."""
        old = self.folder / JOURNAL / OLD_NAME
        try:
            self._check_free()  # other programs may have written there meanwhile
            if self._place.is_dir():
                self.folder.chmod(stat.S_IMODE(self._place.stat().st_mode))
            if self._place.is_dir() and any(self._place.iterdir()):
                old.mkdir(parents=True, exist_ok=True)
                flush_all(old.parent)
                flush(self.folder)
                if not swap(self.folder, self._place):
                    old.rmdir()
                    self._place.rename(old)
                    self.folder.rename(self._place)
            else:
                if self._place.is_dir():
                    self._place.rmdir()
                self.folder.rename(self._place)
        except BaseException as error:
            self._undo()
            if isinstance(error, OSError | RecipeError):
                raise FormatError(
                    f"{self.folder} is complete but could not be renamed to {self.out} ({error}). Rename it yourself."
                ) from error
            error.add_note(f"{self.folder} is complete: rename it to {self.out}.")
            raise
        try:
            flush(self._place.parent)
        except OSError as error:
            log.warning("%s is complete, but a power cut now could still undo its renaming (%s).", self.out, error)
        self._settle()
        self._warn_of_others()

    def _warn_of_others(self) -> None:
        """Log the files in `out` that its record does not list, since `nearplane verify` reports them as faults."""
        others: list[str] = []
        with suppress(OSError):
            if (self._place / RECORD).is_file():
                others = sorted({path.name for path in self._place.iterdir()} - _written(self._place) - {CARD})
        if others:
            log.warning("%s has files that nearplane did not write: %s. Move them away.", self.out, first_few(others))

    def _undo(self) -> None:
        """Restore the old content of `out` if only the first of two renames was made."""
        old = self.folder / JOURNAL / OLD_NAME
        if old.is_dir() and not self._place.exists():
            old.rename(self._place)

    def _recover(self) -> None:
        """Clean up after a killed run: undo half a replacement, or finish a whole one."""
        self._undo()
        if (self._place / JOURNAL / OLD_NAME).is_dir() and (self._place / RECORD).is_file():
            self._settle()

    def _settle(self) -> None:
        """Delete the journal and the replaced files in `out`; files of others move into the new checkpoint."""
        old = self._place / JOURNAL / OLD_NAME
        try:
            if old.is_dir() and not any(old.iterdir()) and self.folder.is_dir():
                self.folder.rename(old)  # the two were swapped
            if old.is_dir():
                run_files = _written(old) | {JOURNAL}  # the journal remains if a run is killed at its very end
                for path in list(old.iterdir()):
                    if path.name not in run_files and not (self._place / path.name).exists():
                        path.rename(self._place / path.name)
            if old.parent.is_dir():
                shutil.rmtree(old.parent)
        except OSError as error:
            log.warning("%s is complete. Delete its old files in %s, which remain (%s).", self.out, old.parent, error)


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


@contextmanager
def readable_errors(folder: Path) -> Iterator[None]:
    """Turn an `OSError` of the file system into a `FormatError`."""
    try:
        yield
    except OSError as error:
        raise FormatError(
            f"{folder} could not be written ({error}). Free some space and repeat the command. The folder does not load."
        ) from error


def _check_replaceable(out: Path, place: Path) -> None:
    """Refuse a folder that cannot be renamed.

    Args:
        out: The path as the user wrote it.
        place: The same path, resolved.
    """
    current = Path.cwd()
    if place.name.endswith(UNFINISHED):
        raise RecipeError(f"{out} ends in {UNFINISHED}, which marks unfinished checkpoints. Choose another name.")
    if place.is_mount() or place == current or place in current.parents:
        reason = "is a mount point" if place.is_mount() else "is or contains the current folder"
        raise RecipeError(f"{out} {reason}, so a finished checkpoint cannot replace it. Choose a folder inside it.")


def _writer(folder: Path) -> str:
    """Return the process that writes a folder, from its mark; an empty text if unknown."""
    with suppress(OSError, UnicodeDecodeError, IndexError):
        line = (folder / INCOMPLETE).read_text().splitlines()[1]
        return f": {''.join(letter for letter in line if letter.isprintable())[:200]}"
    return ""


def _written(folder: Path) -> set[str]:
    """Return the files and folders that the run of a checkpoint wrote: from its record, else by their names."""
    with suppress(OSError, ValueError, RecursionError, LookupError, TypeError):
        if recorded_names := {Path(name).parts[0] for name in json.loads((folder / RECORD).read_text())["files"]}:
            return recorded_names | {RECORD, INCOMPLETE}
    return {path.name for path in folder.iterdir() if any(fnmatch(path.name, pattern) for pattern in PATTERNS)}

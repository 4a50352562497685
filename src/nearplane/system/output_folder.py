"""The folder beside OUT in which a checkpoint is written: locked by one run, put in the place of OUT once it is whole.

    OUT.unfinished        what is written, marked INCOMPLETE until it is whole; a killed run leaves it
    OUT.unfinished/journal   what the same command needs to go on there, see `quantize_journal.py`; gone when all is whole
    OUT.unfinished.lock   locked by the run that writes; the lock ends with its process, however that ends
    OUT/journal/old       what OUT was, until it is deleted

Knows folders, not what is in them. Where the system can swap two folders, OUT is never missing; elsewhere two renames replace it,
and a run that is killed between them leaves what OUT was in OUT.unfinished/journal/old. The next run puts that right, and the
same command finishes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import stat
from contextlib import ExitStack, suppress
from datetime import datetime
from fnmatch import fnmatch
from pathlib import Path

from nearplane.errors import FormatError, NearplaneError, RecipeError
from nearplane.system.files import alone, flush, flush_all, swap
from nearplane.system.paths import INCOMPLETE, JOURNAL, RECORD, UNFINISHED
from nearplane.system.safetensors_files import MARK

STATE = "state.json"  # in the journal: what is there is enough to go on
OLD = "old"  # in the journal: what OUT was; empty where the two folders were swapped, until it comes there
# by --overwrite
REPLACED = ("*.safetensors", "model.gguf", "*.json", "*.jinja", "*.model", "vocab.txt", "merges.txt", INCOMPLETE)

log = logging.getLogger(__name__)


class Unfinished:
    """A context in which one run alone writes `folder`; when it ends without an error, `folder` becomes `out`.

    Nothing is touched before the context begins. After an error, what was written stays in `folder`; where that is
    nothing, no trace is left. An error that stops the program (Ctrl-C) gets a note that says what is on disk.

    Args:
        out: a new or empty folder, or with `overwrite` a checkpoint of nearplane, which stays until the new one is whole.
        overwrite: replace the checkpoint in `out`; other files in it are kept.
        resumes: keep what a run left that can be gone on with; the caller does that, or calls `clear`.

    Raises:
        RecipeError: `out` cannot be replaced as a whole, is in use, or another run writes it.
    """

    def __init__(self, out: Path, *, overwrite: bool = False, resumes: bool = False) -> None:
        self.out, self._overwrite, self._resumes = out, overwrite, resumes
        self._place = out.resolve()
        _check_replaceable(out, self._place)
        self.folder = self._place.with_name(self._place.name + UNFINISHED)
        self._held = ExitStack()
        self._check_free()

    def _check_free(self) -> None:
        """Refuse an `out` that holds what may not be replaced."""
        if not self._place.exists() or (self._place.is_dir() and not any(self._place.iterdir())):
            return
        if not self._overwrite:
            raise RecipeError(
                f"{self.out} exists and is not empty. Choose another folder, or replace it with --overwrite."
            )
        if not (self._place / RECORD).is_file() and not (self._place / INCOMPLETE).is_file():
            raise RecipeError(
                f"{self.out} holds files but neither {RECORD} nor {INCOMPLETE}: nearplane did not write it. Empty it first, "
                f"or choose another folder."
            )

    def __enter__(self) -> Unfinished:
        refusal = (
            f"{self.out} is being written by another run{_writer(self.folder)}. Wait until it has ended, or choose another "
            f"folder."
        )
        with ExitStack() as stack:
            stack.enter_context(alone(Path(f"{self.folder}.lock"), refusal))
            self._recover()
            self._check_free()  # again: a run may have ended since
            self._begin()
            self._held = stack.pop_all()
        return self

    def _begin(self) -> None:
        """Make the folder, or empty that of a run that did not finish."""
        if self.folder.is_symlink() or self.folder.exists():
            self._check_ours()
            if self.whole:
                return
            if not (self._resumes and self.goes_on):
                if self.goes_on and not self._overwrite:
                    raise RecipeError(
                        f"{self.folder} is of a run that was stopped, and the command that began it goes on there; this one does "
                        f"not. Give that command again, delete the folder, or choose another one."
                    )
                self.clear()
        self._mark()

    def _mark(self) -> None:
        """Mark the folder as not whole, and who writes it."""
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
    def goes_on(self) -> bool:
        """Whether a run left what can be gone on with."""
        return (self.folder / JOURNAL / STATE).is_file()

    @property
    def whole(self) -> bool:
        """Whether a run left all of it, and was stopped before it could put it in place."""
        return (self.folder / RECORD).is_file() and not (self.folder / INCOMPLETE).exists()

    def clear(self) -> None:
        """Delete what a run left."""
        if self.whole:
            self._mark()
        found = [path for path in self.folder.iterdir() if path.name != INCOMPLETE]
        if found:
            log.warning("%s is of a run that did not finish: it is deleted, and the work begins again.", self.folder)
        found.sort(key=lambda path: path.name != JOURNAL)  # first: without the rest it is worth nothing
        for path in found:  # the mark stays: what is left of a folder half deleted is known by it
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def _check_ours(self) -> None:
        """Refuse to empty a folder that is whole, or that no run of nearplane left."""
        if self.folder.is_dir() and not self.folder.is_symlink():
            if (self.folder / INCOMPLETE).is_file() or not any(self.folder.iterdir()):
                return
            if self._resumes and self.goes_on and self.whole:
                return
            if (self.folder / RECORD).is_file():
                raise RecipeError(
                    f"{self.folder} is a whole checkpoint: a run was stopped before it could rename it to {self.out}. Rename it, "
                    f"or delete it, and run again."
                )
        raise RecipeError(
            f"{self.folder} is where {self.out} would be written, and nearplane did not make it: no {INCOMPLETE} is in it. "
            f"Move it away, or choose another folder."
        )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._put_in_place()
                return
            nothing = self._remove_if_nothing_is_written()
            if not isinstance(error, NearplaneError):  # stopped from outside, or a fault
                error.add_note(self._left(nothing))
        finally:
            self._held.close()

    def _left(self, nothing: bool) -> str:
        """Say what a run that was stopped left on disk."""
        old = f"{self.out} is as it was" if self._place.is_dir() and any(self._place.iterdir()) else ""
        if nothing:
            return f"Nothing was written{'; ' * bool(old)}{old}. Run the same command again."
        how = "goes on from there" if self._resumes and self.goes_on else "begins anew"
        return (
            f"What is done lies in {self.folder}, which nothing loads{'; ' * bool(old)}{old}. Run the same command again: "
            f"it {how}."
        )

    def _remove_if_nothing_is_written(self) -> bool:
        with suppress(OSError):
            if {path.name for path in self.folder.iterdir()} <= {INCOMPLETE, JOURNAL} and not self.goes_on:
                shutil.rmtree(self.folder)
                return True
        return False

    def _put_in_place(self) -> None:
        """Rename the folder to `out`; what was there is deleted afterwards, but for files that nearplane did not write."""
        old = self.folder / JOURNAL / OLD
        try:
            self._check_free()  # others may have written there meanwhile
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
                    f"{self.folder} is whole but could not become {self.out} ({error}). Rename it yourself; no work is lost."
                ) from error
            error.add_note(f"{self.folder} is whole: rename it to {self.out}.")
            raise
        try:
            flush(self._place.parent)
        except OSError as error:
            log.warning("%s is whole; a power cut now could still take its name away (%s).", self.out, error)
        self._settle()

    def _undo(self) -> None:
        """Give `out` back what was in it, if only the first of two renames was made."""
        old = self.folder / JOURNAL / OLD
        if old.is_dir() and not self._place.exists():
            old.rename(self._place)

    def _recover(self) -> None:
        """Undo half a swap in which a run was killed; of a whole one, delete what it replaced."""
        self._undo()
        if (self._place / JOURNAL / OLD).is_dir() and (self._place / RECORD).is_file():
            self._settle()

    def _settle(self) -> None:
        """Delete the journal in `out`, and what was replaced; files in that which no run wrote move to its successor."""
        old = self._place / JOURNAL / OLD
        try:
            if old.is_dir() and not any(old.iterdir()) and self.folder.is_dir():
                self.folder.rename(old)  # the two were swapped
            if old.is_dir():
                ours = _written(old) | {JOURNAL}  # left by a run that was killed at its very end
                for path in list(old.iterdir()):
                    if path.name not in ours and not (self._place / path.name).exists():
                        path.rename(self._place / path.name)
            if old.parent.is_dir():
                shutil.rmtree(old.parent)
        except OSError as error:
            log.warning("%s is whole; of what it replaced, %s is left (%s). Delete it.", self.out, old.parent, error)


def _check_replaceable(out: Path, place: Path) -> None:
    """Refuse a folder that cannot be renamed.

    Args:
        out: as the user named it.
        place: the same, resolved.
    """
    here = Path.cwd()
    if place.name.endswith(UNFINISHED):
        raise RecipeError(f"{out} ends in {UNFINISHED}, as folders do that are not whole yet. Choose another name.")
    if place.is_mount() or place == here or place in here.parents:
        what = "is a mount point" if place.is_mount() else "is or holds the current folder"
        raise RecipeError(f"{out} {what}: a finished checkpoint cannot be put in its place. Choose a folder inside it.")


def _writer(folder: Path) -> str:
    """Return who writes a folder, as its mark says."""
    with suppress(OSError, UnicodeDecodeError, IndexError):
        line = (folder / INCOMPLETE).read_text().splitlines()[1]
        return f": {''.join(letter for letter in line if letter.isprintable())[:200]}"
    return ""


def _written(folder: Path) -> set[str]:
    """Return which files and folders in a checkpoint are of the run that wrote it: by its record, else by their names."""
    with suppress(OSError, ValueError, RecursionError, LookupError, TypeError):
        if recorded := {Path(name).parts[0] for name in json.loads((folder / RECORD).read_text())["files"]}:
            return recorded | {RECORD, INCOMPLETE}
    return {path.name for path in folder.iterdir() if any(fnmatch(path.name, pattern) for pattern in REPLACED)}

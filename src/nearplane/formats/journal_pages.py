"""The journal of a run, from which it can be resumed: a folder of pages that are written to disk atomically.

    OUT.unfinished/journal/
      state.json          the run inputs and the progress; it is written after all other pages
      NAME.pt             tensors that are needed to resume

This file compares run inputs and writes pages. `journal.py` and `tuning/loop.py` define the contents of the
pages.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import zip_longest
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from torch import Tensor

from nearplane.errors import FormatError, ModelError, RecipeError, first_few, first_line, printable
from nearplane.formats.container import Container
from nearplane.record.record import RunRecord
from nearplane.record.record_file import parsed_record, read_record
from nearplane.system.device import Device
from nearplane.system.files import HashedFiles, flush, read_object, sha256
from nearplane.system.matmul_library import processor
from nearplane.system.output_folder import STATE, readable_errors
from nearplane.system.paths import INDEX, JOURNAL, NEEDED, is_listed
from nearplane.system.safetensors_files import read_index
from nearplane.system.sizes import size_text

VERSION = 10  # of the journal; journals of other versions are refused
# suffixes of a model's files that are run inputs
HASHED_SUFFIXES = {".safetensors", ".gguf", ".json", ".model", ".txt", ".jinja", ".py"}
MAX_JOURNAL_SHARE = 0.05  # fraction of a run's time for writing pages; after quick blocks none is written
MAX_NAMED_DIFFERENCES = 3  # in a refusal
SHOWN, LEAD = 24, 8  # characters of a long value from where it differs on, and before
REMEDY = "Delete the folder, or start again with --overwrite"

Progress = TypeVar("Progress")
log = logging.getLogger("nearplane")


@dataclass(frozen=True, slots=True)
class RunInputs:
    """All that the output of a run depends on: equal inputs give equal files.

    Args:
        values: The inputs as flat JSON.
        files: The files among them.
    """

    values: dict[str, Any]
    files: HashedFiles


def run_inputs(
    recipe: Any, files: Mapping[str, Path], text: str, versions: Mapping[str, str], device: Device
) -> RunInputs:
    """Return the run inputs, after hashing all files.

    Args:
        recipe: The recipe as JSON.
        files: Folders whose files are hashed, or single files, by their names in messages.
        text: Digest of the tokens.
        versions: Versions of the packages that compute.
        device: The device that computes.

    Raises:
        ModelError: A file cannot be read.
    """
    paths = {f"the {title}'s {name}": path for title, folder in files.items() for name, path in _hashed(folder)}
    options, hashed = json.loads(json.dumps({"recipe": recipe})), HashedFiles(paths)
    others = {"calibration text": text, "device": device.run_input()}
    others |= {f"version of {name}": number for name, number in versions.items()}
    return RunInputs(dict(_flat(options)) | hashed.hashes | others, hashed)


def _hashed(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of one file, or of a model's files that are inputs, in the folder or named by its index."""
    if folder.is_file():
        yield folder.name, folder
        return
    names = (path for path in folder.iterdir() if path.suffix in HASHED_SUFFIXES or is_listed(path.name, NEEDED))
    paths = {path for path in names if path.is_file()}
    if (folder / INDEX).is_file():
        paths.update(folder / name for name in read_index(folder / INDEX)[0])
    for path in sorted(paths):
        yield path.relative_to(folder).as_posix(), path


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}".removeprefix("."))
    else:
        yield name.removeprefix("recipe.").removeprefix("scheme."), value


class JournalPages:
    """Journal of one run.

    Args:
        container: The container that the run writes, just entered.
        inputs: The run inputs.
        began: The start of the run by `time.perf_counter`; None: now.

    Attributes:
        room: Whether the disk still has room for pages.
    """

    def __init__(self, container: Container, inputs: RunInputs, began: float | None = None) -> None:
        self._container, self._inputs, self._files = container, inputs.values, inputs.files
        self._sealed: RunRecord | None = None  # of a stopped run that had written all layers
        self._folder = container.folder / JOURNAL
        self._began = began or time.perf_counter()
        self._pages: dict[str, str] = {}  # SHA-256 of the pages that the state on disk needs, or the first state will
        self._kept, self._cost = time.perf_counter(), 0.0  # time of the last page, and seconds to write it
        self.room = True

    def check_sources(self) -> None:
        """Refuse files that have changed since the run began to read them; see `HashedFiles.check`."""
        self._files.check()

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken, including those before it was stopped."""
        return time.perf_counter() - self._began

    def progress(self, understood: Callable[[Mapping[str, Any]], Progress]) -> Progress | None:
        """Return the progress of a stopped run with equal inputs, or None if there is none or all layers are written.

        With --overwrite a run that cannot be resumed is deleted with a warning.

        Args:
            understood: The function that makes the progress from the state; missing fields become a `FormatError`.

        Raises:
            RecipeError: The stopped run had other inputs, and may not be replaced; the message names the differences.
            FormatError: The journal or a file is damaged, and may not be replaced.
        """
        if not self._container.resumable:
            return None
        try:
            return self._read(understood)
        except (FormatError, ModelError) as error:  # a damaged GGUF raises the second
            if not self._container.place.overwrite:
                if isinstance(error, FormatError):
                    raise
                raise FormatError(f"The files of the stopped run cannot be read: {error} {REMEDY}.") from error
            log.warning("%s", error)
            self._container.restart()
            return None

    def _read(self, understood: Callable[[Mapping[str, Any]], Progress]) -> Progress | None:
        state = read_object(self._folder / STATE, expected=REMEDY)
        if state.get("version") != VERSION or not isinstance(state.get("told"), dict):
            raise self._version_error(state)
        if state.get("digest") != _digest(state):
            raise self.changed_page(STATE)
        if differing := differing_inputs(state["told"], self._inputs):
            if not self._container.place.overwrite:
                raise RecipeError(
                    f"{self._container.folder} belongs to a stopped run with other inputs: {differing}. Repeat the command of "
                    f"that run to resume it, add --overwrite to start again, or choose another folder."
                )
            log.warning("The stopped run had other inputs: %s. It is deleted, and the work starts again.", differing)
            self._container.restart()
            return None
        if self._container.whole:
            for name, written in read_record(self._container.folder).files.items():  # did all files reach the disk?
                if not (path := self._container.folder / name).is_file() or sha256(path) != written:
                    raise FormatError(f"{path} has changed since it was written. {REMEDY}.")
            log.info("the stopped run had already written all files: %s", self._container.folder)
            return None
        try:
            self._pages = dict(state["pages"])
            self._container.resume(state["container"])
            progress: Progress | None = None
            if (sealed := state.get("sealed")) is None:
                progress = understood(state)
            else:
                self._sealed = parsed_record(sealed["record"])
                self._container.config, self._container.room = dict(sealed["config"]), int(sealed["room"])
                log.info("the stopped run had already written all layers: %s", self._container.folder)
            if state["processor"] != (here := processor()):
                log.warning(
                    "The stopped run used another processor (%s) than this one (%s). The last digits of products "
                    "differ, so the files may differ from those of an uninterrupted run.",
                    state["processor"],
                    here,
                )
            self._began -= float(state["seconds"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"{self._folder / STATE} is damaged ({error!r}). {REMEDY}.") from error
        return progress

    def _version_error(self, state: Mapping[str, Any]) -> FormatError:
        """Return the error for a journal of another version; it names the nearplane that wrote it, if known."""
        inputs = state.get("told")
        number = inputs.get("version of nearplane") if isinstance(inputs, dict) else None
        by = f"nearplane {printable(number)[:20]}" if isinstance(number, str) else "another version of nearplane"
        return FormatError(
            f"{self._container.folder} belongs to a run of {by}, whose journal this version does not read: found journal version "
            f"{json.dumps(state.get('version'))[:20]}, expected {VERSION}. {REMEDY}, or resume it with {by}."
        )

    def names(self, pattern: str) -> list[str]:
        """Return the names of the pages that match a pattern."""
        return [name for name in self._pages if fnmatch(name, pattern)]

    def load(self, name: str) -> Any:
        """Return the contents of a page.

        Raises:
            FormatError: The page cannot be read, or has changed.
        """
        path = self._folder / name
        try:
            if not path.is_file() or sha256(path) != self._pages.get(name):  # a pipe would be waited for
                raise self.changed_page(name)
            return torch.load(path, map_location="cpu", weights_only=True)
        except (
            OSError,
            RuntimeError,
            ValueError,
            EOFError,
            LookupError,
            TypeError,
            AttributeError,
            UnpicklingError,
        ) as error:
            raise FormatError(f"{path} cannot be read ({error}). {REMEDY}.") from error

    def changed_page(self, name: str) -> FormatError:
        """Return the error for a page that has changed since it was written."""
        return FormatError(f"{self._folder / name} has changed since it was written. {REMEDY}.")

    def due(self, share: float | None = None) -> bool:
        """Return whether to write a page now: the disk has room, and writing takes a small share of the time.

        Args:
            share: Largest share of the time since the last page; None: `MAX_JOURNAL_SHARE`.
        """
        elapsed = time.perf_counter() - self._kept
        return self.room and (share or MAX_JOURNAL_SHARE) * elapsed >= self._cost

    def write(
        self, state: Mapping[str, Any], pages: Mapping[str, Any], *, replaced: str = "", size: int | None = None
    ) -> None:
        """Write pages and then the state; if the disk is full, warn and write no more.

        Args:
            state: The progress as JSON; run inputs, seconds and the container's state are added.
            pages: Tensors, or dicts and lists of them, by page name; or functions that return one.
            replaced: Pattern of old pages that are deleted afterwards.
            size: Bytes of the tensors; None: they are counted.
        """
        start = time.perf_counter()
        if size is None:
            size = sum(tensor.nbytes for page in pages.values() for tensor in _tensors(_given(page)))
        with self._while_disk_has_room():
            if (written := self._container.state()) is None:
                return
            if size > (free := shutil.disk_usage(self._container.folder).free) / 2:
                why = f"{size_text(size)} of state would leave too little of {size_text(free)} for the checkpoint"
                self._give_up(why)
                return
            self._write(written, state, pages, replaced)
        self._kept = time.perf_counter()
        self._cost = self._kept - start

    def _write(
        self, written: Mapping[str, Any], state: Mapping[str, Any], pages: Mapping[str, Any], replaced: str
    ) -> None:
        """Write pages and then the state, with that of the container."""
        self._folder.mkdir(exist_ok=True)
        flush(self._container.folder)
        kept = {name: digest for name, digest in self._pages.items() if not (replaced and fnmatch(name, replaced))}
        try:
            kept |= {name: self._saved(name, _given(page)) for name, page in pages.items()}
            content = {
                "version": VERSION,
                "told": self._inputs,
                "seconds": self.seconds,
                "processor": processor(),
                "pages": kept,
                "container": written,
                **state,
            }
            path = self._folder / f"{STATE}.part"
            path.write_text(json.dumps(content | {"digest": _digest(content)}))
            flush(path)
        except BaseException:
            for name in pages.keys() - self._pages.keys():  # no state refers to them; free their space
                (self._folder / name).unlink(missing_ok=True)
            raise
        self._pages = kept
        _put(path, self._folder / STATE)
        for path in self._folder.glob(replaced) if replaced else ():
            if path.name not in pages:
                path.unlink()

    def seal(self, record: RunRecord, timed: Callable[[RunRecord], RunRecord]) -> RunRecord:
        """Note that all layers are written, and complete the checkpoint; see `Container.seal`.

        Raises:
            ModelError: A file that the run has read was changed.
            FormatError: The disk is full, or a file of the checkpoint was changed.
        """
        self.check_sources()
        container = self._container
        with readable_errors(container.place.out):
            if (written := container.state()) is not None:
                sealed = {"record": record.to_json(), "config": container.config, "room": container.room}
                self._write(written, {"sealed": sealed}, {}, "*.pt")
        return container.seal(record, timed)

    def completed(self, timed: Callable[[RunRecord], RunRecord]) -> RunRecord | None:
        """Return the record of a stopped run that had written all layers, after completing its files; None for others."""
        if self._container.whole:  # only the folder was not renamed yet
            return read_record(self._container.folder)
        return None if self._sealed is None else self._container.seal(self._sealed, timed)

    def write_first(self, name: str, page: Any) -> None:
        """Write a page to which the first state will refer."""
        with self._while_disk_has_room():
            self._folder.mkdir(exist_ok=True)
            flush(self._container.folder)
            self._pages[name] = self._saved(name, page)

    @contextmanager
    def _while_disk_has_room(self) -> Iterator[None]:
        """Stop writing pages if the disk is full, so that the run itself can use the remaining space."""
        try:
            yield
        except OSError as error:
            self._give_up(str(error))
            for path in self._folder.glob("*.part"):
                with suppress(OSError):
                    path.unlink()

    def _give_up(self, why: str) -> None:
        log.warning("The journal ends here; if this run is stopped, later work is lost: %s.", why)
        self.room = False

    def _saved(self, name: str, page: Any) -> str:
        """Write a page to disk and return its SHA-256."""
        path = self._folder / f"{name}.part"
        try:
            _save(page, path)
            digest = sha256(path)
            _put(path, self._folder / name)
            return digest
        except BaseException:
            path.unlink(missing_ok=True)  # on a full disk the run itself needs the space
            raise


def _given(page: Any) -> Any:
    return page() if callable(page) else page


def _tensors(page: Any) -> Iterator[Tensor]:
    """Yield the tensors on a page."""
    if isinstance(page, Tensor):
        yield page
    elif isinstance(page, (dict, list, tuple)):
        for part in page.values() if isinstance(page, dict) else page:
            yield from _tensors(part)


def _save(page: Any, path: Path) -> None:
    """Save a page; torch raises RuntimeError where a file cannot be written.

    Raises:
        OSError: The disk is full, or a quota or limit on the size of files is reached.
    """
    page = _compact(page)
    try:
        torch.save(page, path)
    except RuntimeError as error:
        reason = "the disk is full, or a quota or limit on the size of files is reached"
        raise OSError(f"{path.stem} could not be written, probably as {reason} ({first_line(error)})") from error


def _compact(page: Any) -> Any:
    """Return a page whose tensors own their memory, as torch.save writes the whole storage of a view."""
    if isinstance(page, Tensor):
        return page if len(page.untyped_storage()) == page.nbytes else page.clone()
    if isinstance(page, dict):
        return {key: _compact(part) for key, part in page.items()}
    return [_compact(part) for part in page] if isinstance(page, (list, tuple)) else page


def _digest(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a state without its digest."""
    content = {name: value for name, value in state.items() if name != "digest"}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def differing_inputs(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the differences between the inputs of an earlier run and this one in words; empty if there are none."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return first_few([_difference(name, before.get(name), now.get(name)) for name in names], MAX_NAMED_DIFFERENCES)


def _difference(name: str, before: Any, now: Any) -> str:
    """Return two values in words, of long ones the place where they begin to differ."""
    texts = json.dumps(before), json.dumps(now)
    pairs = enumerate(zip_longest(*texts))
    same = next((place for place, (one, other) in pairs if one != other), 0)
    start = 0 if same < LEAD + SHOWN else same - LEAD
    was, is_now = (
        text if len(text) <= 2 * SHOWN else f"{'..' if start else ''}{text[start : start + LEAD + SHOWN]}.."
        for text in texts
    )
    return f"{name} was {was}, is {is_now}"


def _put(part: Path, path: Path) -> None:
    """Flush a file to disk and move it to its final name."""
    flush(part)
    os.replace(part, path)
    flush(path.parent)

"""The folder in which a run keeps what it has done while it goes on: pages that are on disk whole, or not there.

    OUT.unfinished/journal/
      state.json          what the run was told, and how far it is; the last page that is written
      NAME.pt             tensors that it needs to go on from there

Knows what makes two runs the same and how pages get to disk; not what is on them: `quantize_journal.py` says it of a solve,
`tuning/loop.py` of tuning.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from torch import Tensor

from nearplane.errors import FormatError, ModelError, RecipeError, first_few, printable
from nearplane.formats.container import Container
from nearplane.record.record import read_record
from nearplane.system.device import Device
from nearplane.system.files import flush, read_object, sha256
from nearplane.system.matmul_library import slow_for_mkl
from nearplane.system.output_folder import STATE
from nearplane.system.paths import JOURNAL
from nearplane.system.safetensors_files import INDEX, read_index

VERSION = 4  # of the journal; no other is gone on with
READ = {".safetensors", ".gguf", ".json", ".model", ".txt", ".jinja", ".py"}  # files of a model that count
SHARE = 0.05  # of a run's time that may go into keeping pages: what is quick is not kept every time
NAMED = 3  # differences that a refusal spells out
EXPECTED = "Delete the folder, or begin anew with --overwrite"

Found = TypeVar("Found")
log = logging.getLogger("nearplane")


def told(
    recipe: Any, files: Mapping[str, Path], text: str, versions: Mapping[str, str], device: Device
) -> dict[str, Any]:
    """Return all that a run's result depends on, as flat JSON: two runs that are told the same write the same.

    Args:
        recipe: what was asked for, as JSON has it.
        files: folders whose files are hashed, by what a message calls them.
        text: digest of the tokens.
        versions: of the packages that compute.
        device: that computes.

    Raises:
        ModelError: a file cannot be read.
    """
    read = {f"the {called}'s {name}": path for called, folder in files.items() for name, path in _counting(folder)}
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = dict(zip(read, pool.map(sha256, read.values()), strict=True))
    except OSError as error:
        raise ModelError(f"A file of the model cannot be read ({error}). Fetch it again, or move it away.") from error
    asked = json.loads(json.dumps({"recipe": recipe}))
    beside = {"calibration text": text, "device": device.model()}
    return dict(_flat(asked)) | found | beside | {f"version of {name}": number for name, number in versions.items()}


def _counting(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a model that count, by name: those in the folder, and shards below it that its index names."""
    paths = {path for path in folder.iterdir() if path.suffix in READ and path.is_file()}
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


class Notebook:
    """The pages of one run.

    Args:
        container: that the run writes, just entered.
        told: what the run is told, see `told`.
        began: when the run began, by `time.perf_counter`; None: now.

    Attributes:
        room: whether the disk still takes pages.
    """

    def __init__(self, container: Container, told: Mapping[str, Any], began: float | None = None) -> None:
        self._container, self._told = container, dict(told)
        self._folder = container.folder / JOURNAL
        self._began = began or time.perf_counter()
        self._pages: dict[str, str] = {}  # SHA-256 of those that the state on disk needs, or the first one will
        self._kept, self._cost = time.perf_counter(), 0.0  # when a page was written last, and how long that took
        self.room = True

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken, those before it was stopped included."""
        return time.perf_counter() - self._began

    def before(self, understood: Callable[[Mapping[str, Any]], Found]) -> Found | None:
        """Return what a run that was told the same had done; None: nothing that was kept, or all, see `Container.whole`.

        With --overwrite what cannot be gone on with is deleted, and that is said.

        Args:
            understood: makes it from the state that was written; what it raises of what is missing there becomes a sentence.

        Raises:
            RecipeError: a run that was told something else left the folder, and it may not be replaced; names the difference.
            FormatError: what is there cannot be read, or a file is not what was written, and it may not be replaced.
        """
        if not self._container.found:
            return None
        try:
            return self._read(understood)
        except (FormatError, ModelError) as error:  # of a GGUF the second
            if not self._container.place.overwrite:
                if isinstance(error, FormatError):
                    raise
                raise FormatError(f"What a run that was stopped left cannot be read: {error} {EXPECTED}.") from error
            log.warning("%s", error)
            self._container.begin_anew()
            return None

    def _read(self, understood: Callable[[Mapping[str, Any]], Found]) -> Found | None:
        state = read_object(self._folder / STATE, expected=EXPECTED)
        if state.get("version") != VERSION or not isinstance(state.get("told"), dict):
            raise self._of_another_version(state)
        if differing := _differing(state, self._told):
            if not self._container.place.overwrite:
                raise RecipeError(
                    f"{self._container.folder} is of a run that was stopped and was told something else: {differing}. Give the "
                    f"same command again to go on with it, or --overwrite to begin anew; or choose another folder."
                )
            log.warning("The run that was stopped was told something else: %s.", differing)
            self._container.begin_anew()
            return None
        if self._container.whole:
            for name, written in read_record(self._container.folder).files.items():  # did all reach the disk?
                if not (path := self._container.folder / name).is_file() or sha256(path) != written:
                    raise FormatError(f"{path} is not what was written. {EXPECTED}.")
            log.info("a run was stopped when all was written: %s", self._container.folder)
            return None
        try:
            self._pages = dict(state["pages"])
            self._container.go_on(state["container"])
            found = understood(state)
            if state["processor"] != (here := _processor()):
                log.warning(
                    "The run that was stopped ran on %s, this is %s: the last digits of products differ, and with them may files "
                    "from those of a run that nobody stopped.",
                    state["processor"],
                    here,
                )
            self._began -= float(state["seconds"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"{self._folder / STATE} is not what was written ({error!r}). {EXPECTED}.") from error
        return found

    def _of_another_version(self, state: Mapping[str, Any]) -> FormatError:
        """Return what to raise of a journal of another version: names the nearplane that wrote it, where the journal does."""
        told = state.get("told")
        number = told.get("version of nearplane") if isinstance(told, dict) else None
        by = f"nearplane {printable(number)[:20]}" if isinstance(number, str) else "another version of nearplane"
        return FormatError(
            f"{self._container.folder} was left by a run of {by}, whose journals this version does not read: found journal version "
            f"{json.dumps(state.get('version'))[:20]}, expected {VERSION}. {EXPECTED}, or finish it with {by}."
        )

    def load(self, name: str) -> Any:
        """Return what `write` kept on a page.

        Raises:
            FormatError: it cannot be read.
        """
        path = self._folder / name
        try:
            if sha256(path) != self._pages.get(name):
                raise self.refused(name)
            return torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
            raise FormatError(f"{path} cannot be read ({error}). {EXPECTED}.") from error

    def refused(self, name: str) -> FormatError:
        """Return what to raise of a page that holds something else than this run left."""
        return FormatError(f"{self._folder / name} is not what was written. {EXPECTED}.")

    def wanted(self, share: float | None = None) -> bool:
        """Whether a page is to be written now: the disk takes it, and it would not take too much of the time.

        Args:
            share: of the time since the last one that it may take; None: `SHARE`.
        """
        took = time.perf_counter() - self._kept
        return self.room and (share or SHARE) * took >= self._cost

    def write(self, state: Mapping[str, Any], pages: Mapping[str, Any], *, replaced: str = "") -> None:
        """Write pages and then the state; where the disk does not take them, no more are written, and that is said.

        Args:
            state: as JSON; what the run was told, its seconds and what the container has written are added.
            pages: by name, tensors or dicts and lists of them; or functions that give them, so that one is in memory at a time.
            replaced: pattern of pages that are deleted then, but for those just written.
        """
        began = time.perf_counter()
        size = sum(tensor.nbytes for page in pages.values() for tensor in _tensors(_given(page)))
        with self._as_room_is():
            if (written := self._container.state()) is None:
                return
            if size > (free := shutil.disk_usage(self._container.folder).free) / 2:
                why = (
                    f"{size / 1e9:.1f} GB of its state would leave too little of {free / 1e9:.1f} GB for the checkpoint"
                )
                self._give_up(why)
                return
            self._folder.mkdir(exist_ok=True)
            flush(self._container.folder)
            kept = {name: digest for name, digest in self._pages.items() if not (replaced and fnmatch(name, replaced))}
            try:
                kept |= {name: self._saved(name, _given(page)) for name, page in pages.items()}
                whole = {
                    "version": VERSION,
                    "told": self._told,
                    "seconds": self.seconds,
                    "processor": _processor(),
                    "pages": kept,
                    "container": written,
                    **state,
                }
                path = self._folder / f"{STATE}.part"
                path.write_text(json.dumps(whole))
                flush(path)
            except BaseException:
                for name in pages.keys() - self._pages.keys():  # no state needs them, and the run may need their room
                    (self._folder / name).unlink(missing_ok=True)
                raise
            self._pages = kept
            _put(path, self._folder / STATE)
            for path in self._folder.glob(replaced) if replaced else ():
                if path.name not in pages:
                    path.unlink()
        self._kept = time.perf_counter()
        self._cost = self._kept - began

    def keep(self, name: str, page: Any) -> None:
        """Write a page that the first state is going to need."""
        with self._as_room_is():
            self._folder.mkdir(exist_ok=True)
            flush(self._container.folder)
            self._pages[name] = self._saved(name, page)

    @contextmanager
    def _as_room_is(self) -> Iterator[None]:
        """Keep no more where the disk does not take it: the run itself may do with what is left."""
        try:
            yield
        except OSError as error:
            self._give_up(str(error))
            for path in self._folder.glob("*.part"):
                with suppress(OSError):
                    path.unlink()

    def _give_up(self, why: str) -> None:
        log.warning("If this run is stopped, what follows is lost: %s.", why)
        self.room = False

    def _saved(self, name: str, page: Any) -> str:
        """Put a page on disk; return its SHA-256."""
        path = self._folder / f"{name}.part"
        try:
            torch.save(_alone(page), path)
            found = sha256(path)
            _put(path, self._folder / name)
            return found
        except BaseException:
            path.unlink(missing_ok=True)  # of a full disk the run itself needs what is left
            raise


def _processor() -> str:
    """Return what decides the last digits of products: architecture, maker, and the widest registers that torch uses."""
    maker = "not by Intel" if slow_for_mkl() else "by Intel or ARM"
    return f"{platform.machine()} {maker}, {torch.backends.cpu.get_cpu_capability()}"


def _given(page: Any) -> Any:
    return page() if callable(page) else page


def _tensors(page: Any) -> Iterator[Tensor]:
    """Yield the tensors on a page."""
    if isinstance(page, Tensor):
        yield page
    elif isinstance(page, (dict, list, tuple)):
        for part in page.values() if isinstance(page, dict) else page:
            yield from _tensors(part)


def _alone(page: Any) -> Any:
    """Return a page whose tensors share their memory with nothing more, as all of that memory is written."""
    if isinstance(page, Tensor):
        return page if len(page.untyped_storage()) == page.nbytes else page.clone()
    if isinstance(page, dict):
        return {key: _alone(part) for key, part in page.items()}
    return [_alone(part) for part in page] if isinstance(page, (list, tuple)) else page


def _differing(state: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return what a run was told and this one is not, in words; empty if all is the same."""
    then = state["told"]
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    said = [f"{name} was {_short(then.get(name))}, is {_short(now.get(name))}" for name in names]
    return first_few(said, NAMED)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:16]}.."


def _put(part: Path, path: Path) -> None:
    """Put a file in its place when it is on disk."""
    flush(part)
    os.replace(part, path)
    flush(path.parent)

"""Killing a run at any moment, and whether it goes on to the same bytes."""

import hashlib
import math
import os
import random
import shutil
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import nearplane
from nearplane import FormatError
from nearplane.formats.container import Container
from nearplane.planning import journal as journal
from nearplane.record.record_file import read_record
from nearplane.system.paths import JOURNAL

TIMES = {"seconds", "peak_memory", "folder", "digest"}  # of the record, which no two runs share


def contents(folder: Path) -> dict[str, str]:
    """Return every file's hash, and what the record says but for times."""
    found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.name != "nearplane.json"}
    record = read_record(folder)
    layers = [{n: v for n, v in vars_of(layer).items() if n not in TIMES} for layer in record.layers]
    if record.tuning is not None:
        record = replace(record, tuning=replace(record.tuning, seconds=0.0))
    said = {n: v for n, v in vars_of(record).items() if n not in {*TIMES, "layers", "products"}}
    return found | {"record": str(said), "layers": str(layers)}


def vars_of(record):
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


class Killer:
    """Ends the process, as SIGKILL does, before the moment `last` of all at which files change or a layer is added."""

    PLACES = (
        ("nearplane.system.shard_writer", "save_file"),
        ("nearplane.system.shard_writer", "flush"),
        ("nearplane.formats.journal_pages", "flush"),
        ("os", "fsync"),
        ("torch", "save"),
        ("os", "replace"),
        ("pathlib.Path", "unlink"),
        ("pathlib.Path", "rename"),
        ("pathlib.Path", "write_text"),
    )
    ADDS = True

    def __init__(self, patch, last: float) -> None:
        self.moments, self._last = 0, last
        for where, name in self.PLACES:
            owner = Path if where == "pathlib.Path" else __import__(where, fromlist=["x"])
            patch.setattr(owner, name, self._counted(getattr(owner, name)))
        if self.ADDS:
            patch.setattr(Container, "add", self._counted(Container.add))

    def _counted(self, function):
        def counted(*args, **words):
            self.moments += 1
            if self.moments > self._last:
                self.end()
            return function(*args, **words)

        return counted

    def end(self):
        os.kill(os.getpid(), signal.SIGKILL)


class FullDisk(Killer):
    """From the moment `last` of all writes on, `many` of them find the disk full."""

    PLACES = tuple(place for place in Killer.PLACES if place[1] not in ("unlink", "rename", "replace"))
    ADDS, many = False, 3

    def end(self):
        if self.moments <= self._last + self.many:
            raise OSError(28, "No space left on device")


def killed(moment, run, out):
    """Run in a process of its own that is killed at a moment."""
    child = os.fork()
    if not child:
        try:
            with pytest.MonkeyPatch.context() as patch:
                Killer(patch, moment)
                run(out)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def check_goes_on(run, wanted, place, many):
    """Kill `run(out)` at so many moments; whatever is behind it then, the same again ends with the contents `wanted`."""
    with pytest.MonkeyPatch.context() as patch:
        killer = Killer(patch, math.inf)
        run(place / "counted")
    assert contents(place / "counted") == wanted
    for moment in sorted(random.Random(str(wanted)).sample(range(1, killer.moments), many)):
        out = place / f"{moment}"
        assert os.WIFSIGNALED(killed(moment, run, out)), "it was killed"
        if out.exists():  # it was killed when all was done but for what is deleted last
            shutil.rmtree(out / JOURNAL, ignore_errors=True)
        else:
            run(out)
        assert contents(out) == wanted, f"killed at moment {moment} of {killer.moments}"
        assert not Path(f"{out}.unfinished").exists()


def check_goes_on_with_a_file_cut_short(run, wanted, place, many):
    """Kill `run(out)` and cut the newest file short: the same again ends with the same, or names the file and begins anew."""
    choose = random.Random(str(wanted))
    with pytest.MonkeyPatch.context() as patch:
        killer = Killer(patch, math.inf)
        run(place / "counted")
    refused = 0
    for moment in sorted(choose.sample(range(killer.moments // 4, killer.moments), many)):
        out = place / f"{moment}"
        killed(moment, run, out)
        found = [path for path in Path(f"{out}.unfinished").rglob("*") if path.is_file() and path.stat().st_size]
        if not found or out.exists():
            continue
        newest = max(found, key=lambda path: path.stat().st_mtime_ns)
        size = newest.stat().st_size
        os.truncate(newest, choose.randrange(size))
        try:
            run(out)
        except FormatError as error:
            refused += 1
            if newest.name not in str(error) and ".weight" not in str(error):  # of a GGUF the tensor
                raise
            run(out, overwrite=True)
        assert contents(out) == wanted, f"killed at moment {moment}, {newest.name} cut short"
    return refused


def check_goes_on_after_a_full_disk(run, wanted, place, many):
    """Let writes find the disk full at so many moments: the run ends as if nothing was, or says so, and the same again does."""
    with pytest.MonkeyPatch.context() as patch:
        counter = FullDisk(patch, math.inf)
        run(place / "counted")
    for moment in sorted(random.Random(str(wanted)).sample(range(counter.moments), many)):
        out = place / f"{moment}"
        with pytest.MonkeyPatch.context() as patch, suppress(FormatError):
            FullDisk(patch, moment)
            run(out)
        if not out.exists():
            run(out)
        assert contents(out) == wanted, f"disk full at write {moment} of {counter.moments}"


class StoppedError(Exception):
    """What ends a run in these tests."""


def stopped_behind(blocks, model, out, monkeypatch, **options):
    """Run until so many blocks are kept."""
    write = journal.Journal.passed

    def passed(self, behind, stream, layers):
        write(self, behind, stream, layers)
        if behind == blocks:
            raise StoppedError

    with monkeypatch.context() as patch:
        patch.setattr("nearplane.planning.journal.Journal.passed", passed)
        with pytest.raises(StoppedError):
            nearplane.quantize(model, out, **options)

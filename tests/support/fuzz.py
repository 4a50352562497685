"""Fuzz of all readers: seeded mutations of every format, each read in a worker process with limits of memory and time.

python tests/support/fuzz.py [--count 20000] [--seed 1] [--workers 2] [--only NAME] [--verbose]

Prints a table of mutations by format and outcome, and ends with code 1 if a reader crashed, hung, took more memory than for the
file as it was and twice its size, raised another error than ours, or gave what no file says. A plain generator of numbers draws the
mutations: hypothesis shrinks values, not folders, and cannot limit a process; atheris would need instrumented copies of torch.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers are forked

import torch
from transformers.utils import logging

from fuzz_models import subjects
from fuzz_subjects import GOOD, REFUSED, UNSURE, Subject
from nearplane import NearplaneError
from plain_formats import UnsureError

CPU_SECONDS = 20  # of a mutation with all its readers
SLEEP_SECONDS = 10.0  # without any work of the processor, and without a result: a worker waits for what never comes
SPARE = 8 << 20  # bytes that a reader may take beside twice the file: pages of libraries, messages of errors
ADDRESSES = 1 << 30  # bytes that a reader may reserve beside, used or not
MEMORY = re.compile(r"MemoryError|allocate memory|out of memory|std::bad_alloc", re.IGNORECASE)
LIBC = ctypes.CDLL(None)
SOME = "refused by some"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one mutation.

    Args:
        seed: of the generator that drew it.
        subject: name of the format.
        kind: of the mutation.
        what: the file, and what was done to it.
        outcome: an entry of `GOOD`, "refused by some", or "fault".
        faults: what each faulty reader did.
        seconds: of the processor.
        excess: bytes at the peak beyond those at the peak of reading the files as they were.
        said: a sentence with which it was refused.
    """

    seed: int
    subject: str
    kind: str
    what: str
    outcome: str
    faults: list[str]
    seconds: float = 0.0
    excess: int = 0
    said: str = ""


@dataclass(slots=True)
class Report:
    """All outcomes, and the seconds of the processor and of the clock."""

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def faults(self) -> list[str]:
        return [
            f"seed {each.seed}, {each.subject}, {each.what}: {fault}" for each in self.outcomes for fault in each.faults
        ]

    def table(self) -> str:
        """Return mutations by format and outcome as Markdown."""
        outcomes = [*GOOD[:1], SOME, *GOOD[1:], "fault"]
        lines = [
            f"| format | mutations | {' | '.join(outcomes)} | seconds | longest | memory above |",
            f"|{'---|' * (len(outcomes) + 5)}",
        ]
        names = sorted({each.subject for each in self.outcomes})
        for name in (*names, "all"):
            chosen = [each for each in self.outcomes if name in (each.subject, "all")]
            counts = Counter(each.outcome for each in chosen)
            cells = " | ".join(f"{counts[outcome]:,}" if counts[outcome] else "" for outcome in outcomes)
            seconds = [each.seconds for each in chosen]
            excess = max(0, *(each.excess for each in chosen)) / 1e6
            lines.append(
                f"| {name} | {len(chosen):,} | {cells} | {sum(seconds):,.0f} | {max(seconds):.1f} | {excess:.1f} MB |"
            )
        kinds = Counter((each.kind, each.outcome) for each in self.outcomes)
        lines += ["", f"| mutation | all | {' | '.join(outcomes)} |", f"|{'---|' * (len(outcomes) + 2)}"]
        for kind in sorted({each.kind for each in self.outcomes}):
            row = [kinds[kind, outcome] for outcome in outcomes]
            lines.append(f"| {kind} | {sum(row):,} | {' | '.join(f'{count:,}' if count else '' for count in row)} |")
        peak = max((each.excess for each in self.outcomes), default=0)
        lines += [
            "",
            f"{len(self.outcomes):,} mutations in {self.seconds:,.0f} s; at most {peak / 1e6:.1f} MB above the whole files' peak",
        ]
        return "\n".join(lines)


# ── one mutation ──


def _memory(name: str) -> int:
    """Return bytes of memory of this process: VmRSS, VmHWM (the largest VmRSS since `_forget_peak`) or VmSize."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return 0


def _measured(call: Any) -> tuple[Any, int]:
    """Return a result or an error, and by how much memory grew on the way."""
    LIBC.malloc_trim(0)  # what was freed before is memory that grows
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    try:
        result = call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # panics of Rust are no Exception
        result = error.with_traceback(None)
        result.__context__ = result.__cause__ = None
    return result, _memory("VmHWM") - before


def drawn(found: Sequence[Subject], seed: int) -> tuple[Subject, list[str], random.Random]:
    """Draw a subject and its readers by a seed; the generator then draws the mutation."""
    rng = random.Random(seed)
    (subject,) = rng.choices(found, [each.WEIGHT for each in found])
    return subject, subject.drawn(rng), rng


class Reader:
    """Reads mutated copies of the subjects, in a worker.

    Args:
        found: the subjects.
        place: a folder of its own.
    """

    def __init__(self, found: Sequence[Subject], place: Path) -> None:
        self.subjects, self.place = found, place
        self.peaks: dict[tuple[str, str], int] = {}
        LIBC.mallopt(-8, 1)  # M_ARENA_MAX: one heap, as threads are not what is measured

    def _peak(self, subject: Subject, name: str) -> int:
        """Return by how much memory grows while the files are read as they were written."""
        if (subject.name, name) not in self.peaks:
            read = subject.readers()[name]
            self.peaks[subject.name, name] = _measured(lambda: read(self._copy(subject)))[1]
        return self.peaks[subject.name, name]

    def _copy(self, subject: Subject) -> Path:
        place = self.place / "copy"
        shutil.rmtree(place, ignore_errors=True)
        return Path(shutil.copytree(subject.folder, place / subject.folder.name))

    def read(self, seed: int) -> Outcome:
        """Mutate one copy and read it with all readers."""
        subject, names, rng = drawn(self.subjects, seed)
        readers = subject.readers()
        peaks = {name: self._peak(subject, name) for name in names}
        folder = self._copy(subject)
        mutation = subject.mutate(folder, rng)
        room = subject.room(folder)
        began, kinds, faults, most, said = time.process_time(), {}, [], -(1 << 60), ""
        resource.setrlimit(resource.RLIMIT_CPU, (int(began) + CPU_SECONDS, resource.RLIM_INFINITY))
        for name in names:
            gc.collect(0)
            resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + ADDRESSES + room, resource.RLIM_INFINITY))
            result, peak = _measured(lambda name=name: readers[name](folder))
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            excess = peak - peaks[name]
            most = max(most, excess)
            kind = self._kind(subject, name, result, folder, mutation)
            if excess > room + SPARE:
                kind = f"{excess / 1e6:.0f} MB more than for the whole file"
            if kind not in GOOD:
                faults.append(f"{name}: {kind}")
            elif subject.counts(name):
                kinds[name] = kind
            said = said or (str(result) if kind == REFUSED else "")
        refused = [kind == REFUSED for kind in kinds.values()]
        if faults:
            outcome = "fault"
        elif any(refused):
            outcome = REFUSED if all(refused) else SOME
        else:
            outcome = max(kinds.values(), key=GOOD.index)
        return Outcome(
            seed=seed,
            subject=subject.name,
            kind=mutation.kind,
            what=str(mutation),
            outcome=outcome,
            faults=faults,
            seconds=time.process_time() - began,
            excess=most,
            said=said,
        )

    def _kind(self, subject: Subject, reader: str, result: Any, folder: Path, mutation: Any) -> str:
        """Return an entry of `GOOD`, or what is wrong with a result or an error."""
        if isinstance(result, NearplaneError):
            text = str(result)
            if MEMORY.search(text):
                return f"asks for memory: {text[:200]}"
            return REFUSED if text and text.isprintable() and len(text) < 2000 else f"no sentence: {text[:200]!r}"
        if isinstance(result, BaseException):
            return f"{type(result).__name__}: {str(result)[:200]}"
        try:
            return subject.judge(reader, result, folder, mutation)
        except UnsureError:
            return UNSURE
        except Exception as error:  # of the independent reader
            return f"is read, though it makes no sense ({type(error).__name__}: {str(error)[:100]})"


# ── many of them ──


class Worker:
    """A forked process that reads seeds one after the other, and says each before and after in a line."""

    def __init__(self, found: Sequence[Subject], place: Path, seeds: Sequence[int]) -> None:
        self.seeds, self.begun, self.rest = list(seeds), -1, b""
        self.spent, self.since = [""], time.monotonic()
        self.lines, end = os.pipe()
        self.process = os.fork()
        if not self.process:
            code = 1
            try:
                os.close(self.lines)
                with open(end, "wb", buffering=0) as out:
                    self._work(found, place, out)
                code = 0
            except Exception:  # of the fuzz itself
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)
        os.close(end)

    def _work(self, found: Sequence[Subject], place: Path, out: Any) -> None:
        _quiet()
        gc.collect()
        gc.freeze()
        with tempfile.TemporaryDirectory(dir=place) as own:
            tempfile.tempdir = own  # a GGUF alone is given a folder, which a process that is killed leaves behind
            reader = Reader(found, Path(own))
            for seed in self.seeds:
                out.write(f"{seed}\n".encode())
                out.write(json.dumps(asdict(reader.read(seed))).encode() + b"\n")

    def sleeps(self) -> bool:
        """Return whether the process has done nothing for long."""
        spent = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[11:13]
        if spent != self.spent:
            self.spent, self.since = spent, time.monotonic()
        return time.monotonic() - self.since > SLEEP_SECONDS

    def outcomes(self) -> list[Outcome] | None:
        """Return what came since the last call; None once the process has ended."""
        content = os.read(self.lines, 1 << 16)
        if not content:
            os.close(self.lines)
            return None
        *lines, self.rest = (self.rest + content).split(b"\n")
        found = []
        for line in lines:
            if line.isdigit():
                self.begun = int(line)
            else:
                found.append(Outcome(**json.loads(line)))
                self.seeds.remove(found[-1].seed)
                self.begun = -1
        return found


def _quiet() -> None:
    """Send what libraries print to nowhere, and lower nothing else."""
    faulthandler.disable()  # a crash is told by the code of the process
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)


def run(place: Path, seeds: Iterable[int], *, workers: int = 1, only: str = "") -> Report:
    """Read the mutations of all seeds.

    Args:
        place: an empty folder.
        seeds: one a mutation.
        workers: processes at a time.
        only: a pattern of the names of the subjects that are read.
    """
    began, report, todo = time.perf_counter(), Report(), list(seeds)
    logging.disable_progress_bar()
    found = subjects(place, only)
    for subject in found:
        for name in subject.readers():
            subject.prepare(name)
    alive = [Worker(found, place, todo[number::workers]) for number in range(workers) if todo[number::workers]]
    try:
        while alive:
            ready, _, _ = select.select([worker.lines for worker in alive], [], [], 1.0)
            for worker in list(alive):
                if worker.lines not in ready:
                    if worker.sleeps():
                        os.kill(worker.process, signal.SIGKILL)
                    continue
                outcomes = worker.outcomes()
                if outcomes is not None:
                    report.outcomes += outcomes
                    continue
                alive.remove(worker)
                code = os.waitstatus_to_exitcode(os.waitpid(worker.process, 0)[1])
                if worker.seeds:
                    report.outcomes.append(_ended(worker, code, found, place))
                if worker.seeds:
                    alive.append(Worker(found, place, worker.seeds))
    finally:
        for worker in alive:  # the fuzz itself failed
            os.kill(worker.process, signal.SIGKILL)
    report.seconds = time.perf_counter() - began
    return report


def _ended(worker: Worker, code: int, found: Sequence[Subject], place: Path) -> Outcome:
    """Return the outcome of the seed at which a worker ended, which it does not read again."""
    if worker.begun < 0 or code > 0:
        raise RuntimeError(f"the fuzz itself failed, with code {code} at seed {worker.begun}")
    worker.seeds.remove(worker.begun)
    subject, _, rng = drawn(found, worker.begun)
    shutil.rmtree(place / "again", ignore_errors=True)
    mutation = subject.mutate(Path(shutil.copytree(subject.folder, place / "again" / subject.folder.name)), rng)
    why = {
        -signal.SIGXCPU: f"hangs: {CPU_SECONDS} s of the processor",
        -signal.SIGKILL: f"hangs: no work for {SLEEP_SECONDS:.0f} s, or killed for memory",
    }
    fault = why.get(code, f"crashes: the process ends with {signal.Signals(-code).name}")
    return Outcome(
        seed=worker.begun, subject=subject.name, kind=mutation.kind, what=str(mutation), outcome="fault", faults=[fault]
    )


def main() -> None:
    """Fuzz, print the table and all faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1, help="the first mutation has the seed 1,000,000 times this")
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default="", help="pattern of the names of the formats to fuzz")
    parser.add_argument("--verbose", action="store_true", help="print every mutation")
    words = parser.parse_args()
    first = 1_000_000 * words.seed + words.first
    with tempfile.TemporaryDirectory() as name:
        report = run(Path(name), range(first, first + words.count), workers=words.workers, only=words.only)
    for each in report.outcomes if words.verbose else ():
        print(
            f"{each.seed} {each.subject}: {each.what}: {each.outcome} {each.said}".encode(
                "ascii", "backslashreplace"
            ).decode()
        )
    for fault in report.faults:
        print(fault.encode("ascii", "backslashreplace").decode())
    print(f"seed {words.seed}\n{report.table()}")
    sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
    main()

"""Whatever becomes of a file: an error sentence, the right weights, or what its bytes say; in bounded time and memory."""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fuzz
from fuzz_subjects import REFUSED, RIGHT, Subject
from mutations import Mutation, of_bytes
from nearplane import FormatError

TABLE = Path(__file__).parents[2] / "build" / "fuzz.md"  # of the last night
DAILY = (
    r"^(compressed-tensors|gptq, unsigned|compressed-tensors, asymmetric, unsigned|nearplane|gguf, experts|"
    r"gguf alone, q4_0, unsigned|source, (8 bits|4 bits|bfloat16)|run record|stopped run|text\.jsonl|blob)$"
)

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux tells it")


def test_fifty_mutations_end_well(tmp_path: Path) -> None:
    report = fuzz.run(tmp_path, range(50), only=DAILY)
    assert report.faults == []
    assert len(report.outcomes) == 50
    counts = Counter(each.outcome for each in report.outcomes)
    assert 25 < counts[REFUSED] < 48
    assert counts[RIGHT] + counts["as the bytes say"] > 2


@pytest.mark.nightly
def test_twenty_thousand_mutations_end_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another 20,000 each day, and the table of the last ones is kept."""
    day = int(time.time()) // 86_400
    seeds = range(1_000_000 * day, 1_000_000 * day + 20_000)
    report = fuzz.run(tmp_path, seeds, workers=len(os.sched_getaffinity(0)))
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(f"seed {day}\n\n{report.table()}\n")
    with capsys.disabled():
        print(f"\n{TABLE.read_text()}")
    assert report.faults == []
    assert len(report.outcomes) == 20_000


# ── the fuzz itself ──


class Faulty(Subject):
    """One file, with a reader that goes wrong once the file is another."""

    def __init__(self, folder: Path, goes_wrong: Callable[[], Any]) -> None:
        super().__init__("faulty", folder)
        self.goes_wrong = goes_wrong

    def readers(self) -> dict[str, Callable[[Path], Any]]:
        def read(folder: Path) -> Any:
            content = (folder / "file").read_bytes()
            return content if content == bytes(1000) else self.goes_wrong()

        return {"read": read}

    def mutate(self, folder: Path, rng: random.Random) -> Mutation:
        return of_bytes(folder / "file", rng)

    def judge(self, reader: str, result: Any, folder: Path, mutation: Mutation) -> str:
        return RIGHT if result == self.expected[reader] else "other bytes"


def raises(error: BaseException) -> Any:
    raise error


def spins() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("goes_wrong", "said"),
    [
        (lambda: b"", "other bytes"),
        (lambda: raises(KeyError("x")), "KeyError: 'x'"),
        (lambda: raises(FormatError("a MemoryError")), "asks for memory: a MemoryError"),
        (lambda: raises(FormatError("")), "no sentence: ''"),
        (lambda: len(bytearray(b"x" * (60 << 20))), r"\d+ MB more than for the whole file"),
        (lambda: bytearray(8 << 30), "MemoryError"),
        (lambda: ctypes.string_at(8), "crashes: the process ends with SIGSEGV"),
        pytest.param(spins, "hangs: 1 s of the processor", marks=pytest.mark.nightly),
        (lambda: time.sleep(1000), "hangs: no work for 1 s"),
    ],
)
def test_a_reader_that_goes_wrong_is_found(
    goes_wrong: Callable[[], Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this the tests above would say nothing. What comes after a crash is read all the same."""
    folder = tmp_path / "faulty"
    folder.mkdir()
    (folder / "file").write_bytes(bytes(1000))
    monkeypatch.setattr(fuzz, "subjects", lambda place, only: [Faulty(folder, goes_wrong)])
    monkeypatch.setattr(fuzz, "CPU_SECONDS", 1)
    monkeypatch.setattr(fuzz, "SLEEP_SECONDS", 1)
    report = fuzz.run(tmp_path, [1, 2])
    assert [each.seed for each in report.outcomes] == [1, 2]
    for each in report.outcomes:
        assert each.outcome == "fault", each
        with pytest.raises(AssertionError, match=said):
            raises(AssertionError(each.faults[0]))
    assert "| faulty | 2 |" in report.table()

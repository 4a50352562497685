"""CPU seconds of commands that are refused, and wall seconds until the first line of a run.

python benchmarks/speed/starts.py [--repeats 5]

Every command is a process of its own, and the commands take turns; printed is the least of the repeats. Bytecode of all
modules is written before, as pip does when it installs: where Python may not write it (PYTHONDONTWRITEBYTECODE), every
command takes 0.2 s more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nearplane.demo import CALIBRATION, MODEL

QUANTIZE = (sys.executable, "-m", "nearplane", "quantize")
REFUSED = {
    "a path that does not exist": ("nowhere", "out"),
    "`--bits 9`": (str(MODEL), "out", "--bits", "9"),
    "an unknown `--format`": (str(MODEL), "out", "--format", "unknown"),
    "`--bits 7 --format gptq`": (str(MODEL), "out", "--bits", "7", "--format", "gptq"),
    "`--no-symmetric --format gptq`": (str(MODEL), "out", "--no-symmetric", "--format", "gptq"),
    "`--rate 3 --format gptq`": (str(MODEL), "out", "--rate", "3", "--format", "gptq"),
}


def cpu_seconds(words: tuple[str, ...], place: Path, env: dict[str, str]) -> float:
    """Return the user and system time of a command that must be refused."""
    child = subprocess.Popen((*QUANTIZE, *words), cwd=place, env=env, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    assert os.waitstatus_to_exitcode(status) in (1, 2), f"{words} was not refused"
    return usage.ru_utime + usage.ru_stime


def until_first_line(place: Path, env: dict[str, str]) -> float:
    """Return the wall time from the start of a run until it says which model it opens; the run is then stopped."""
    words = (*QUANTIZE, str(MODEL), "out", "--calibration", str(CALIBRATION))
    began = time.perf_counter()
    with subprocess.Popen(words, cwd=place, env=env, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        line = child.stderr.readline()
        seconds = time.perf_counter() - began
        child.kill()
    assert line.startswith(b"opening "), line
    return seconds


def main() -> None:
    """Print one row for each command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        env |= {"PYTHONPYCACHEPREFIX": str(place / "bytecode")}
        cpu_seconds(REFUSED["`--bits 9`"], place, env)
        rows = [{name: cpu_seconds(words, place, env) for name, words in REFUSED.items()} for _ in range(repeats)]
        first = min(until_first_line(place, env) for _ in range(repeats))
    print(f"| the first line of a run, wall | {first:.2f} |")
    for name in REFUSED:
        print(f"| refused: {name}, CPU | {min(row[name] for row in rows):.2f} |")


if __name__ == "__main__":
    main()

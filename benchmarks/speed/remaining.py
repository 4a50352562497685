"""How well a run foretells its end: the time left that each log line says, beside the time that it then took.

    python benchmarks/speed/remaining.py run OUT.json -- quantize MODEL OUT --calibration TEXT.txt
    python benchmarks/speed/remaining.py show OUT.json ... --figure docs/results/remaining.svg

`run` runs a command of nearplane and notes its log lines with their times, until the process ends. `show` prints a table of
all files, and draws the ratio of what was said to what it took, against the share of the time that had passed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

UNITS = {"h": 3600.0, "min": 60.0, "s": 1.0}
LEFT = re.compile(r"quantizing: block (\d+) of (\d+).*about ([\d.hmins ]+) left")
FACTOR = 1.5  # by which what is said may differ from what it takes
SOON = 10.0  # seconds left from which a difference is of no use to anybody


def seconds(words: str) -> float:
    """Return the seconds of a duration as log lines print it: "1 h 2 min", "3 min 4 s", "0.5 s"."""
    return sum(float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+) (h|min|s)\b", words))


def run(out: Path, command: list[str]) -> None:
    """Run a command, and write its lines with their times."""
    began, lines = time.monotonic(), []
    process = subprocess.Popen([sys.executable, "-m", "nearplane", *command], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        sys.stderr.write(line)
        lines.append((round(time.monotonic() - began, 1), line.strip()))
    if process.wait():
        sys.exit(f"The command failed with code {process.returncode}.")
    out.write_text(json.dumps({"seconds": round(time.monotonic() - began, 1), "lines": lines}, indent=1))


def said(found: dict[str, Any]) -> list[tuple[int, float, float, float]]:
    """Return for every line with a time left: its block, when it was, the seconds that it says, and the seconds it took."""
    matches = ((at, LEFT.search(line)) for at, line in found["lines"])
    return [(int(match[1]), at, seconds(match[3]), found["seconds"] - at) for at, match in matches if match]


def show(files: list[Path], figure: Path) -> None:
    """Print a table of runs, and draw what they said."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "nearplane"
    import matplotlib.pyplot as plt

    print("| run | seconds | first said after | lines | ratio said / took | outside 1.5 | rises |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    drawn, axis = plt.subplots(figsize=(7, 3.2))
    for file in files:
        found = json.loads(file.read_text())
        rows = said(found)
        ratios = [(at / found["seconds"], says / took) for _, at, says, took in rows if took > SOON]
        outside = sum(not 1 / FACTOR <= ratio <= FACTOR for _, ratio in ratios)
        ends = [at + says for _, at, says, _ in rows]
        rises = max((after - before for before, after in pairwise(ends)), default=0.0)
        if not ratios:
            sys.exit(f"{file}: no line came more than {SOON:g} seconds before the end.")
        least, most = min(ratio for _, ratio in ratios), max(ratio for _, ratio in ratios)
        cells = (f"{found['seconds']:.0f}", f"{rows[0][1]:.0f} s", len(ratios), f"{least:.2f} to {most:.2f}", outside)
        print(f"| {file.stem} |", *(f"{cell} |" for cell in cells), f"at most {rises:.0f} s |")
        axis.plot(*zip(*ratios, strict=True), "o-", markersize=3, label=file.stem)
    for bound in (1 / FACTOR, 1.0, FACTOR):
        axis.axhline(bound, color="gray", linewidth=0.6, linestyle="-" if bound == 1.0 else ":")
    axis.set(xlabel="share of the run", ylabel="time left: said / took", ylim=(0.5, 2.0), xlim=(0, 1), yscale="log")
    axis.set_yticks([0.5, 1 / FACTOR, 1.0, FACTOR, 2.0], ["0.5", "0.67", "1", "1.5", "2"])
    axis.minorticks_off()
    axis.legend()
    drawn.savefig(figure, metadata={"Date": None}, bbox_inches="tight")


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    chosen = parser.add_subparsers(dest="command", required=True)
    first, second = chosen.add_parser("run"), chosen.add_parser("show")
    first.add_argument("out", type=Path)
    first.add_argument("arguments", nargs="+", help="command of nearplane, behind --")
    second.add_argument("files", type=Path, nargs="+")
    second.add_argument("--figure", type=Path, required=True)
    asked = parser.parse_args()
    if asked.command == "run":
        run(asked.out, asked.arguments)
    else:
        show(asked.files, asked.figure)


if __name__ == "__main__":
    main()

"""Does a run take what is foreseen before it begins? Peak memory and CPU time of six shapes in both modes, beside the forecast.

    OMP_NUM_THREADS=1 python benchmarks/plan.py [--shapes 0 1 2] [--modes bits rate] [--limits] [--place FOLDER]

Random models of realistic widths are quantized, each in a process of its own: 4 bits in groups of 128, and a rate of 3 bits. The
forecast is the line that the run logs; the peak is the most resident memory that the system saw; the time is CPU time, as a busy
machine takes longer than a quiet one, divided by threads. With --limits each is run again with --memory at 0.6 of its peak: that
keeps to it, or is refused, and then runs with what the refusal asks for.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

from large import MODES, build, child
from stages import write_text

from nearplane.sizes import bytes_in


class Shape(NamedTuple):
    """A random Llama, and the text that it is calibrated on."""

    hidden: int
    intermediate: int
    blocks: int
    samples: int
    seqlen: int


SHAPES = (
    Shape(1024, 2816, 2, 32, 512),
    Shape(1024, 4096, 2, 64, 512),
    Shape(1536, 4096, 2, 16, 1024),
    Shape(2048, 5632, 1, 32, 512),
    Shape(2048, 8192, 1, 24, 512),
    Shape(3072, 3072, 1, 32, 512),
)
FORECAST = re.compile(r"about ([\d.]+ [A-Z]+) of memory at its most, while (.*?) \(.*, and (.*) on a quiet machine")
UNITS = {"h": 3600, "min": 60, "s": 1}


def seconds(text: str) -> float:
    """Return what a duration like "1 h 2 min 3 s" is in seconds."""
    return sum(float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+) (h|min|s)", text))


def limited(arguments: dict[str, object], limit: float) -> str:
    """Run with a limit, and if it is refused with what is asked for; say how it went."""
    said, told = child("quantize", **{**arguments, "memory": int(limit), "overwrite": True})
    if said:
        return f"{limit / 1e9:.2f}: kept, peak {said['peak'] / 1e9:.2f}"
    asked = re.findall(r"--memory ([\d.]+ ?GB)", told)[-1]
    said, _ = child("quantize", **{**arguments, "memory": asked, "overwrite": True})
    return f"{limit / 1e9:.2f}: refused, {asked} asked for, peak {said.get('peak', float('nan')) / 1e9:.2f}"


def main() -> None:
    """Build each model, quantize it, print a line of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, nargs="+", choices=range(len(SHAPES)), default=list(range(len(SHAPES))))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--limits", action="store_true")
    parser.add_argument("--place", type=Path)
    asked = parser.parse_args()
    print("| shape | mode | foreseen GB | peak GB | ratio | while | foreseen s | CPU s | ratio | at 0.6 of the peak |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for shape in (SHAPES[number] for number in asked.shapes):
        with tempfile.TemporaryDirectory(dir=asked.place) as folder:
            model, text = Path(folder) / "model", Path(folder) / "text.txt"
            model.mkdir()
            build(model, shape.hidden, shape.intermediate, shape.blocks)
            write_text(text, (shape.samples + 8) * shape.seqlen)
            for mode in asked.modes:
                arguments = {
                    "model": str(model), "out": f"{folder}/{mode}", "calibration": str(text), **MODES[mode],
                    "samples": shape.samples, "seqlen": shape.seqlen,
                }  # fmt: skip
                said, told = child("quantize", **arguments)
                forecast = FORECAST.search(told)
                assert forecast is not None, told
                memory, time = bytes_in(forecast[1]), seconds(forecast[3])
                kept = limited(arguments, 0.6 * said["peak"]) if asked.limits else ""
                print(
                    f"| {shape.hidden}/{shape.intermediate} x {shape.blocks}, {shape.samples} x {shape.seqlen} | {mode} "
                    f"| {memory / 1e9:.2f} | {said['peak'] / 1e9:.2f} | {memory / said['peak']:.2f} | {forecast[2]} "
                    f"| {time:.0f} | {said['cpu']:.0f} | {time / said['cpu']:.2f} | {kept} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()

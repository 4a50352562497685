"""Is measured peak memory within 0.7 to 1 of the bound that a run states before it begins?

    OMP_NUM_THREADS=1 python benchmarks/speed/memory_bound.py [--small] [--assets FOLDER] [--shapes 0 1 2] [--limits]

Small runs: the demo at 4 bits and at a rate of 2.5, two small models in ASSETS where it is given, and a random model of two blocks
with 1,024 hidden values. Without --small, random models of realistic widths follow, at 4 bits in groups of 128 and at a rate of 3.
Each run is a process of its own; its bound is the line that it logs, its peak `ru_maxrss`. With --limits each of the latter is
run again with --memory at 0.7 of its bound, which it keeps, or refuses; then it runs with what the refusal asks for.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from large import MODES, build, child
from stages import write_text

from nearplane.demo import CALIBRATION, MODEL
from nearplane.system.sizes import bytes_in

LEAST, MOST = 0.7, 1.0  # of peak / bound
STATED = re.compile(r"quantizing takes at most ([\d.,]+ [A-Za-z]+) of memory \(while (.*?)\)")
ASKED = re.compile(r"Use --memory ([\d.]+GB)")
DEMO_TEXT = {"calibration": str(CALIBRATION), "samples": 8, "seqlen": 128}
SMALL_MODELS = ("models/stories260K", "models/babyllama105")


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
    Shape(512, 1408, 8, 32, 512),
)


def row(name: str, limits: bool = False, **keywords: object) -> bool:
    """Run, print a line of the table; return whether the peak is within what is asked."""
    with tempfile.TemporaryDirectory() as out:
        keywords |= {"out": f"{out}/out", "device": "cpu"}
        said, told = child("quantize", **keywords)
        stated = STATED.search(told)
        assert stated is not None, told
        bound = bytes_in(stated[1].replace(",", ""))
        kept = limited(keywords, int(0.7 * bound)) if limits else ""
    ratio = said["peak"] / bound
    print(f"| {name} | {bound / 1e9:.3f} | {said['peak'] / 1e9:.3f} | {ratio:.2f} | {stated[2]} | {kept} |", flush=True)
    return LEAST <= ratio <= MOST


def limited(keywords: dict[str, object], limit: int) -> str:
    """Run with a limit, and if it is refused with what is asked for; say how it went."""
    keywords = {**keywords, "overwrite": True}
    said, told = child("quantize", **keywords, memory=limit)
    if said:
        return f"{limit / 1e9:.2f}: kept, peak {said['peak'] / 1e9:.2f}"
    asked = ASKED.findall(told)[-1]
    said, _ = child("quantize", **keywords, memory=asked)
    return f"{limit / 1e9:.2f}: refused, {asked} asked for, peak {said.get('peak', float('nan')) / 1e9:.2f}"


def random_runs(shape: Shape, modes: list[str], place: Path | None, limits: bool) -> list[bool]:
    """Build a random model, and run it in each mode."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        model, text = Path(folder) / "model", Path(folder) / "text.txt"
        model.mkdir()
        build(model, shape.hidden, shape.intermediate, shape.blocks)
        write_text(text, (shape.samples + 8) * shape.seqlen)
        name = f"{shape.hidden}/{shape.intermediate} x {shape.blocks}, {shape.samples} x {shape.seqlen}"
        given = {"model": str(model), "calibration": str(text), "samples": shape.samples, "seqlen": shape.seqlen}
        return [row(f"{name}, {mode}", limits, **given, **MODES[mode]) for mode in modes]


def main() -> None:
    """Print the table; exit 1 where a peak is not within 0.7 to 1 of its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="the small runs only")
    parser.add_argument("--assets", type=Path, help="folder with " + " and ".join(SMALL_MODELS))
    parser.add_argument("--shapes", type=int, nargs="+", choices=range(len(SHAPES)), default=list(range(len(SHAPES))))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--limits", action="store_true")
    parser.add_argument("--place", type=Path)
    asked = parser.parse_args()
    print("| run | bound GB | peak GB | peak / bound | while | with a limit |\n|---|---|---|---|---|---|", flush=True)
    within = [
        row("demo, 4 bits", model=str(MODEL), bits=4, group_size=128, **DEMO_TEXT),
        row("demo, rate 2.5", model=str(MODEL), rate=2.5, **DEMO_TEXT),
    ]
    for name in SMALL_MODELS if asked.assets else ():
        within.append(row(f"{name}, 4 bits", model=str(asked.assets / name), bits=4, **DEMO_TEXT))
    for number in [0] if asked.small else asked.shapes:
        modes = ["bits"] if asked.small else asked.modes
        within += random_runs(SHAPES[number], modes, asked.place, asked.limits)
    if not all(within):
        sys.exit(f"{within.count(False)} of {len(within)} peaks are not within {LEAST} to {MOST} of their bound.")


if __name__ == "__main__":
    main()

"""What tuning gains against what it costs: KL after over KL before, by model, grid, calibration and steps, with CPU times.

ASSETS=... python benchmarks/quality/tuning.py docs/tuning.json [--models babyllama105 stories260K demo] [--grids 4 3 2 r2.125 r1.5]
    [--steps 64 192 0] [--offsets 0 300000]

Adds to the file what it does not hold yet, so that it may be stopped. A grid is a width (asymmetric, groups of 32 on
babyllama105, 64 on the demo, one step a row on stories260K) or "r" and a rate; 0 steps use each of 640 windows once. An
offset is the letter of the calibration text with which it begins.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import nearplane
from nearplane.demo import CALIBRATION, HELD_OUT, MODEL

ASSETS = Path(os.environ.get("ASSETS", "../shared/assets"))
GROUPS = {"babyllama105": 32, "demo": 64, "stories260K": None}
WINDOWS, SEQLEN, TUNED_WINDOWS = 128, 256, 640


def main() -> None:
    """Measure what is asked for, one solve for all numbers of steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", default=list(GROUPS))
    parser.add_argument("--grids", nargs="+", default=["4", "3", "2", "r2.125", "r1.5"])
    parser.add_argument("--steps", nargs="+", type=int, default=[0])
    parser.add_argument("--offsets", nargs="+", type=int, default=[0])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for offset in asked.offsets:
        for model in asked.models:
            for grid in asked.grids:
                measure(asked.out, model, grid, offset, asked.steps)


def measure(out: Path, model: str, grid: str, offset: int, steps: list[int]) -> None:
    """Solve once and tune by each number of steps that the file does not hold."""
    rows: list[dict[str, Any]] = json.loads(out.read_text()) if out.exists() else []
    key = {"model": model, "grid": grid, "offset": offset}
    have = {row["asked"] for row in rows if key.items() <= row.items()}
    todo = [count for count in steps if count not in have]
    if not todo:
        return
    original = MODEL if model == "demo" else ASSETS / "models" / model
    source = CALIBRATION if model == "demo" else ASSETS / "text" / "tinystories_train_2m.txt"
    test = (HELD_OUT, 96) if model == "demo" else (ASSETS / "text" / "tinystories_valid.txt", 128)
    with tempfile.TemporaryDirectory() as place:
        text = Path(place) / "text.txt"
        text.write_text(source.read_text(encoding="utf-8")[offset:], encoding="utf-8")
        words: dict[str, Any] = {"rate": float(grid[1:])} if grid[0] == "r" else {"bits": int(grid), "symmetric": False}
        if grid[0] != "r":
            words |= {"group_size": GROUPS[model], "format": "gptq_v2"}
        solved = Path(place) / "solved"
        began = time.process_time()
        words |= {"samples": WINDOWS, "seqlen": SEQLEN, "first_token": "none"}
        nearplane.quantize(original, solved, calibration=str(text), **words)
        solve, before = time.process_time() - began, _quality(solved, original, *test)
        for count in todo:
            began, new = time.process_time(), Path(place) / f"tuned-{count}"
            words = dict(against=original, calibration=text, samples=TUNED_WINDOWS)
            record = nearplane.tune(solved, new, steps=count or None, **words)
            took, after = time.process_time() - began, _quality(new, original, *test)
            rows = json.loads(out.read_text()) if out.exists() else []
            rows.append(
                key
                | {"asked": count, "steps": record.tuning.steps, "solve": round(solve, 1), "tune": round(took, 1)}
                | {"kl": [before[0], after[0]], "perplexity": [before[1], after[1]], "rate": record.rate}
            )
            out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
            print(rows[-1], flush=True)


def _quality(folder: Path, original: Path, text: Path, windows: int) -> tuple[float, float]:
    """Return KL to the original and perplexity, on the first windows of a text."""
    found = nearplane.evaluate(folder, text, against=original, samples=windows, seqlen=SEQLEN, protocol="papers")
    return round(found.kl, 6), round(found.perplexity, 4)


if __name__ == "__main__":
    main()

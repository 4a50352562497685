"""Perplexity at true bits on disk: nearplane's rate mode, what each part of it is worth, and rounding to nearest.

ASSETS=... python benchmarks/quality/rate.py [--models babyllama105 stories260K demo] [--rates 1.5 2.125 3.125 4.125]
    [--rows default]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nearplane
from nearplane import demo
from nearplane.verbs.evaluate import evaluate

ASSETS = Path(os.environ.get("ASSETS", "../shared/assets"))
ROWS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "nearest plane": {"solver": "nearest-plane"},
    "beam of 32": {"beam": 32},
    "uniform": {"allocate": "uniform"},
    "equal rows": {"rows": "equal"},
    "damp 0.01": {"sweep_damp": 0.01},
    "not corrected": {"correct": False},
    "round to nearest": {"allocate": "uniform", "solver": "round-to-nearest"},
}


def texts(model: str) -> tuple[Path, Path, Path, int]:
    """Return folder, calibration text, evaluation text and evaluation windows of a model's name."""
    if model == "demo":
        return demo.MODEL, demo.CALIBRATION, demo.HELD_OUT, demo.EVALUATION_WINDOWS
    text = ASSETS / "text"
    return ASSETS / "models" / model, text / "tinystories_train_2m.txt", text / "tinystories_valid.txt", 128


def main() -> None:
    """Print one line a row; bits per weight on disk count every byte of the layers' tensors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=("babyllama105", "stories260K", "demo"))
    parser.add_argument("--rates", nargs="+", type=float, default=(1.5, 2.125, 3.125, 4.125))
    parser.add_argument("--rows", nargs="+", default=tuple(ROWS), choices=tuple(ROWS))
    arguments = parser.parse_args()
    columns = ("model", "row", "asked", "on disk", "codes", "above the limit", "perplexity", "KL, nats", "seconds")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for model in arguments.models:
        folder, calibration, text, windows = texts(model)
        for rate in arguments.rates:
            for row in arguments.rows:
                with tempfile.TemporaryDirectory() as scratch:
                    out = Path(scratch) / "out"
                    record = nearplane.quantize(
                        folder, out, rate=rate, calibration=str(calibration), samples=128, seqlen=256, **ROWS[row]
                    )
                    found = evaluate(out, text, seqlen=256, samples=windows, against=folder)
                above = "-" if record.above_limit is None else f"{record.above_limit:.3f}"
                print(
                    f"| {model} | {row} | {rate} | {record.rate:.4f} | {record.entropy:.3f} | {above} | {found.perplexity:.4f} "
                    f"| {found.kl:.5f} | {record.seconds:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()

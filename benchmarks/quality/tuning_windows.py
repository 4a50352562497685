"""KL of `tune` by its default number of windows, after runs with few and with many calibration windows.

ASSETS=... python benchmarks/quality/tuning_windows.py [--samples 16 128] [--offsets 0 600000] [--factor 5]

babyllama105, 3 bits, asymmetric in groups of 32, windows of 256 tokens; KL on 128 held-out windows. An offset is the
letter of the calibration text with which it begins. With --factor, tuning takes so many times the windows of the run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch

import nearplane

ASSETS = Path(os.environ.get("ASSETS", "../shared/assets"))
SEQLEN, HELD_OUT = 256, 128


def main() -> None:
    """Print one row for each calibration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", nargs="+", type=int, default=[16, 128])
    parser.add_argument("--offsets", nargs="+", type=int, default=[0, 600000])
    parser.add_argument("--factor", type=int)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| windows of the run | offset | windows of tune | steps | KL solved | KL tuned | CPU s of tune |")
    for offset in asked.offsets:
        for samples in asked.samples:
            measure(samples, offset, None if asked.factor is None else asked.factor * samples)


def measure(samples: int, offset: int, windows: int | None) -> None:
    """Solve and tune once, and print a row."""
    model, texts = ASSETS / "models" / "babyllama105", ASSETS / "text"
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        text, solved, tuned = place / "text.txt", place / "solved", place / "tuned"
        text.write_text((texts / "tinystories_train_2m.txt").read_text(encoding="utf-8")[offset:], encoding="utf-8")
        words = dict(bits=3, symmetric=False, group_size=32, format="gptq_v2", first_token="none")
        nearplane.quantize(model, solved, calibration=text, samples=samples, seqlen=SEQLEN, **words)
        began = time.process_time()
        tuning = nearplane.tune(solved, tuned, against=model, calibration=text, samples=windows).tuning
        took = time.process_time() - began
        test = dict(against=model, samples=HELD_OUT, seqlen=SEQLEN, protocol="papers")
        before, after = (
            nearplane.evaluate(each, texts / "tinystories_valid.txt", **test).kl for each in (solved, tuned)
        )
    print(
        f"| {samples} | {offset} | {tuning.samples} | {tuning.steps} | {before:.5f} | {after:.5f} | {took:.0f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()

"""Perplexity of a model quantized in several ways; the table of docs/results/quality-on-grids.md.

ASSETS=... python benchmarks/quality/quality.py [--model babyllama105] [--group-size 32] [--windows 0 128]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from pathlib import Path

import torch

import nearplane
from nearplane.calibration.texts import read_windows
from nearplane.verbs.evaluate import load_dense
from nearplane.verbs.evaluate_networks import log_probabilities

ASSETS = Path(os.environ.get("ASSETS", "../shared/assets"))
ROWS = (
    {"bits": 4, "symmetric": True},
    {"bits": 3, "symmetric": True},
    {"bits": 3, "symmetric": False},
    {"bits": 2, "symmetric": False},
    {"bits": 3, "symmetric": False, "correct": False},
    {"bits": 3, "symmetric": False, "solver": "round-to-nearest"},
)


def perplexity(folder: Path, text: Path, seqlen: int, first: int, last: int) -> float:
    """Perplexity over windows first .. last of a text."""
    model, tokenizer = load_dense(folder, torch.device("cpu"))
    windows = read_windows(tokenizer, text, samples=last, seqlen=seqlen)[first:]
    total = sum(
        float(log_probabilities(model, batch).gather(-1, batch[:, 1:, None]).double().sum())
        for batch in windows.split(8)
    )
    return math.exp(-total / windows[:, 1:].numel())


def _value(text: str) -> object:
    """Read a number or true/false; anything else is a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def main() -> None:
    """Print one line a row: what was asked, perplexity, bits per weight in the file, seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="babyllama105")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument(
        "--windows", type=int, nargs=2, default=(0, 128), help="of the evaluation text, first and past the last"
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="added to every row, e.g. order=pivoted"
    )
    arguments = parser.parse_args()
    source, texts = ASSETS / "models" / arguments.model, ASSETS / "text"
    common = {name: _value(text) for name, text in (pair.split("=", 1) for pair in arguments.set)}
    valid = texts / "tinystories_valid.txt"
    print(f"original: {perplexity(source, valid, arguments.seqlen, *arguments.windows):.4f}")
    for row in ROWS:
        with tempfile.TemporaryDirectory() as place:
            record = nearplane.quantize(
                source, Path(place) / "out", group_size=arguments.group_size, format="gptq_v2",
                calibration=str(texts / "tinystories_train_2m.txt"), samples=arguments.samples, seqlen=arguments.seqlen,
                **{**common, **row},
            )  # fmt: skip
            found = perplexity(Path(place) / "out", valid, arguments.seqlen, *arguments.windows)
            print(f"{row | common}: {found:.4f}  {record.rate:.3f} bits/weight  {record.seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()

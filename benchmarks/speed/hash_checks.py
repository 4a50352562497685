"""Cost of comparing a checkpoint's files with its run record: `nearplane.load` with and without it.

python benchmarks/speed/hash_checks.py [FOLDER ...] [--random] [--repeats 9]

A FOLDER is a checkpoint of nearplane. With --random, two random models of 514 million weights are written and measured
as well: 4 bits in compressed-tensors, and 3 bits entropy-coded. Files are in the page cache; every load is the second one
of a process of its own, and loads with and without the check take turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from loading import write
from transformers import LlamaConfig
from transformers.utils import logging

import nearplane
from nearplane.system.files import sha256

SHAPE = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=10, num_attention_heads=16, vocab_size=2048)


def random_checkpoints(place: Path) -> list[Path]:
    """Write a random model in two formats, each with a record that lists the hashes of its files."""
    config = LlamaConfig(**SHAPE, dtype="bfloat16", tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    folders = []
    for format in ("compressed-tensors", "nearplane"):
        out = place / format
        write(out, place / f"source of {format}", config, 3.0, format)
        files = {path.name: sha256(path) for path in out.iterdir() if path.name != "nearplane.json"}
        (out / "nearplane.json").write_text(json.dumps({"files": files}))
        folders.append(out)
    return folders


def seconds_of(folder: Path, check: bool) -> float:
    """Return the seconds of a load in a process of its own."""
    command = [sys.executable, __file__, "--measure", str(folder), str(int(check))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure(folder: str, check: bool) -> None:
    """Load a checkpoint twice and print the seconds of the second time."""
    logging.disable_progress_bar()
    for _ in range(2):
        began = time.perf_counter()
        kept = nearplane.load(folder, device="cpu", check=check)
        seconds = time.perf_counter() - began
        del kept
    print(seconds)


def main() -> None:
    """Compare loads with and without the check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure[0], options.measure[1] == "1")
        return
    with tempfile.TemporaryDirectory() as place:
        for folder in [*options.folders, *(random_checkpoints(Path(place)) if options.random else [])]:
            size = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf"))
            pairs = [(seconds_of(folder, True), seconds_of(folder, False)) for _ in range(options.repeats)]
            checked, unchecked = np.median(pairs, axis=0)
            ratio = np.median([first / second for first, second in pairs])
            print(
                f"{folder.name}: weight files of {size / 1e6:,.1f} MB, load with check {checked:.3f} s, without "
                f"{unchecked:.3f} s, median ratio of {options.repeats} pairs {ratio:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

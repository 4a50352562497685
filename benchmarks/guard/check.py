"""Has something become slower? CPU times as multiples of a product's, beside those in baselines.json.

    make bench-check                       # ends with 1 if a ratio is more than 15 % above its baseline
    python benchmarks/guard/check.py --write     # makes today's ratios the baselines of this processor

Every case and the product of reference (1024 x 1024 by 1024, float32, by the library that is fastest here) run in turns in one
thread; a ratio is the median of a case's CPU times over the median of the product's. What looks slower is measured again, in
more rounds, before it counts. Baselines are kept for each kind of processor. On one that has none, those of the first are used and
three times the loss is allowed: processors differ in what a product costs beside other work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import nearplane
from nearplane import GridScheme, RateScheme
from nearplane.demo import CALIBRATION, MODEL
from nearplane.system.device import Device
from nearplane.system.matmul_library import chosen_library

BASELINES = Path(__file__).with_name("baselines.json")
LOSS = 0.15  # a ratio may be above its baseline by so much
ELSEWHERE = 3  # times that, on a processor without baselines
ROUNDS, AGAIN = 5, 10  # of measurements, and of those of what looks slower
PRODUCTS = 10  # in one measurement of the reference
TEXT = {"calibration": str(CALIBRATION), "samples": 24, "seqlen": 128}

Work = Callable[[], object]


def cases(place: Path) -> dict[str, Work]:
    """Return what is measured, by name: whole runs on the first block of the demo, one matrix of 768 inputs, and starts."""
    small, made = place / "model", torch.Generator().manual_seed(0)
    AutoModelForCausalLM.from_pretrained(MODEL, num_hidden_layers=1).save_pretrained(small)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (small / name).write_bytes((MODEL / name).read_bytes())
    X = torch.randn(4096, 768, generator=made) * torch.linspace(2.0, 0.2, 768)
    W, H = torch.randn(512, 768, generator=made) / 28, X.T @ X / len(X)

    def run(**options: object) -> Work:
        return lambda: nearplane.quantize(small, place / "out", overwrite=True, **TEXT, **options)

    return {
        "a run, 4 bits": run(bits=4),
        "a run, 2.5 bits entropy-coded": run(rate=2.5),
        "a run checked again": lambda: nearplane.verify(place / "out", against=small, calibration=TEXT["calibration"]),
        "a matrix, 3 bits": lambda: nearplane.quantize_matrix(W, H, GridScheme(bits=3)),
        "a matrix, 3 bits entropy-coded": lambda: nearplane.quantize_matrix_to_rate(W, H, RateScheme(rate=3.0)),
        "a refusal on the command line": lambda: subprocess.run(
            [sys.executable, "-m", "nearplane", "quantize", small, place / "never", "--bits", "9"],
            capture_output=True,
            check=False,
        ),
    }


def ratios(work: Mapping[str, Work], rounds: int) -> dict[str, float]:
    """Return the median CPU time of each case over the median of the product's, all measured in turns."""
    A = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1))
    product = "product"
    times: dict[str, list[float]] = {name: [] for name in (product, *work)}
    for _ in range(rounds):
        for name, do in work.items():
            times[name].append(cpu_time(do))
            times[product].append(cpu_time(lambda: [A @ A for _ in range(PRODUCTS)]) / PRODUCTS)
    unit = statistics.median(times.pop(product))
    return {name: statistics.median(spent) / unit for name, spent in times.items()}


def cpu_time(do: Work) -> float:
    """Return the CPU seconds that some work takes, in this process and in those that it starts."""
    began = cpu_seconds()
    do()
    return cpu_seconds() - began


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def slower(found: Mapping[str, float], baseline: Mapping[str, float], allowed: float) -> list[str]:
    """Return the cases whose ratio is more than `allowed` above its baseline.

    Raises:
        SystemExit: a case has no baseline, or a baseline no case.
    """
    if unlike := found.keys() ^ baseline.keys():
        sys.exit(
            f"Cases and baselines differ: {', '.join(sorted(unlike))} stand in one of the two only. Expected a baseline for "
            f"every case: run benchmarks/guard/check.py --write on a commit that is known to be fast."
        )
    return [name for name, ratio in found.items() if ratio > baseline[name] * (1 + allowed)]


def processor() -> str:
    """Return what kind of processor this is: maker, family and model."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    words = [said[key] for key in ("vendor_id", "cpu family", "model") if key in said]
    return " ".join(words) or f"{platform.system()} {platform.machine()}"


def main() -> None:
    """Print a table; end with 1 if something has become slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="make what is found the baselines of this processor")
    write, here, known = parser.parse_args().write, processor(), json.loads(BASELINES.read_text())
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as place, chosen_library([(1024, 1024)], 10**9, Device(torch.device("cpu"))):
        work = cases(Path(place))
        ratios(work, 1)  # compiles
        found = ratios(work, AGAIN if write else ROUNDS)
        if write:
            known[here] = {name: round(ratio, 2) for name, ratio in found.items()}
            BASELINES.write_text(json.dumps(known, indent=2) + "\n")
        baseline = known.get(here, next(iter(known.values())))
        allowed = LOSS if here in known else LOSS * ELSEWHERE
        if doubtful := slower(found, baseline, allowed):
            found |= ratios({name: work[name] for name in doubtful}, AGAIN)
    lost = slower(found, baseline, allowed)
    print(f"{here}: CPU time as multiples of a product's; up to {100 * allowed:.0f} % more is allowed")
    for name, ratio in found.items():
        more = 100 * (ratio / baseline[name] - 1)
        print(
            f"  {name}: {ratio:.1f}, baseline {baseline[name]:.1f} ({more:+.1f} %){'  SLOWER' if name in lost else ''}"
        )
    if lost:
        sys.exit(f"Slower than the baseline, measured twice: {', '.join(lost)}.")


if __name__ == "__main__":
    main()

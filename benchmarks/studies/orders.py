"""What the rounding order does to the Gram-Schmidt lengths of real layers: the trace of `d` and its unevenness.

    ASSETS=... python benchmarks/studies/orders.py [--models demo babyllama105 stories260K] [--damps 0.01 0.1]

Inputs of the float model, 128 windows of 256 tokens; 0.01 is the usual damping, 0.1 that of the sweep where targets are
corrected. No order changes the determinant of `d`, so that traces compare as spreads do:

    spread = 1/2 log2(AM(d) / GM(d)) bits, what one step for all columns loses at high rate against one for each column

A layer counts once, and so do q, k and v, which share their input; shares of distinct inputs are given besides.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import get_args

import torch

from nearplane import demo
from nearplane.calibration.activations import skeleton
from nearplane.calibration.second_moments import Observed
from nearplane.calibration.separate_passes import observe
from nearplane.calibration.stages import stages
from nearplane.calibration.texts import Frame, read_windows
from nearplane.lattice.factor import Order, factorize
from nearplane.models.model import open_model

ASSETS = Path(os.environ.get("ASSETS", "../shared/assets"))
MODELS = ("demo", "babyllama105", "stories260K")
SEQLEN = 256
SAME = 1 + 1e-9  # traces of one order computed in two ways differ by this much
CLAIM = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its texts.

    Args:
        scored, tuning: windows of the held-out text, first and past the last: for results, and for choosing between settings.
        group_size: for fixed grids; None where 32 does not divide all layers.
    """

    folder: Path
    calibration: Path
    held_out: Path
    scored: tuple[int, int]
    tuning: tuple[int, int]
    group_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One input in all orders."""

    layers: int  # that see it
    traces: dict[Order, float]
    spreads: dict[Order, float]

    @property
    def ratio(self) -> float:
        """Trace of the pivoted order over that of the activation order."""
        return self.traces["pivoted"] / self.traces["activation"]


def case(name: str) -> Case:
    """Return the model of a name with its texts."""
    if name == "demo":
        return Case(
            folder=demo.MODEL, calibration=demo.CALIBRATION, held_out=demo.HELD_OUT, scored=(0, demo.EVALUATION_WINDOWS),
            tuning=(demo.EVALUATION_WINDOWS, 264), group_size=32,
        )  # fmt: skip
    texts = ASSETS / "text"
    return Case(
        folder=ASSETS / "models" / name, calibration=texts / "tinystories_train_2m.txt",
        held_out=texts / "tinystories_valid.txt", scored=(0, 128), tuning=(128, 320),
        group_size=None if name == "stories260K" else 32,
    )  # fmt: skip


def observations(chosen: Case, samples: int = 128, seqlen: int = SEQLEN) -> Iterator[Observed]:
    """Yield the layers of the float model by the input that they share, with its second moments."""
    model = open_model(str(chosen.folder))
    tokens = read_windows(model.tokenizer(), chosen.calibration, samples=samples, seqlen=seqlen, frame=Frame())
    stream = skeleton(model, tokens.split(8), device="cpu", dtype=torch.float32)
    for block in model.blocks:
        with block.on("cpu", torch.float32, original=False):
            yield from observe(block, stages(block, stream), stream)
            stream.advance(block)


def entry(observed: Observed, damp: float) -> Entry:
    """Factor one input in every order."""
    H = observed.moments[observed.layers[0].name].H
    lengths = {order: factorize(H, order, damp=damp).d for order in get_args(Order)}
    return Entry(
        layers=len(observed.layers), traces={order: float(d.sum()) for order, d in lengths.items()},
        spreads={order: 0.5 * float(d.mean().log2() - d.log2().mean()) for order, d in lengths.items()},
    )  # fmt: skip


def row(name: str, damp: float, entries: list[Entry]) -> str:
    """Return a line of the table: means, medians and shares over layers."""
    layers = [each for each in entries for _ in range(each.layers)]
    spreads = " | ".join(f"{mean(each.spreads[order] for each in layers):.4f}" for order in get_args(Order))
    ratios = [each.ratio for each in layers]
    return (
        f"| {name} | {damp} | {len(layers)} ({len(entries)}) | {100 * share(layers):.1f} % ({100 * share(entries):.1f} %) | "
        f"{median(ratios):.5f} | {max(ratios):.5f} | {spreads} |"
    )


def share(entries: list[Entry]) -> float:
    """Return the fraction of entries whose trace in pivoted order is at most that in activation order."""
    return mean(each.ratio <= SAME for each in entries)


def main() -> None:
    """Print one line a model and damping, and whether the claim holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--damps", type=float, nargs="*", default=(0.01, 0.1))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    spreads = " | ".join(f"spread {order}" for order in get_args(Order))
    print(
        f"| model | damping | layers (inputs) | trace pivoted <= activation | median ratio | worst ratio | {spreads} |"
    )
    print("|" + "---|" * (6 + len(get_args(Order))))
    found: dict[float, list[Entry]] = {damp: [] for damp in arguments.damps}
    for name in arguments.models:
        entries: dict[float, list[Entry]] = {damp: [] for damp in arguments.damps}
        for observed in observations(case(name)):
            for damp in arguments.damps:
                entries[damp].append(entry(observed, damp))
        for damp in arguments.damps:
            print(row(name, damp, entries[damp]), flush=True)
            found[damp] += entries[damp]
    print("\n".join(row("all", damp, entries) for damp, entries in found.items()))
    layers = [each for entries in found.values() for each in entries for _ in range(each.layers)]
    print(
        f"\nThe trace in pivoted order is at most that in activation order on {100 * share(layers):.1f} % of the layers; "
        f"claimed: at least {100 * CLAIM:.0f} %. {'Holds' if share(layers) >= CLAIM else 'Fails'}."
    )


if __name__ == "__main__":
    main()

"""What few calibration tokens do, and which loss shows it: the table of docs/results/quality-on-grids.md.

ASSETS=... python benchmarks/studies/extra.py [--model babyllama105] [--tokens 2 16 512 1024 4096 16384] [--seqlen 128]
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from pathlib import Path
from statistics import fmean, median

import nearplane
from nearplane.errors import CalibrationError
from nearplane.record.record import RunRecord

ASSETS = Path(os.environ.get("ASSETS", "../shared/assets"))
HEAD = (
    "| tokens | for each input of the widest layer | loss on what was fitted | nearest loses | loss on extra windows "
    "| nearest loses there | KL |"
)


def line(record: RunRecord, kl: float) -> str:
    """Return a row of the table: means of relative losses over layers, medians of how many times as much nearest loses."""
    layers = record.layers
    widest = max(layer.in_features for layer in layers)
    fitted, extra = (
        fmean(losses) for losses in zip(*((x.relative_loss, x.extra_relative_loss) for x in layers), strict=True)
    )
    times = median(x.nearest_loss / x.loss for x in layers), median(x.extra_nearest_loss / x.extra_loss for x in layers)
    return (
        f"| {record.tokens:,} | {record.tokens / widest:.1f} | {fitted:.2e} | {times[0]:.2f} x | {extra:.3e} | {times[1]:.2f} x "
        f"| {kl:.4f} |"
    )


def main() -> None:
    """Quantize to 3 bits with so many tokens, print a line each, and whether losses and divergence rank them alike."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="babyllama105")
    parser.add_argument("--tokens", type=int, nargs="+", default=(2, 16, 512, 1024, 4096, 16384))
    parser.add_argument("--seqlen", type=int, default=128)
    arguments = parser.parse_args()
    logging.getLogger("nearplane").setLevel(logging.ERROR)  # that tokens are few is the point here
    source, texts = ASSETS / "models" / arguments.model, ASSETS / "text"
    rows: list[tuple[float, float]] = []
    refused: list[str] = []
    print(f"{HEAD}\n|{'---|' * 7}")
    for tokens in arguments.tokens:
        seqlen = min(tokens, arguments.seqlen)
        with tempfile.TemporaryDirectory() as place:
            out = Path(place) / "out"
            try:
                record = nearplane.quantize(
                    source, out, bits=3, group_size=32, calibration=str(texts / "tinystories_train_2m.txt"),
                    samples=tokens // seqlen, seqlen=seqlen, first_token="none",
                )  # fmt: skip
            except CalibrationError as error:
                refused.append(str(error))
                continue
            text = texts / "tinystories_valid.txt"
            kl = nearplane.evaluate(out, text, seqlen=256, samples=128, against=source, protocol="papers").kl
        print(line(record, kl), flush=True)
        rows.append((fmean(layer.extra_relative_loss for layer in record.layers), kl))
    ranked = [sorted(range(len(rows)), key=lambda row, figure=figure: rows[row][figure]) for figure in (0, 1)]
    print(f"the same ranking: {ranked[0] == ranked[1]}")
    for sentence in refused:
        print(f"refused: {sentence}")


if __name__ == "__main__":
    main()

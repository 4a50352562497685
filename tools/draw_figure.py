"""Draw the figure of the README from what the demonstration measured.

nearplane demo --json > demo.json
python tools/draw_figure.py demo.json docs/demo.svg        (needs the extra "figures")
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

STYLE = {"round-to-nearest": ("#D55E00", "s", "round to nearest"), "nearest-plane": ("#0072B2", "o", "nearplane")}


def draw(rows: list[dict[str, object]], out: Path) -> None:
    """Plot KL divergence from the original against bits per weight, one line a solver."""
    mpl.rcParams |= {"svg.hashsalt": "nearplane", "font.size": 11}
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for solver, (colour, marker, label) in STYLE.items():
        points = [(row["rate"], row["kl"]) for row in rows if row["solver"] == solver]
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=label)
        for row, (x, y) in zip((row for row in rows if row["solver"] == solver), points, strict=True):
            axes.annotate(
                f"{row['perplexity']:.2f}", (x, y), textcoords="offset points", xytext=(6, 5), fontsize=9, color=colour
            )
    original = next(row for row in rows if row["solver"] == "-")
    axes.set_yscale("log")
    axes.set_xlabel("bits per quantized weight, every byte of the layers counted")
    axes.set_ylabel("KL to the original, nats per token")
    axes.set_title(f"The demo model (numbers: perplexity; original {original['perplexity']:.2f})", fontsize=11)
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))

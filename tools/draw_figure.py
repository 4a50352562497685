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

STYLE = {  # (on which grid, by which solver): colour, marker, label
    ("grid", "round-to-nearest"): ("#D55E00", "s", "grids, round to nearest"),
    ("grid", "nearest-plane"): ("#009E73", "D", "grids, nearplane"),
    ("coded", "k-best"): ("#0072B2", "o", "entropy-coded, nearplane --rate"),
}


def draw(rows: list[dict[str, object]], out: Path) -> None:
    """Plot KL divergence from the original against bits per weight, one line a kind of grid and solver."""
    mpl.rcParams |= {"svg.hashsalt": "nearplane", "font.size": 11}
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for kind, (colour, marker, label) in STYLE.items():
        found = [row for row in rows if ("coded" if "coded" in row["grid"] else "grid", row["solver"]) == kind]
        points = [(row["rate"], row["kl"]) for row in found]
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=label)
        for row, (x, y) in zip(found, points, strict=True):
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

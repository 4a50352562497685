"""Draw what tuning gains against what it costs, from what benchmarks/quality/tuning.py measured.

python tools/draw_tuning.py docs/tuning.json docs/tuning.svg        (needs the extra "figures")
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

COLOURS = {"4": "#0072B2", "3": "#009E73", "2": "#D55E00", "r2.125": "#CC79A7", "r1.5": "#E69F00"}
MODELS = {
    "stories260K": "stories260K, hidden 64",
    "babyllama105": "babyllama105, hidden 128",
    "demo": "demo, hidden 256",
}
TICKS = (2, 4, 10, 30)


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Plot KL after over KL before against the time of solve and tuning over that of the solve, a line a grid."""
    mpl.rcParams |= {"svg.hashsalt": "nearplane", "font.size": 10}
    figure, axes = plt.subplots(1, len(MODELS), figsize=(9.6, 3.4), layout="constrained", sharex=True, sharey=True)
    for panel, (model, title) in zip(axes, MODELS.items(), strict=True):
        for grid, colour in COLOURS.items():
            found = [row for row in rows if (row["model"], row["grid"], row["offset"]) == (model, grid, 0)]
            points = sorted((1 + row["tune"] / row["solve"], row["kl"][1] / row["kl"][0]) for row in found)
            if points:
                label = f"rate {grid[1:]}" if grid[0] == "r" else f"{grid} bits"
                panel.plot(*zip((1, 1), *points, strict=True), color=colour, marker="o", markersize=4, label=label)
        panel.set_title(title, fontsize=10)
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(FixedLocator((1, *TICKS)))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_xlabel("CPU time over that of the run alone")
    axes[0].set_ylabel("KL over that without tuning")
    axes[1].legend(frameon=False, fontsize=9)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))

"""Figure of `compare`: perplexity against bits per weight, or for several models against the size of their files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearplane.errors import RecipeError
from nearplane.recipe.recipe import Way
from nearplane.verbs.compare import ORIGINAL_METHOD, Row
from nearplane.verbs.compare_request import WAYS
from nearplane.verbs.figure_file import figure_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {  # colour and marker of each curve; the palette of Okabe and Ito suits colour-blind readers
    "rtn-mse": ("#E69F00", "s"),
    "gptq-mse": ("#D55E00", "D"),
    "rtn-huffman": ("#56B4E9", "^"),
    "gptq-huffman": ("#009E73", "v"),
    "nearplane-grid": ("#CC79A7", "P"),
    "nearplane": ("#0072B2", "o"),
}
MIN_BITS = 1.0  # width of the figure at least
MAX_PERPLEXITY_RATIO = 2.5  # top of the figure, as a multiple of the original's perplexity


def draw(rows: Iterable[Row], out: str | Path) -> None:
    """Draw perplexity against bits per weight; for several models, against file size with one panel per method.

    Values above `MAX_PERPLEXITY_RATIO` times the original's perplexity are written in the legend.

    Args:
        rows: Rows of `compare`.
        out: File to write; its name ends in .svg, .png or .pdf.

    Raises:
        RecipeError: matplotlib is not installed, or `out` has another suffix.
    """
    measured = [row for row in rows if row.perplexity is not None]
    originals = [row for row in measured if row.method == ORIGINAL_METHOD]
    methods: list[Way] = [way for way in WAYS if any(row.method == way for row in measured)]
    with figure_file(out) as figure:
        if not methods:
            raise RecipeError("There is nothing to draw, because no method was measured.")
        if len(originals) == 1:
            figure.set_size_inches(8.4, 4.4)
            _curves(figure.subplots(), originals[0], {w: [r for r in measured if r.method == w] for w in methods})
            figure.legend(loc="outside right upper", frameon=False, fontsize=8)  # inside, its lines look like curves
            return
        from matplotlib.lines import Line2D

        columns = min(3, len(methods))
        lines = math.ceil(len(methods) / columns)
        figure.set_size_inches(max(5.0, 3.4 * columns), max(3.6, 3.0 * lines))
        panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
        unit, word = (1e9, "GB") if max(row.bytes or 0 for row in measured) >= 1e8 else (1e6, "MB")
        bits = sorted({row.asked for row in measured if row.asked is not None}, reverse=True)
        markers = dict(zip(bits, itertools.cycle("osD^vP")))
        for panel in panels[len(methods) :]:
            panel.set_visible(False)
        for panel, way in zip(panels, methods, strict=False):
            _panel(panel, way, originals, [row for row in measured if row.method == way], unit, markers)
        figure.supxlabel(f"weight files, {word}", fontsize=10)
        figure.supylabel("perplexity", fontsize=10)
        shapes = [*((f"{each:g} bits", marker) for each, marker in markers.items()), ("original", "*")]
        names = [Line2D([], [], color="#444444", marker=marker, linestyle="", label=name) for name, marker in shapes]
        figure.legend(
            handles=names, loc="outside upper right", ncols=len(names), frameon=False, fontsize=8, handletextpad=0
        )


def _curves(axes: Axes, original: Row, curves: dict[Way, list[Row]]) -> None:
    """Draw the perplexity of one model against bits, one curve per method."""
    assert original.perplexity is not None
    top = _scale(axes, [original])
    axes.axhline(original.perplexity, color="#444444", linewidth=1, linestyle=(0, (4, 3)), label="original")
    for way, rows in curves.items():
        colour, marker = STYLES[way]
        points = sorted((row.rate or 0.0, row.perplexity or 0.0) for row in rows)
        width, label = 2.2 if way == "nearplane" else 1.3, _label(way, points, top)
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linewidth=width, markersize=5, label=label)
    axes.margins(x=0.04)
    left, right = axes.get_xlim()
    if right - left < MIN_BITS:  # one number of bits was asked for
        axes.set_xlim((left + right - MIN_BITS) / 2, (left + right + MIN_BITS) / 2)
    axes.set_xlabel("bits per quantized weight, every byte of the layers counted")
    axes.set_ylabel("perplexity")
    axes.set_title(Path(original.model).name, fontsize=11, loc="left")


def _label(name: str, points: Iterable[tuple[float, float]], top: float) -> str:
    """Return the label of a curve, with its values above the top of the figure."""
    above = ", ".join(f"{y:.3g}" for _, y in points if y > top)
    return f"{name} (above: {above})" if above else name


def _panel(
    axes: Axes, way: Way, originals: list[Row], rows: list[Row], unit: float, markers: Mapping[float, str]
) -> None:
    """Draw the perplexity of one method against file size, one curve per model that ends in the original."""
    from matplotlib.ticker import LogLocator, NullLocator

    top = _scale(axes, originals)
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    colours = [colour for colour, _ in STYLES.values()][::-1]
    for original, colour in zip(originals, itertools.cycle(colours), strict=False):
        line: list[Any] = sorted((row for row in rows if row.model == original.model), key=lambda row: row.bytes or 0)
        points = [(row.bytes / unit, row.perplexity) for row in [*line, original]]
        label = _label(Path(original.model).name, points, top)
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.3, label=label)
        for row, (x, y) in zip([*line, original], points, strict=True):
            marker = "*" if row is original else markers[row.asked]
            axes.plot(x, y, color=colour, marker=marker, markersize=8 if row is original else 4.5)
    axes.legend(frameon=False, fontsize=7, handlelength=0, handletextpad=0, labelcolor="linecolor")
    axes.set_title(way, fontsize=10, loc="left")


def _scale(axes: Axes, originals: list[Row]) -> float:
    """Set up a logarithmic axis from just below the originals to the top of the figure, and return that top."""
    from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

    known = [row.perplexity for row in originals if row.perplexity is not None]
    top = MAX_PERPLEXITY_RATIO * max(known)
    axes.set_yscale("log")
    axes.set_ylim(min(known) * 0.93, top)
    axes.yaxis.set_major_locator(MaxNLocator(7))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return top

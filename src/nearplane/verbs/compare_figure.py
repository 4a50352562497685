"""The figure of `compare`: perplexity against bits per weight, or of several models against the gigabytes of their files."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearplane.errors import RecipeError
from nearplane.recipe.recipe import Way
from nearplane.system.files import check_writable, write_whole
from nearplane.verbs.compare import ORIGINAL, WAYS, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = {  # colour and marker of a curve; colours that the colour-blind tell apart (Okabe and Ito)
    "rtn-mse": ("#E69F00", "s"),
    "gptq-mse": ("#D55E00", "D"),
    "rtn-huffman": ("#56B4E9", "^"),
    "gptq-huffman": ("#009E73", "v"),
    "nearplane-grid": ("#CC79A7", "P"),
    "nearplane": ("#0072B2", "o"),
}
CEILING = 2.5  # times the original's perplexity: where the figure ends


def draw(rows: Iterable[Row], out: str | Path) -> None:
    """Draw perplexity against bits per weight; of several models, against the gigabytes of their files, a panel a method.

    What lies more than `CEILING` times above the original is written in the legend.

    Args:
        rows: of `compare`.
        out: .svg, .png or .pdf.

    Raises:
        RecipeError: matplotlib is not installed, or does not write such files.
    """
    check_plot(out)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    out = Path(out)
    found = [row for row in rows if row.perplexity is not None]
    originals = [row for row in found if row.method == ORIGINAL]
    if len(found) == len(originals):
        raise RecipeError("There is nothing to draw: no method has the bits that were asked for.")
    methods: list[Way] = [way for way in WAYS if any(row.method == way for row in found)]
    with mpl.rc_context({"svg.hashsalt": "nearplane", "font.size": 10, "savefig.facecolor": "white"}):
        if len(originals) == 1:
            figure = Figure(figsize=(7.2, 4.4), layout="constrained")
            _curves(figure.subplots(), originals[0], {w: [r for r in found if r.method == w] for w in methods})
        else:
            columns = min(3, len(methods))
            lines = math.ceil(len(methods) / columns)
            figure = Figure(figsize=(max(5.0, 3.4 * columns), max(3.6, 3.0 * lines)), layout="constrained")
            panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
            unit, word = (1e9, "GB") if max(row.bytes or 0 for row in found) >= 1e8 else (1e6, "MB")
            bits = sorted({row.asked for row in found if row.asked is not None}, reverse=True)
            markers = dict(zip(bits, itertools.cycle("osD^vP")))
            for panel in panels[len(methods) :]:
                panel.set_visible(False)
            for panel, way in zip(panels, methods, strict=False):
                _panel(panel, way, originals, [row for row in found if row.method == way], unit, markers)
            figure.supxlabel(f"weight files, {word}", fontsize=10)
            figure.supylabel("perplexity", fontsize=10)
            _name_markers(figure, markers)
        content = io.BytesIO()
        metadata = {"Date": None} if out.suffix == ".svg" else None
        figure.savefig(content, format=out.suffix[1:], dpi=160, metadata=metadata)
    write_whole(out, content.getvalue())


def check_plot(out: str | Path) -> None:
    """Refuse a figure that could not be drawn, before the work that it would show.

    Raises:
        RecipeError: matplotlib is not installed, or does not write such files, or they may not be written there.
    """
    if Path(out).suffix not in (".svg", ".png", ".pdf"):
        raise RecipeError(f"{out} is no figure that can be written; expected a name that ends in .svg, .png or .pdf.")
    try:
        import matplotlib  # noqa: F401  only drawing needs it
    except ImportError as error:
        raise RecipeError(
            "Figures need matplotlib, which is not installed: pip install 'nearplane[figures]'."
        ) from error
    if Path(out).is_dir():
        raise RecipeError(f"{out} is a folder; expected the name of a figure to write. Choose another one.")
    check_writable(Path(out).parent)


def _curves(axes: Axes, original: Row, curves: dict[Way, list[Row]]) -> None:
    """Draw one model's perplexity against bits, a curve a method."""
    assert original.perplexity is not None
    top = _scale(axes, [original])
    axes.axhline(original.perplexity, color="#444444", linewidth=1, linestyle=(0, (4, 3)), label="original")
    for way, rows in curves.items():
        colour, marker = STYLES[way]
        points = sorted((row.rate or 0.0, row.perplexity or 0.0) for row in rows)
        width = 2.2 if way == "nearplane" else 1.3
        label = _label(way, [y for _, y in points], top)
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linewidth=width, markersize=5, label=label)
    axes.margins(x=0.04)
    axes.legend(frameon=False, fontsize=8)
    axes.set_xlabel("bits per quantized weight, every byte of the layers counted")
    axes.set_ylabel("perplexity")
    axes.set_title(Path(original.model).name, fontsize=11, loc="left")


def _label(name: str, values: list[float], top: float) -> str:
    """Return the name of a curve for the legend, with the values that lie above the figure."""
    above = ", ".join(f"{value:.3g}" for value in values if value > top)
    return f"{name} (above: {above})" if above else name


def _panel(
    axes: Axes, way: Way, originals: list[Row], rows: list[Row], unit: float, markers: Mapping[float, str]
) -> None:
    """Draw one method's perplexity against the size of the files, a curve a model that ends in the original."""
    from matplotlib.ticker import LogLocator, NullLocator

    top = _scale(axes, originals)
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    colours = [colour for colour, _ in STYLES.values()][::-1]
    for original, colour in zip(originals, itertools.cycle(colours), strict=False):
        mine: list[Any] = sorted((row for row in rows if row.model == original.model), key=lambda row: row.bytes or 0)
        points = [(row.bytes / unit, row.perplexity) for row in [*mine, original]]
        label = _label(Path(original.model).name, [y for _, y in points], top)
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.3, label=label)
        for row, (x, y) in zip([*mine, original], points, strict=True):
            marker = "*" if row is original else markers[row.asked]
            axes.plot(x, y, color=colour, marker=marker, markersize=8 if row is original else 4.5)
    axes.legend(frameon=False, fontsize=7)
    axes.set_title(way, fontsize=10, loc="left")


def _name_markers(figure: Figure, markers: Mapping[float, str]) -> None:
    """Say above the panels which marker stands for which bits."""
    from matplotlib.lines import Line2D

    shapes = [*((f"{bits:g} bits", marker) for bits, marker in markers.items()), ("original", "*")]
    handles = [Line2D([], [], color="#444444", marker=marker, linestyle="", label=label) for label, marker in shapes]
    figure.legend(
        handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=8, handletextpad=0
    )


def _scale(axes: Axes, originals: list[Row]) -> float:
    """Set up a logarithmic axis from just below the originals to the ceiling, which is returned."""
    from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

    known = [row.perplexity for row in originals if row.perplexity is not None]
    top = CEILING * max(known)
    axes.set_yscale("log")
    axes.set_ylim(min(known) * 0.93, top)
    axes.yaxis.set_major_locator(MaxNLocator(7))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return top

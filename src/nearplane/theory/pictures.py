"""Five pictures of the geometry of quantizing two weights; all numbers in them come from `geometry.py`.

    babai        steps of nearest plane: projection on the nearest plane, then rounding; in two bases of a lattice
    cells        cells of targets that a method rounds to the same point, and the parts where it is the closest one
    spaces       the first step of GPTQ in parameter space and of Babai in data space: the same step
    greedy       OBQ's choice of the first weight: the one with the nearest plane
    propagation  the worked example: rounding w_0 to 1 moves w_1 from 0.6 to 0.4

After Chen, Hoefler, Alistarh, "The Geometry of LLM Quantization: GPTQ as Babai's Nearest Plane Algorithm" (2025), and
Birnick, "The Lattice Geometry of Neural Network Quantization" (2025).
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nearplane.errors import INSTALL, RecipeError
from nearplane.lattice.bounds import quadratic
from nearplane.system.files import check_output, write_whole
from nearplane.theory import geometry as g

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# colours for colour-blind readers (Okabe and Ito)
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
OPTIMAL_COLOUR, MISSED_COLOUR = "#CFE6F5", "#F6C667"  # pale blue, pale orange
TEXT, LINE, POINT = "#222222", "#BBBBBB", "#777777"
FORMATS = ("svg", "png")


def draw_geometry(out: Path) -> list[Path]:
    """Draw all pictures as .svg and .png into the folder `out`, which is created if it is missing.

    Args:
        out: Folder of the pictures.

    Returns:
        The files, in the order of `PICTURES`.

    Raises:
        RecipeError: matplotlib is not installed, or `out` has other files or cannot be written.
        FormatError: A picture cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RecipeError(f"Pictures need matplotlib, which is not installed. Run {INSTALL['figures']}.") from error
    check_output(out, [f"{name}." for name in PICTURES], "nearplane geometry")
    written = []
    with mpl.rc_context({"svg.hashsalt": "nearplane", "font.size": 11, "savefig.facecolor": "white"}):
        for name, draw in PICTURES.items():
            figure = Figure(layout="constrained")
            draw(figure)
            for format in FORMATS:
                path = out / f"{name}.{format}"
                write_whole(path, _bytes(figure, format))
                written.append(path)
    return written


def _bytes(figure: Figure, format: str) -> bytes:
    """Return the bytes of a figure's file, which are reproducible: without dates and external references."""
    buffer = io.BytesIO()
    if format != "svg":
        figure.savefig(buffer, format=format, dpi=160, metadata={"Software": None})
        return buffer.getvalue()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return re.sub(rb"<!DOCTYPE[^>]*>\s*", b"", buffer.getvalue())


def _babai(figure: Figure) -> None:
    """Draw nearest plane in the given basis and in a reduced one."""
    H, w = g.hessian(g.INPUTS), g.WEIGHTS
    B = g.basis(H)
    T = g.reduced(B).to(B.dtype)
    _set_texts(
        figure,
        (7.2, 4.85),
        "Babai's nearest plane: project on a plane, then round",
        "Step 1 projects the target t on the nearest plane (here a line), step 2 goes to the nearest\n"
        "point on it. Shorter basis vectors b₀, b₁ of the same lattice have planes farther apart.",
    )
    best = B @ g.closest(w[None], H)[0]
    for axes, name, basis in zip(figure.subplots(1, 2), ("given basis", "reduced basis"), (B, B @ T), strict=True):
        steps = g.sweep(torch.linalg.solve(basis, B @ w), basis.T @ basis)
        path = steps.path @ basis.T
        _lattice(axes, B, (-0.4, 1.5), (-0.7, 1.2))
        _planes(axes, basis, 0, int(steps.codes[0]))
        _basis(axes, basis, B[:, 0] - B[:, 1])
        _ring(axes, best, GREEN)
        _steps(axes, path)
        _target(axes, path[0], "t", (0, 9))
        verdict = "closest point found" if torch.allclose(path[2], best) else "closest point (ring) missed"
        axes.set_title(f"{name}: {verdict}\nsquared error {steps.loss:.3f}", fontsize=11, color=TEXT)


def _cells(figure: Figure) -> None:
    """Draw the cells of four methods."""
    H, w = g.hessian(g.INPUTS), g.WEIGHTS
    B = g.basis(H)
    _set_texts(
        figure,
        (7.2, 7.6),
        "Babai's cells are closer to the optimal ones than rounding's",
        "All targets of a cell go to its lattice point. Blue: that is the closest one; orange: it is not.\n"
        "All areas are equal; Σd adds the squared sides of a box. Cross: a target; square: its point.",
    )
    titles = {
        "optimum": "optimum: Voronoi cells",
        "round to nearest": "round to nearest: parallelograms",
        "nearest plane": "nearest plane, w₀ first: boxes",
        "nearest plane, reversed": "nearest plane, w₁ first: boxes",
    }
    for axes, method in zip(figure.subplots(2, 2).flatten(), g.METHODS, strict=True):
        tiling = g.tiling(H, method)
        for point in _lattice(axes, B, (-1.55, 1.95), (-1.1, 1.3)):
            axes.fill(*(tiling.cell + point).T.tolist(), facecolor=MISSED_COLOUR, edgecolor="none", zorder=0)
            axes.fill(*(tiling.agrees + point).T.tolist(), facecolor=OPTIMAL_COLOUR, edgecolor="none", zorder=1)
            axes.fill(*(tiling.cell + point).T.tolist(), facecolor="none", edgecolor=TEXT, linewidth=1, zorder=2)
        rounded = g.solve(w[None], H, method)
        axes.plot(*(B @ rounded[0]).tolist(), marker="s", markersize=9, color=BLUE, markeredgecolor="white", zorder=5)
        _target(axes, B @ w)
        mean, worst = f" (tr H/12 = {H.trace() / 12:.3f})" if method == "round to nearest" else "", ""
        if method in g.ORDERS:
            expected, worst_bound = g.bounds(H, g.ORDERS[method])
            mean, worst = f" (Σd/12 = {expected:.3f})", f" (Σd/4 = {worst_bound:.3f})"
        axes.set_title(f"{titles[method]}\noptimal on {100 * tiling.share:.3g} % of the area", fontsize=11, color=TEXT)
        errors = f"mean squared error {tiling.measured:.3f}{mean}\nworst {tiling.worst:.3f}{worst}"
        axes.set_xlabel(errors, fontsize=10, color=TEXT)


def _spaces(figure: Figure) -> None:
    """Draw one step of GPTQ in parameter space and in data space."""
    H, w = g.hessian(g.INPUTS), g.WEIGHTS
    B, identity = g.basis(H), torch.eye(2, dtype=H.dtype)
    code, moved = g.gptq_first(w, H)
    steps, error = g.sweep(w, H), w - moved
    z_0, z_1 = steps.codes.tolist()
    _set_texts(
        figure,
        (7.2, 4.95),
        "GPTQ's error propagation is Babai's projection",
        f"One step in two spaces: w₀ is rounded to {code}, and w₁ moves from {w[1]:.2f} to {moved[1]:.2f}: "
        "least loss on the\n"
        f"plane, where an ellipse of equal loss touches it, which is a circle on the right. Codes: ({z_0}, {z_1}).",
    )
    left, right = figure.subplots(1, 2)
    for axes, basis, x, y in ((left, identity, (-0.55, 1.35), (-0.55, 1.35)), (right, B, (-0.4, 1.5), (-0.7, 1.2))):
        _lattice(axes, basis, x, y)
        _planes(axes, basis, 0, code)
        _level(axes, basis @ w, basis @ torch.linalg.inv(B), float(quadratic(error[None], H)))
        _steps(axes, steps.path @ basis.T)
    _basis(right, B, B[:, 0] - B[:, 1])
    _target(left, w, "w", (16, 8))
    _target(right, B @ w, "t = Xw", (32, -3))
    _write(left, torch.tensor([code, -0.45]), f"w₀ = {code}", (6, 0))
    _write(right, torch.tensor([-0.36, 0.0]), f"w₀ = {code}", (0, 6))
    left.set_title("parameter space: GPTQ\nmoves the error to the next weight", fontsize=11, color=TEXT)
    right.set_title("data space: Babai\nprojects on the nearest plane", fontsize=11, color=TEXT)
    left.set_xlabel("w₀", labelpad=3)
    left.set_ylabel("w₁", rotation=0)
    left.set(xticks=[0, 1], yticks=[0, 1])


def _greedy(figure: Figure) -> None:
    """Draw the choice of the first weight and its result."""
    H, w = g.hessian(g.INPUTS), g.WEIGHTS
    B = g.basis(H)
    distances = g.plane_distances(w, H)
    chosen = g.greedy(w, H)
    other = g.sweep(w, H, g.ORDER_STARTING_WITH[chosen.last])
    first, second = "w₀w₁"[2 * chosen.first :][:2], "w₀w₁"[2 * other.first :][:2]
    _set_texts(
        figure,
        (7.2, 4.5),
        "OBQ rounds first the weight whose nearest plane is nearest",
        f"Left: where w₀ is an integer (blue) and where w₁ is (orange), and how far t is from the nearest.\n"
        f"Right: {first} first ends at squared error {chosen.loss:.3f}, {second} first at the ring, {other.loss:.3f}.",
    )
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        _lattice(axes, B, (-0.3, 1.5), (-0.7, 1.0))
    for j, colour in enumerate((BLUE, RED)):
        steps = g.sweep(w, H, g.ORDER_STARTING_WITH[j])
        code = int(steps.codes[j])
        projection = steps.path[1] @ B.T
        _planes(left, B, j, code, colour)
        left.plot(*zip((B @ w).tolist(), projection.tolist(), strict=True), color=colour, linewidth=2.5, zorder=4)
        name = f"{distances[j]:.3f} to {'w₁' if j else 'w₀'} = {code}"
        _write(left, projection, name, (-2, 10) if j else (20, -16), ha="right")
    _planes(right, B, chosen.first, int(chosen.codes[chosen.first]), RED)
    _ring(right, other.path[2] @ B.T, BLUE)
    _steps(right, chosen.path @ B.T, RED, side=-1)
    for axes in (left, right):
        _target(axes, B @ w, "t", (9, -8))
    left.set_title("distances to the nearest planes", fontsize=11, color=TEXT)
    right.set_title(f"the smaller is taken: {first} first", fontsize=11, color=TEXT)


def _propagation(figure: Figure) -> None:
    """Draw the worked example in parameter space."""
    w, H = g.worked_example()
    steps = g.sweep(w, H)
    interim, nearest = steps.path[1], w.round()
    touching, swept, rounded = (float(quadratic((w - point)[None], H)) for point in (*steps.path[1:], nearest))
    inverse = str(torch.linalg.inv(H).round(decimals=9).int().tolist()).replace("-", "\N{MINUS SIGN}")
    (a, b), (z, moved), end = w.tolist(), interim.tolist(), int(steps.codes[1])
    _set_texts(
        figure,
        (7.2, 6.9),
        f"Rounding w₀ to {z:.0f} moves w₁ from {b:.1f} to {moved:.1f}, and halves the loss",
        f"Ellipses: equal loss around w = ({a:.1f}, {b:.1f}), H⁻¹ = {inverse}. On the line w₀ = {z:.0f} the loss is\n"
        f"least where an ellipse touches it, w₁ = {moved:.1f}. That rounds to {end}, and {b:.1f} would have to "
        f"{nearest[1]:.0f}.",
    )
    axes = figure.subplots()
    _lattice(axes, torch.eye(2, dtype=H.dtype), (-0.25, 1.75), (-0.4, 1.55))
    axes.axvline(float(interim[0]), color=BLUE, linewidth=2, zorder=1)
    for loss in (touching, swept, rounded):
        _level(axes, w, torch.linalg.inv(g.basis(H)), loss)
    _steps(axes, steps.path)
    axes.plot(*nearest.tolist(), marker="D", markersize=10, color=ORANGE, markeredgecolor=TEXT, zorder=5)
    _target(axes, w, "w", (-16, 2))
    _write(axes, interim, f"({interim[0]:.0f}, {interim[1]:.1f}): loss {touching:.2f}", (10, 2))
    _write(axes, steps.path[2], f"GPTQ: loss {swept:.2f}", (12, -14))
    _write(axes, nearest, f"rounded to nearest:\nloss {rounded:.2f}", (12, 6))
    axes.set_xlabel("w₀", labelpad=3)
    axes.set_ylabel("w₁", rotation=0, labelpad=14)
    axes.set_xticks([0, interim[0].item(), w[0].item()], ["0", "1", f"{w[0]:.1f}"])
    axes.set_yticks([0, interim[1].item(), w[1].item(), 1], ["0", f"{interim[1]:.1f}", f"{w[1]:.1f}", "1"])


PICTURES: dict[str, Callable[[Figure], None]] = {
    "babai": _babai,
    "cells": _cells,
    "spaces": _spaces,
    "greedy": _greedy,
    "propagation": _propagation,
}


def _set_texts(figure: Figure, size: tuple[float, float], title: str, caption: str) -> None:
    """Set the size, the title above and the caption below."""
    figure.set_size_inches(size)
    figure.suptitle(title, fontsize=13.5, fontweight="bold", x=0.015, ha="left", color=TEXT)
    figure.supxlabel(caption, fontsize=10, x=0.015, ha="left", color=TEXT, linespacing=1.35)


def _lattice(axes: Axes, B: Tensor, x: tuple[float, float], y: tuple[float, float], *, reach: int = 9) -> list[Tensor]:
    """Set up axes with equal units, and draw and return the lattice points in and near them."""
    codes = torch.tensor(list(product(range(-reach, reach + 1), repeat=2)), dtype=B.dtype)
    points = [p for p in codes @ B.T if x[0] - 1.3 < p[0] < x[1] + 1.3 and y[0] - 0.8 < p[1] < y[1] + 0.8]
    axes.plot(*torch.stack(points).T.tolist(), linestyle="", marker="o", markersize=5, color=POINT, zorder=3)
    axes.set_aspect("equal", anchor="N")
    axes.set(xlim=x, ylim=y, xticks=[], yticks=[])
    axes.spines[:].set_color(LINE)
    return points


def _planes(axes: Axes, B: Tensor, j: int, nearest: int, colour: str = BLUE, *, reach: int = 9) -> None:
    """Draw the planes on which code `j` is an integer; the nearest one is emphasized."""
    for k in range(-reach, reach + 1):
        point = k * B[:, j]
        width, alpha = (2, 1) if k == nearest else (1, 0.35)
        axes.axline(_xy(point), _xy(point + B[:, 1 - j]), color=colour, linewidth=width, alpha=alpha, zorder=1)


def _basis(axes: Axes, B: Tensor, start: Tensor) -> None:
    """Draw both vectors of a basis from a lattice point."""
    for j, name in enumerate(("b₀", "b₁")):
        _arrow(axes, start, start + B[:, j], POINT, 1.5)
        _label_arrow(axes, start, start + B[:, j], name, -1 if j == 0 else 1)


def _steps(axes: Axes, path: Tensor, colour: str = BLUE, *, side: int = 1) -> None:
    """Draw both steps of a sweep as numbered arrows and its end as a square; `side` is that of the first number."""
    for number, (start, end) in enumerate(pairwise(path)):
        _arrow(axes, start, end, TEXT, 2, short=5 * number)
        _label_arrow(axes, start, end, "12"[number], 1 if number else side)
    axes.plot(*path[2].tolist(), marker="s", markersize=10, color=colour, markeredgecolor="white", zorder=5)


def _target(axes: Axes, point: Tensor, name: str = "", offset: tuple[float, float] = (0, 0)) -> None:
    """Mark the target to be quantized."""
    axes.plot(*point.tolist(), marker="X", markersize=9, color=RED, markeredgecolor="white", zorder=6)
    _write(axes, point, name, offset)


def _ring(axes: Axes, point: Tensor, colour: str) -> None:
    """Draw a ring around a lattice point."""
    look: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": colour, "markeredgewidth": 2}
    axes.plot(*point.tolist(), marker="o", markersize=17, **look)


def _level(axes: Axes, centre: Tensor, M: Tensor, loss: float) -> None:
    """Draw the image under `M` of the circle in data space on which the squared error is `loss`, about `centre`."""
    angles = torch.linspace(0, 2 * torch.pi, 181, dtype=M.dtype)
    circle = loss**0.5 * torch.stack([angles.cos(), angles.sin()])
    axes.plot(*(centre[:, None] + M @ circle).tolist(), color=GREEN, linewidth=1.5, zorder=2)


def _arrow(axes: Axes, start: Tensor, end: Tensor, colour: str, width: float, *, short: float = 0) -> None:
    """Draw an arrow that stops `short` points before `end`."""
    ends: dict[str, Any] = {"shrinkA": 0, "shrinkB": short, "mutation_scale": 12}
    arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": width, **ends}
    axes.annotate("", _xy(end), _xy(start), arrowprops=arrow, zorder=4)


def _xy(point: Tensor) -> tuple[float, float]:
    x, y = point.tolist()
    return x, y


def _label_arrow(axes: Axes, start: Tensor, end: Tensor, text: str, side: int) -> None:
    """Write text beside the middle of an arrow, on its right (1) or left (-1)."""
    x, y = ((end - start) / (end - start).norm()).tolist()
    _write(axes, (start + end) / 2, text, (11 * side * y, -11 * side * x), ha="center", va="center")


def _write(
    axes: Axes, point: Tensor, text: str, offset: tuple[float, float], *, ha: str = "left", va: str = "baseline"
) -> None:
    """Write text with a white halo at an offset, given in points, from a point."""
    from matplotlib.patheffects import withStroke

    look: dict[str, Any] = {"color": TEXT, "fontsize": 11, "zorder": 7}
    halo = [withStroke(linewidth=3, foreground="white")]
    axes.annotate(text, _xy(point), offset, textcoords="offset points", ha=ha, va=va, path_effects=halo, **look)

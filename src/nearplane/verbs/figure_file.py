"""A figure of matplotlib as a file, with equal bytes whenever the same is drawn."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nearplane.system.files import write_whole
from nearplane.verbs.early_checks import check_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def figure_file(out: str | Path) -> Iterator[Figure]:
    """Yield an empty figure, and write it when the context ends without an error.

    Args:
        out: File to write; its name ends in .svg, .png or .pdf.

    Raises:
        RecipeError: matplotlib is not installed, or `out` has another suffix or cannot be written.
    """
    check_plot(out)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    content, suffix = io.BytesIO(), Path(out).suffix
    with mpl.rc_context({"svg.hashsalt": "nearplane", "font.size": 10, "savefig.facecolor": "white"}):
        figure = Figure(layout="constrained")
        yield figure
        figure.savefig(content, format=suffix[1:], dpi=160, metadata={"Date": None} if suffix == ".svg" else None)
    write_whole(Path(out), content.getvalue())

"""Files of figures and pages: checks before any work is done, and figures with equal bytes whenever the same is drawn."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nearplane.errors import INSTALL, RecipeError
from nearplane.system.files import check_writable, write_whole
from nearplane.system.paths import check_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPARISON_TAG = b'<meta name="generator" content="nearplane compare">'  # marks a page of a comparison


def check_plot(out: str | Path) -> None:
    """Refuse a figure that cannot be written, before any work is done.

    Raises:
        RecipeError: matplotlib is not installed, or the file has another suffix or cannot be written.
    """
    check_path("--plot", out)
    if Path(out).suffix not in (".svg", ".png", ".pdf"):
        raise RecipeError(f"{out} cannot be written as a figure; expected a name that ends in .svg, .png or .pdf.")
    try:
        import matplotlib  # noqa: F401  only drawing needs it
    except ImportError as error:
        raise RecipeError(f"Figures need matplotlib, which is not installed. Run {INSTALL['figures']}.") from error
    if Path(out).is_dir():
        raise RecipeError(f"{out} is a folder; expected the name of a figure file. Choose another name.")
    check_writable(Path(out).parent)


def check_page(out: str | Path) -> None:
    """Refuse a page of `compare` that cannot be written, before any work is done.

    Raises:
        RecipeError: The file has another suffix, cannot be written, or exists and is no page of a comparison.
    """
    check_path("--html", out)
    page = Path(out)
    if page.suffix not in (".html", ".htm") or page.is_dir():
        raise RecipeError(f"{out} cannot be written as a page; expected the name of a file that ends in .html.")
    check_writable(page.parent)
    if page.is_file() and COMPARISON_TAG not in page.read_bytes()[:1000]:
        raise RecipeError(f"{out} exists and is not a page of nearplane compare. Name another file.")


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

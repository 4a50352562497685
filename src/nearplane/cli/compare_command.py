"""The command `nearplane compare`: methods side by side, as a table, a figure and a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from nearplane.calibration.text_files import check_named
from nearplane.cli.flags import DeviceFlag, Flat, Hidden, Several, Switch
from nearplane.cli.printing import as_json, opening, say, table
from nearplane.errors import NearplaneError, RecipeError
from nearplane.recipe.recipe import Calibration, Way
from nearplane.system.progress import Progress
from nearplane.system.progress_bar import bar
from nearplane.system.sizes import three_places
from nearplane.verbs.compare_request import WAYS, CompareRequest
from nearplane.verbs.figure_file import check_page, check_plot


@dataclass(frozen=True, kw_only=True)
class CompareFlags(CompareRequest):
    """Flags of `nearplane compare`, whose --samples and --seqlen are those of the calibration."""

    models: Annotated[Any, Hidden] = ()
    bits: Annotated[list[float], Several]
    text: Path
    calibration: Annotated[Any, Hidden] = None
    methods: Annotated[Sequence[Way], Several, Parameter(show_default=False)] = WAYS
    samples: Annotated[int | None, Parameter(name="--eval-samples")] = None
    seqlen: Annotated[int | None, Parameter(name="--eval-seqlen")] = None
    keep: Path | None = None
    device: DeviceFlag = "auto"
    progress: Annotated[Progress, Hidden] = bar


def compare(
    models: list[str],
    /,
    *,
    request: Annotated[CompareFlags, Flat],
    tokens: Annotated[Calibration | None, Parameter(name="*")] = None,
    plot: Path | None = None,
    html: Path | None = None,
    json: Switch = False,
) -> None:
    """Quantize MODELS by several methods to the same bits, and print a table of their quality.

    rtn-mse, gptq-mse: fixed grids of b + 16 / group bits per weight; 4.125 means 4 bits in groups of 128.
    rtn-huffman, gptq-huffman: one step per matrix and a Huffman code.
    nearplane-grid, nearplane: the defaults of nearplane, on the same fixed grids and entropy-coded.

    Args:
        models: Local folders of safetensors, or hub ids.
        plot: Figure to draw (.svg, .png or .pdf): perplexity against bits, or against file size for several models.
        html: Page to write, with the table, a figure, and the texts of --prompt side by side; it needs no other file.
        json: Print the result as JSON.
    """
    request = replace(request, models=models, calibration=tokens)
    request.check()
    check_named(*models, text=request.text, calibration=None if tokens is None else tokens.calibration)
    if plot is not None:
        check_plot(plot)
    if html is not None:
        check_page(html)
    elif request.prompt is not None:
        raise RecipeError("--prompt is for the page of --html. Add --html PAGE.html, or leave it out.")
    opening(*models)
    from nearplane import compare as run
    from nearplane.verbs.compare_figure import draw
    from nearplane.verbs.compare_page import HEADS, cells, write_page

    rows = []
    try:
        for row in run(request):
            rows.append(row)
    finally:  # prints the rows so far even after an error
        if rows and json:
            print(as_json([asdict(row) for row in rows]))
        elif rows:
            table(HEADS, (cells(row, three_places(row.kl), none="-") for row in rows))
            say(f"{Path(row.model).name}, {row.title}: {row.note}" for row in rows if row.note)
    if html is not None:
        write_page(rows, html, prompt=request.prompt)
    if plot is not None:
        draw(rows, plot)
    if failed := sum(row.failed for row in rows):
        raise NearplaneError(f"{failed} of {len(rows)} rows could not be measured; their notes say why.")

"""The commands on folders: `nearplane inspect`, `verify`, `report`, `card`, `export`, `rotate` and `tune`."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from nearplane.cli.flags import DeviceFlag, Flat, Hidden, Several, Switch
from nearplane.cli.printing import as_json, opening, say, table
from nearplane.record.uses import typed
from nearplane.system.arguments import whole
from nearplane.system.progress import Progress
from nearplane.system.progress_bar import bar
from nearplane.system.sizes import size_text
from nearplane.verbs.checkpoint_requests import DENSE, ExportRequest, TuneRequest, VerifyRequest
from nearplane.verbs.rotate_request import RotateRequest


def inspect(out: Path, *, worst: int | None = None, json: Switch = False) -> None:
    """Show layers, grids, losses and sizes of a checkpoint from its run record, without reading weights.

    Args:
        out: Folder of a checkpoint that nearplane wrote, or a .gguf file.
            For a .gguf file of another program, its tensors are shown.
        worst: Show only so many layers, those that lose most by themselves first.
        json: Print the run record as JSON.
    """
    whole("worst", worst, 1)
    from nearplane.formats.find_record import find_record, foreign_tensors
    from nearplane.record.summary import layer_table

    if (tensors := foreign_tensors(out)) is not None:
        names = ("tensor", "type", "shape", "bytes")
        print(as_json([dict(zip(names, row, strict=True)) for row in tensors])) if json else table(names, tensors)
        return
    record = find_record(out)
    if json:
        print(record.to_json())
        return
    before, columns, rows, after = layer_table(record, worst)
    say(before)
    table(columns, rows)
    say(after)


class VerifyFlags(VerifyRequest):
    """Flags of `nearplane verify`."""

    out: Path
    against: str | None
    calibration: Path | None
    device: DeviceFlag
    progress: Annotated[Progress, Hidden]


def verify(request: Annotated[VerifyFlags, Flat], *, json: Switch = False) -> None:
    """Check the files of a checkpoint against its run record; with --against, also measure every loss again.

    Prints one line for each fault in a layer or file, and then ends with exit code 3.

    Args:
        json: Print the result as JSON.
    """
    request.check()
    opening(request.out)
    from nearplane import verify as run

    verified = run(replace(request, progress=bar))
    if json:
        faults = [asdict(fault) for fault in verified.faults]
        print(as_json({"faults": faults, "asked": verified.asked, "measured": verified.measured}))
    else:
        for fault in verified.faults:
            print(f"{fault.where}: {fault.what}")
        print(verified.summary())
    if verified.faults:
        sys.exit(3)


def report(out: Path, page: Path | None = None, /, *, overwrite: Switch = False, json: Switch = False) -> None:
    """Write an HTML page with figures and tables from the run record of a checkpoint.

    The page opens from disk and needs no network.

    Args:
        out: Folder of a checkpoint that nearplane wrote.
        page: File to write. Default: OUT-report.html next to the folder; an old report there is replaced.
        overwrite: Replace any existing file.
        json: Print the path of the page as JSON.
    """
    from nearplane.verbs.report import write_report

    written = write_report(out, page, overwrite=overwrite)
    print(as_json({"page": written}) if json else written)


def card(
    out: Path,
    *,
    evaluation: Annotated[list[Path] | None, Several] = None,
    overwrite: Switch = False,
    json: Switch = False,
) -> None:
    """Write the model card of the checkpoint in OUT again, with the results of evaluations.

    A card that was changed since nearplane wrote it is not replaced. The license, languages, datasets and tags in its
    metadata are kept.

    Args:
        out: Folder of a checkpoint that nearplane wrote.
        evaluation: Files with what nearplane evaluate OUT --json printed, for tables in the card.
        overwrite: Replace any existing card.
        json: Print the path of the card as JSON.
    """
    from nearplane.verbs.card import card as run

    written = run(out, evaluation=evaluation or (), overwrite=overwrite)
    print(as_json({"card": written}) if json else written)


class ExportFlags(ExportRequest):
    """Flags of `nearplane export`."""

    source: Annotated[Path, Parameter(name="out")]
    out: Annotated[Path, Parameter(name="folder")]
    progress: Annotated[Progress, Hidden]


def export(request: Annotated[ExportFlags, Flat], *, json: Switch = False) -> None:
    """Write the checkpoint in OUT to FOLDER in another format: all weights decoded, or with the same integers.

    Integers and steps are never rounded. If the format cannot hold a layer exactly, the command names the layer and writes
    nothing. What is written is read back and compared.

    Args:
        json: Print folder, format and bytes of the weights as JSON.
    """
    request.check()
    opening(request.source)
    from nearplane import export as run

    size = run(request)
    dense = request.format == DENSE
    if json:
        print(as_json({"folder": request.out, "format": request.format, "bytes": size}))
        return
    how = f"decoded to {request.dtype or 'bfloat16'}" if dense else f"moved to {request.format} unchanged"
    print(f"weights {how}, {size_text(size)}: {request.out}")


class RotateFlags(RotateRequest):
    """Flags of `nearplane rotate`."""

    model: str
    out: Path


def rotate(request: Annotated[RotateFlags, Flat], *, json: Switch = False) -> None:
    """Write MODEL to OUT in another basis of its hidden states: the same network, which may lose less when it is quantized.

    OUT is an ordinary model of the same size, to be quantized by any tool. Models whose head is a copy of their embeddings are
    refused, and architectures that a rotation would change.

    Args:
        json: Print folder and bytes of the weights as JSON.
    """
    request.check()
    opening(request.model)
    from nearplane import rotate as run

    size = run(request)
    if json:
        print(as_json({"folder": request.out, "bytes": size}))
        return
    print(f"the same network rotated, {size_text(size)}: {request.out}")
    print(
        f"next: nearplane quantize {typed(str(request.out))} OUT, then nearplane evaluate OUT --against {typed(request.model)}"
    )


class TuneFlags(TuneRequest):
    """Flags of `nearplane tune`."""

    source: Annotated[Path, Parameter(name="out")]
    out: Annotated[Path, Parameter(name="new")]
    against: str
    calibration: Path | None
    device: DeviceFlag
    memory: str | None
    device_memory: str | None
    progress: Annotated[Progress, Hidden]


def tune(request: Annotated[TuneFlags, Flat], *, json: Switch = False) -> None:
    """Train steps, norms and codes of the checkpoint in OUT against the predictions of the original, and write NEW.

    NEW has the format and the widths of OUT, and entropy-coded layers stay within their requested bytes.
    Codes are trained if they have 2 or 3 bits, are nvfp4 or mxfp4, or are entropy-coded.
    A fifth of the text's windows is held out. The state that is best on them is written, which may be that of OUT.
    The command ends with exit code 4 if a layer exceeds the --max-loss of OUT.

    Args:
        json: Print the run record as JSON instead of a summary.
    """
    request.check()
    opening(request.source, request.against)
    from nearplane import tune as run
    from nearplane.record.summary import tuned

    record = run(replace(request, progress=bar))
    if json:
        print(record.to_json())
    else:
        say(tuned(record, request.out))
    if record.exceeding:
        sys.exit(4)

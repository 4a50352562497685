"""The command `nearplane tune`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from nearplane.cli.flags import DeviceFlag, Flat, Hidden, Switch
from nearplane.cli.printing import opening, say
from nearplane.cli.terminal import bar
from nearplane.system.progress import Progress
from nearplane.verbs.tune_request import TuneRequest


class TuneFlags(TuneRequest):
    """Flags of `nearplane tune`."""

    source: Annotated[Path, Parameter(name="out")]
    out: Annotated[Path, Parameter(name="new")]
    against: str
    calibration: Path | None
    device: DeviceFlag
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

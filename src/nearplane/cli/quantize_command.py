"""The command `nearplane quantize`: flags become a request, and the run record is printed as a summary."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from nearplane.calibration.text_files import check_named
from nearplane.cli.flags import Switch
from nearplane.cli.printing import opening, say
from nearplane.cli.quantize_flags import RUN_GROUP, QuantizeFlags
from nearplane.cli.terminal import bar
from nearplane.system.processes import check_processes, started


def quantize(
    request: Annotated[QuantizeFlags, Parameter(name="*")],
    *,
    processes: Annotated[int, Parameter(group=RUN_GROUP)] = 1,
    json: Annotated[Switch, Parameter(group=RUN_GROUP)] = False,
) -> None:
    """Quantize MODEL into the folder OUT.

    Example: nearplane quantize Qwen/Qwen3-0.6B out --bits 4 --calibration text.txt

    Args:
        processes: Number of processes on this machine that share the calibration windows. The files are the same with any
            number. On several machines, start nearplane by torchrun or srun.
        json: Print the run record as JSON instead of a summary.
    """
    check_named(request.model, calibration=request.options().get("calibration"))
    request.check(request.asked())
    check_processes(processes)
    opening(request.model)
    from nearplane import quantize as run
    from nearplane.record.summary import summary

    with started(processes):
        record = run(replace(request, progress=bar))
    if json:
        print(record.to_json())
    else:
        say(summary(record, Path(request.out)))
    if record.exceeding:
        sys.exit(4)

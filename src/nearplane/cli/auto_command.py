"""The command `nearplane auto`: what it will do, the question before, and what came out."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from nearplane.cli.flags import DeviceFlag, Flat, Hidden, Switch
from nearplane.cli.printing import opening, say
from nearplane.errors import RecipeError
from nearplane.recipe.runtimes import Runtime  # noqa: F401  cyclopts reads the type of the field
from nearplane.system.progress import Progress
from nearplane.system.progress_bar import bar
from nearplane.verbs.auto_request import AutoRequest


@dataclass(frozen=True)
class AutoFlags(AutoRequest):
    """Flags of `nearplane auto`."""

    model: str
    out: Path | None = None
    memory: str | None = field(default=None, kw_only=True)
    calibration: str | None = field(default=None, kw_only=True)
    text: str | None = field(default=None, kw_only=True)
    run_memory: str | None = field(default=None, kw_only=True)
    device: DeviceFlag = field(default="auto", kw_only=True)
    progress: Annotated[Progress, Hidden] = field(default=bar, kw_only=True)


def auto(request: Annotated[AutoFlags, Flat], *, yes: Switch = False, dry_run: Switch = False) -> None:
    """Quantize MODEL in the way that suits a memory, a size or a number of bits; measure the result, and say how to serve it.

    It says in five lines what it will do, and asks once. Its steps are other commands, which --dry-run prints. Stopped in any of
    them, the same command goes on.

    Args:
        yes: Do not ask.
        dry_run: Print the commands of the steps, and do nothing.
    """
    request.check()
    if not (yes or dry_run or sys.stdin.isatty()):
        raise RecipeError(
            "auto asks before it works, but its input is no terminal. Add --yes, or --dry-run to see the plan."
        )
    opening(request.model)
    from nearplane.verbs.auto import carry_out, choose

    choice = choose(request)
    say(choice.lines)
    if dry_run:
        say(["", *choice.commands])
        return
    if not yes and input("go on? [y/n] ").strip().lower() not in ("", "y", "yes"):
        print("nothing was done")
        return
    done = carry_out(replace(request, progress=bar), choice)
    say(
        [
            "",
            *str(done.record).split("\n"),
            *str(done.evaluation).split("\n"),
            "",
            f"checkpoint: {done.out}; report: {done.report}",
            f"use it: {done.serve}",
        ]
    )

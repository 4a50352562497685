"""What torchrun, SLURM's srun or --processes told this process of the others of its run. Needs no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from nearplane.errors import RecipeError

SLURM_PORTS = range(20_000, 40_000)  # the port of a job follows from its number, the same on all nodes


class Launch(NamedTuple):
    """Number of this process, number of all, and the address where rank 0 or torchrun connects them."""

    rank: int
    world: int
    address: str
    port: int


def launched(env: Mapping[str, str] = os.environ) -> Launch | None:
    """Return how this process was started among others; None if it is alone.

    torchrun and --processes set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. srun sets variables of its own for each
    step; those that sbatch sets for a script are not looked at, as a script is one process.

    Raises:
        RecipeError: Some of the variables are missing or no numbers.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    elif "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
    else:
        return None
    try:
        rank, world = (int(env[name]) for name in names[:2])
        if world == 1:
            return None
        address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
        if names[0] == "SLURM_PROCID":
            address = address or first_host(env["SLURM_STEP_NODELIST"])
            port = port or str(SLURM_PORTS[int(env.get("SLURM_JOB_ID", "0")) % len(SLURM_PORTS)])
        return Launch(rank, world, address or env["MASTER_ADDR"], int(port or env["MASTER_PORT"]))
    except (KeyError, ValueError) as error:
        raise RecipeError(
            f"The environment variables {', '.join(names)} tell how processes of a run find each other, and one of them is "
            f"missing or wrong ({error}). Start the run with torchrun or srun, or use --processes on one machine."
        ) from error


def forget_launch() -> None:
    """Let this process run a command by itself until it ends, whatever it was started with."""
    for name in ("RANK", "SLURM_PROCID"):
        os.environ.pop(name, None)


def first_host(nodes: str) -> str:
    """Return the first host of a list as SLURM writes it: a1 of "a[1-3,7],b2"."""
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    if found is None:
        raise ValueError(f"no host in {nodes!r}")
    return found[1] + (found[2] or "")

"""Processes that --processes starts on this machine beside the first one. Needs no torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise

from nearplane.errors import RecipeError
from nearplane.system.launch import launched
from nearplane.system.memory import free_memory

LOCALHOST = "127.0.0.1"
LEAST_MEMORY = 240 * 10**6  # bytes of a process that has imported torch and transformers, and nothing else
PATIENCE = 10.0  # seconds until a process that was asked to end is killed
_children: list[subprocess.Popen[bytes]] = []  # ranks from 1 on, where this process started them


def check_processes(processes: int) -> None:
    """Refuse a number of processes that cannot be started on this machine, or of which this one is one already.

    Raises:
        RecipeError: There are fewer than one, they do not fit into memory, or this process already is one of several.
    """
    if processes < 1:
        raise RecipeError(f"--processes is {processes}; expected at least 1.")
    if processes > 1 and (launch := launched()) is not None:
        raise RecipeError(
            f"--processes {processes}: this process already is rank {launch.rank} of {launch.world}, started by torchrun or "
            f"srun. Leave out --processes."
        )
    free = free_memory()
    if free is not None and (processes - 1) * LEAST_MEMORY > free:
        raise RecipeError(
            f"--processes {processes}: each takes at least {LEAST_MEMORY // 10**6} MB, but only {free / 1e9:.1f} GB are free. Use "
            f"fewer: one for each GPU, or for every few cores."
        )


@contextmanager
def started(processes: int, command: Sequence[str] = ()) -> Iterator[None]:
    """Start the other processes of a run on this machine; they end with the context.

    This process becomes rank 0. The others run the same command line.

    Args:
        processes: Number of processes, this one included; 1: nothing is started.
        command: Command of the others; empty: that of this process.

    Raises:
        RecipeError: See `check_processes`.
    """
    check_processes(processes)
    if processes == 1:
        yield
        return
    with socket.socket() as free:
        free.bind((LOCALHOST, 0))
        port = free.getsockname()[1]
    own = {"RANK": "0", "WORLD_SIZE": str(processes), "MASTER_ADDR": LOCALHOST, "MASTER_PORT": str(port)}
    run = [*command] or [sys.executable, "-m", "nearplane", *without_processes(sys.argv[1:])]
    children = _children
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        for rank in range(1, processes):
            children.append(subprocess.Popen(run, env={**os.environ, "RANK": str(rank)}, stdin=subprocess.DEVNULL))
        yield
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(PATIENCE)
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        for child in children:
            _end(child)
        children.clear()


def ended_children() -> list[int]:
    """Return the ranks that this process started and that have ended."""
    return [rank for rank, child in enumerate(_children, 1) if child.poll() is not None]


def without_processes(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line without --processes and its value."""
    text = [f"{before} {each}" if before == "--processes" else each for before, each in pairwise(["", *arguments])]
    return [each for each in text if each.split("=")[0].split(" ")[0] != "--processes"]


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a process: first by SIGTERM, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None:
            return
        child.send_signal(number)
        try:
            child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            continue

"""What the command line does around a command: a bar or lines that say how far it is, and what a signal makes of it."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM: ends a command as Ctrl-C does."""


def bar(items: Iterable[Any], label: str, total: int) -> Iterator[Any]:
    """Show a bar on the error stream while items pass through; where that is no terminal, lines of logging do."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    parts = (
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*parts, console=Console(stderr=True), transient=True) as shown:
        yield from shown.track(items, total=total)


@contextmanager
def attended() -> Iterator[None]:
    """While it lasts, what nearplane logs goes to the error stream, and SIGTERM raises `Terminated`.

    Ctrl-C and SIGTERM stay what they are even where a library puts an error of its own in their place.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    package, progress = logging.getLogger("nearplane"), logging.getLogger("nearplane.system.progress")
    levels = package.level, progress.level
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    if sys.stderr.isatty():
        progress.setLevel(logging.WARNING)  # there is a bar
    stopped: list[KeyboardInterrupt] = []

    def stop(number: int, frame: object) -> None:
        stopped.append(Terminated() if number == signal.SIGTERM else KeyboardInterrupt())
        raise stopped[-1]

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, stop)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell makes its background jobs ignore it
        before[signal.SIGINT] = signal.signal(signal.SIGINT, stop)
    try:
        yield
    except Exception as error:
        if not stopped:
            raise
        for note in getattr(error, "__notes__", ()):
            stopped[-1].add_note(note)
        raise stopped[-1] from error  # e.g. safetensors turns what is raised while it makes a tensor into a ValueError
    finally:
        for number, as_it_was in before.items():
            signal.signal(number, as_it_was)
        package.removeHandler(handler)
        package.setLevel(levels[0])
        progress.setLevel(levels[1])


def say_stopped(stopped: KeyboardInterrupt) -> int:
    """Say in one line what stopped the command and what it left on disk; return the exit code."""
    terminated = isinstance(stopped, Terminated)
    left = " ".join(getattr(stopped, "__notes__", None) or ["Run the same command again."])
    print(f"nearplane: stopped by {'SIGTERM' if terminated else 'Ctrl-C'}. {left}", file=sys.stderr)
    return 128 + (signal.SIGTERM if terminated else signal.SIGINT)

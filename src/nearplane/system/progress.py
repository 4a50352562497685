"""Progress of a run as log lines, durations in words, and peak memory. Needs no torch; sets up no log handler."""

from __future__ import annotations

import logging
import sys
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from time import monotonic
from typing import Any

from nearplane.errors import RecipeError, of_caller

log = logging.getLogger(__name__)
Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]  # (items, label, number of items) -> items
MIN_INTERVAL, MAX_INTERVAL = 1.0, 30.0  # seconds between two lines: at the end of a block, and within blocks


def silent(items: Iterable[Any], label: str, total: int) -> Iterable[Any]:
    """Pass items through without any display; the command line passes a progress bar instead."""
    return items


def logged(
    items: Iterable[Any],
    label: str,
    total: int,
    *,
    blocks: Sequence[int] = (),
    there: int = 0,
    short: bool = True,
) -> Iterator[Any]:
    """Pass items through and log the progress at level INFO: a line at the end of a block, or every 30 seconds.

        quantizing: block 3 of 32, layer 21 of 224, 1 min 35 s, about 15 min 20 s left

    There is at most one line per second, and one at the end. The time left is extrapolated from all items so far; it is
    too long at first, because compiling kernels counts.

    Args:
        items: Iterable of `total` items; asking for the next one means that the last one is done.
        label: Activity to show, for example "quantizing".
        total: Number of items.
        blocks: Number of items in each block; without blocks a line comes every 30 seconds only.
        there: Number of leading items that were done before the run was resumed, and that took no time.
        short: Whether there is a line at the end if none came before it.
    """
    began = last_line = monotonic()
    ends = list(accumulate(blocks))
    block_ends = set(ends)
    for done, item in enumerate(items, 1):
        yield item  # the consumer is done with it when it asks for the next one
        now = monotonic()
        ended = done == total and (short or last_line > began)
        if done > there and (ended or now - last_line >= (MIN_INTERVAL if done in block_ends else MAX_INTERVAL)):
            last_line = now
            log.info("%s: %s, %s", label, _place(done, total, ends), _times(now - began, done - there, total - there))


def shown(progress: Progress, items: Iterable[Any], label: str, total: int) -> Iterator[Any]:
    """Show the progress of a loop; errors of the display are marked as the caller's, unless the items raised them.

    Raises:
        RecipeError: The display leaves out or repeats items.
    """
    raised: list[Exception] = []
    taken, given, ended = 0, 0, False

    def passed() -> Iterator[Any]:
        nonlocal taken, ended
        try:
            for item in items:
                taken += 1
                yield item
            ended = True
        except Exception as error:
            raised.append(error)
            raise

    try:
        for item in progress(passed(), label, total):
            given += 1
            yield item
    except Exception as error:
        if error in raised:
            raise
        with of_caller():
            raise
    if not ended or given != taken:
        raise RecipeError(f"progress passed on {given} items of {label!r}, not each of them once. Yield every item.")


@contextmanager
def counted(
    progress: Progress, label: str, total: int, *, blocks: Sequence[int] = (), there: int = 0
) -> Iterator[Callable[[int], None]]:
    """Show the progress of a loop that does several items at a time; yields a function of the number of items done.

    Args:
        progress: Display that wraps an iterator; the next item is taken as soon as one is done.
        label, total, blocks, there: Arguments of `logged`; items done before count as done.
    """
    items = iter(progress(logged(range(total), label, total, blocks=blocks, there=there), label, total))
    next(items, None)  # the first item is in progress

    def done(count: int) -> None:
        for _ in range(count):
            next(items, None)

    try:
        done(there)
        yield done
    finally:
        if isinstance(items, Generator):
            items.close()


def _place(done: int, total: int, ends: Sequence[int]) -> str:
    if not ends or len(ends) == total:  # items are blocks
        return f"{'block ' * bool(ends)}{done:,} of {total:,}"
    return f"block {min(bisect_right(ends, done - 1) + 1, len(ends))} of {len(ends)}, layer {done:,} of {total:,}"


def _times(passed: float, done: int, total: int) -> str:
    left = passed * (total - done) / done
    return duration(passed) + (f", about {duration(left)} left" if done < total else "")


def duration(seconds: float) -> str:
    """Return a time in words: "0.4 s", "45 s", "12 min 5 s", "3 h 20 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, secs = divmod(round(seconds), 60)
    if not minutes:
        return f"{secs} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {secs} s"


@cache
def say_compiling() -> None:
    """Make nearplane log once, at level INFO, that Numba compiles kernels, as soon as it does."""
    from numba.core import event

    class Announcement(event.Listener):
        def on_start(self, event: Any) -> None:
            if not self.announced:
                log.info("compiling kernels for this processor (up to half a minute); later runs reuse them")
            self.announced = True

        def on_end(self, event: Any) -> None:
            """Do nothing."""

        announced = False

    event.register("numba:compile", Announcement())  # type: ignore[no-untyped-call]


def peak_memory() -> int:
    """Return the peak CPU memory of this process in bytes, or 0 if it is unknown."""
    try:
        from resource import RUSAGE_SELF, getrusage
    except ImportError:  # Windows
        return 0
    return getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

"""How far a run is, as lines of logging, and how much memory it took. Needs no torch; sets up no handler."""

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

log = logging.getLogger(__name__)
Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]  # (items, what is done with them, how many) -> items
OFTEN, SELDOM = 1.0, 30.0  # seconds: no line sooner than the one, and one as soon as possible after the other


def silent(items: Iterable[Any], label: str, total: int) -> Iterable[Any]:
    """Pass items through; the command line puts a progress bar here."""
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
    """Pass items through and log how far they are: a line of level INFO for every block, or every 30 seconds.

        quantizing: block 3 of 32, layer 21 of 224, 1 min 35 s, about 15 min 20 s left

    There is at most one line a second, and one at the end.

    Args:
        items: as they are worked off, `total` of them.
        label: what is done with them.
        total: how many they are.
        blocks: how many items there are in each block; none: a line comes every 30 seconds only.
        there: how many of them took no time, as a run that was stopped had worked them off; they come first.
        short: whether there is a line at the end though none came before it.
    """
    began = said = monotonic()
    ends = list(accumulate(blocks))
    last = set(ends)
    for done, item in enumerate(items, 1):
        yield item  # whoever takes the next one is done with this one
        now = monotonic()
        ended = done == total and (short or said > began)
        if done > there and (ended or now - said >= (OFTEN if done in last else SELDOM)):
            said = now
            log.info("%s: %s, %s", label, _place(done, total, ends), _times(now - began, done - there, total - there))


@contextmanager
def counted(
    progress: Progress, label: str, total: int, *, blocks: Sequence[int] = (), there: int = 0
) -> Iterator[Callable[[int], None]]:
    """Show how far a loop is that works off several items at a time; yields what is called with how many are done.

    Args:
        progress: wraps an iterator over numbers of items, of which the next is asked for as soon as one is done.
        label, total, blocks, there: as for `logged`; items that are there count as done.
    """
    items = iter(progress(logged(range(total), label, total, blocks=blocks, there=there), label, total))
    next(items, None)  # the first is under way

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
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


@cache
def say_compiling() -> None:
    """From now on log once, at level INFO, that kernels are being compiled, if they are: Numba does that without a word."""
    from numba.core import event

    class Said(event.Listener):
        def on_start(self, event: Any) -> None:
            if not self.said:
                log.info("compiling for this processor, which takes up to half a minute: kept for the next run")
            self.said = True

        def on_end(self, event: Any) -> None:
            """Nothing to say."""

        said = False

    event.register("numba:compile", Said())  # type: ignore[no-untyped-call]


def peak_memory() -> int:
    """Return the most bytes of memory that this process has had at a time, on the CPU; 0 where the system does not say."""
    try:
        from resource import RUSAGE_SELF, getrusage
    except ImportError:  # Windows
        return 0
    return getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

"""Progress of a run as log lines, durations in words, and peak memory. Needs no torch; sets up no log handler."""

from __future__ import annotations

import logging
import sys
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, repeat
from math import inf
from threading import Lock
from time import monotonic
from typing import Any

from nearplane.errors import RecipeError, of_caller

log = logging.getLogger(__name__)
Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]  # (items, label, number of items) -> items
LONG_PHASE = 5.0  # seconds from which an activity without parts has a line in a log
MIN_INTERVAL, MAX_INTERVAL = 1.0, 30.0  # seconds between two lines: at the end of a block, and within blocks


def silent(items: Iterable[Any], label: str, total: int) -> Iterable[Any]:
    """Pass items through without any display; the command line passes a progress bar instead."""
    return items


class Tracked:
    """Items of a loop that pass through and know how far it is: for displays by `line()`, and as log lines at level INFO.

        quantizing: block 3 of 32, layer 21 of 224, 1 min 35 s, about 15 min 20 s left

    A line comes at the end of a block or every 30 seconds, at most one per second, and one at the end. The time left is
    said once a block is finished: the work of the other blocks at the speed of those that are finished.

    Args:
        items: Iterable of `total` items; asking for the next one means that the last one is done.
        label: Activity to show, for example "quantizing".
        total: Number of items.
        blocks: Number of items in each block; without blocks a line comes every 30 seconds only.
        work: Work of each block in any unit, such as multiplications; without it, every item is as much work.
        after: Work behind the last item, in the same unit.
        there: Number of leading items that were done before the run was resumed, and that took no time.
        short: Whether there is a line at the end if none came before it.
    """

    def __init__(
        self,
        items: Iterable[Any],
        label: str,
        total: int,
        *,
        blocks: Sequence[int] = (),
        work: Sequence[float] = (),
        after: float = 0.0,
        there: int = 0,
        short: bool = True,
    ) -> None:
        self.label, self.total = label, total
        self._items, self.there, self._short = items, there, short
        self._ends = list(accumulate(blocks))
        self._worked = list(accumulate(work or blocks or repeat(1, total), initial=0.0))  # before each block, or item
        self._done, self._began, self._after = 0, monotonic(), after
        # time without compiling, and work done: at the start, after the first block, after the last one that is finished
        self._finished = [(working_time(), self._work(there))]
        self._passing = self._pass()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._passing)

    def _pass(self) -> Iterator[Any]:
        last_line = began = self._began
        block_ends = {*self._ends}
        for done, item in enumerate(self._items, 1):
            yield item  # the consumer is done with it when it asks for the next one
            self._done, now = done, monotonic()
            if done > self.there and (done in block_ends or not block_ends):
                self._finished[2:] = [(working_time(), self._work(done))]
            ended = done == self.total and (self._short or last_line > began)
            interval = MIN_INTERVAL if done in block_ends else MAX_INTERVAL
            if done > self.there and (ended or now - last_line >= interval):
                last_line = now
                log.info("%s: %s", self.label, self.line(ended=True))

    def line(self, *, ended: bool = False) -> str:
        """Return what is done, the time since the start, and from the first finished block on the time that is left.

        Args:
            ended: Whether the last item that ended is named, with its block; else the block that is in progress.
        """
        left = self._left()
        place, passed = self._place(ended=ended), duration(monotonic() - self._began)
        if self._done == self.total:
            return f"{place}, {passed}" + ", finishing" * (not ended)
        return f"{place}, {passed}" + ("" if left is None else f", about {duration(left)} left")

    def _place(self, *, ended: bool) -> str:
        if not self._ends:
            return f"{self._done:,} of {self.total:,}"
        block = bisect_right(self._ends, self._done - ended) + 1
        layer = f", layer {self._done:,} of {self.total:,}" * (ended and len(self._ends) < self.total)
        return f"block {min(block, len(self._ends))} of {len(self._ends)}{layer}"

    def _work(self, done: int) -> float:
        """Return the work of the first items."""
        if not self._ends:
            return self._worked[done]
        block = bisect_right(self._ends, done)
        if block == len(self._ends):
            return self._worked[block]
        before = self._ends[block - 1] if block else 0
        share = (done - before) / (self._ends[block] - before)
        return self._worked[block] + share * (self._worked[block + 1] - self._worked[block])

    def _left(self) -> float | None:
        """Return the seconds left at the speed of the finished blocks, without the first of several, which warms caches."""
        if len(self._finished) == 1:
            return None
        (began, before), (last, done) = self._finished[-2:]
        speed = (done - before) / (last - began) if last > began and done > before else inf
        return max(0.0, (self._worked[-1] + self._after - done) / speed - (working_time() - last))


class Seen:
    """An iterator with the method `line` of the items that pass through it, if they have one."""

    def __init__(self, items: Iterator[Any], line: Callable[[], str] | None) -> None:
        self._items, self.line = items, line

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._items)


def by_item(progress: Progress, items: Sequence[Any], label: str) -> Iterator[Any]:
    """Pass items through and show how many are done; a loop that ends soon has no line in a log."""
    return shown(progress, Tracked(items, label, len(items), short=False), label, len(items))


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
        for item in progress(Seen(passed(), getattr(items, "line", None)), label, total):
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
def in_steps(progress: Progress, tracked: Tracked) -> Iterator[Callable[[int], None]]:
    """Show the progress of a loop that does several items at a time; yields a function of the number of items done.

    Args:
        progress: Display that wraps an iterator; the next item is taken as soon as one is done.
        tracked: The items, of which those that are `there` count as done.
    """
    items = iter(progress(tracked, tracked.label, tracked.total))
    next(items, None)  # the first item is in progress

    def done(count: int) -> None:
        for _ in range(count):
            next(items, None)

    try:
        done(tracked.there)
        yield done
    finally:
        if isinstance(items, Generator):
            items.close()


class Phase:
    """An activity whose parts are not counted, as one item: displays show the time since its start.

    Args:
        label: What is done, for a log line if it takes `LONG_PHASE` seconds or more.
    """

    def __init__(self, label: str) -> None:
        self._label, self._began, self._items = label, monotonic(), iter((None,))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            if monotonic() - self._began >= LONG_PHASE:
                log.info("%s took %s", self._label, self.line())
            raise

    def line(self) -> str:
        """Return the time since the start."""
        return duration(monotonic() - self._began)


@contextmanager
def phase(progress: Progress, label: str) -> Iterator[None]:
    """A context in which an activity is shown that comes before or after what is counted."""
    items = iter(progress(Phase(label), label, 1))
    next(items, None)
    try:
        yield
        next(items, None)
    finally:
        if isinstance(items, Generator):
            items.close()


def duration(seconds: float) -> str:
    """Return a time in words: "0.4 s", "45 s", "12 min 5 s", "3 h 20 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, secs = divmod(round(seconds), 60)
    if not minutes:
        return f"{secs} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {secs} s"


class _Compiling:
    """How long Numba compiled in this process, once `say_compiling` was called.

    Attributes:
        ended: Seconds of what is compiled.
        depth: Number of functions that are being compiled, one for another or in several threads.
        began: Time at which the outermost of them began.
    """

    ended, depth, began = 0.0, 0, 0.0
    _lock = Lock()

    def seconds(self) -> float:
        """Return the seconds until now."""
        with self._lock:
            return self.ended + (monotonic() - self.began if self.depth else 0.0)

    def start(self) -> None:
        """Note that a function begins to be compiled; say so for the first one."""
        with self._lock:
            if not self.depth:
                if not self.ended:
                    log.info("compiling kernels for this processor (up to half a minute); later runs reuse them")
                self.began = monotonic()
            self.depth += 1

    def end(self) -> None:
        """Note that a function is compiled."""
        with self._lock:
            self.depth -= 1
            if not self.depth:
                self.ended += monotonic() - self.began


_compiling = _Compiling()


def working_time() -> float:
    """Return a time that stands still while kernels are compiled, which happens once and is no part of a run's speed."""
    return monotonic() - _compiling.seconds()


@cache
def say_compiling() -> None:
    """Make nearplane log once, at level INFO, that Numba compiles kernels, as soon as it does, and time it."""
    from numba.core import event

    class Listener(event.Listener):
        def on_start(self, event: Any) -> None:
            _compiling.start()

        def on_end(self, event: Any) -> None:
            _compiling.end()

    event.register("numba:compile", Listener())  # type: ignore[no-untyped-call]


def peak_memory() -> int:
    """Return the peak CPU memory of this process in bytes, or 0 if it is unknown."""
    try:
        from resource import RUSAGE_SELF, getrusage
    except ImportError:  # Windows
        return 0
    return getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

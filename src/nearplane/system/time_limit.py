"""A limit on the time of templates and regular expressions, which come with models and need not end. Needs no torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 10.0  # rendering a chat or matching a name takes milliseconds


@contextmanager
def time_limit() -> Iterator[None]:
    """A context that ends with an error after `SECONDS`, by a signal, which also stops matching in C.

    Python handles signals in the main thread alone: in other threads, on Windows, and where the program has set a timer of
    its own, there is no limit.

    Raises:
        TimeoutError: The work within takes longer.
    """
    alone = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    if not alone or any(signal.getitimer(signal.ITIMER_REAL)):
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"it does not end within {SECONDS:g} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

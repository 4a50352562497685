"""A lock in a file: what one process alone may do at a time. Knows nothing of what that is; needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from nearplane.errors import FormatError, RecipeError

PATIENCE = 0.5  # seconds in which a process that is just ending gives its lock back


@contextmanager
def alone(lock: Path, refusal: str) -> Iterator[None]:
    """Hold a lock; it ends with its process, however that ends. The file is gone when the context ends.

    Args:
        lock: the file, made together with its folder.
        refusal: what to say where another process holds it.

    Raises:
        RecipeError: another process holds it.
        FormatError: the file cannot be made or locked.
    """
    held = FileLock(lock, thread_local=False)
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held.acquire(timeout=PATIENCE)
    except Timeout:
        raise RecipeError(refusal) from None
    except OSError as error:
        raise FormatError(
            f"{lock} could not be written or locked ({error}). Choose a place that can be written."
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):
            lock.unlink()  # while it is held: whoever waits for this file finds that it is gone
        held.release()

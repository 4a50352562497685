"""Standard streams that may be closed, full or without a reader: text that they cannot take is dropped, and work goes on."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast


class Unread(KeyboardInterrupt):
    """Exception that ends a command of which nobody reads the output any more, as after `| head`."""


class Stream:
    """A standard stream that drops text that cannot be written, and keeps the error as `lost`.

    Args:
        stream: Stream of the interpreter; None if it is closed.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.lost: OSError | None = None
        self._closed = stream is None
        self._stream = stream or open(os.open(os.devnull, os.O_WRONLY), "w", closefd=False)  # noqa: SIM115
        with suppress(AttributeError):  # a stream of another program may lack it
            self._stream.reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, or drop it; return its length."""
        try:
            if self._closed:
                raise OSError(errno.EBADF, "its stream is closed")
            self._stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered, or drop it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Keep the first error, and write everything else to the null device, also at the end of the interpreter."""
        if self.lost is None:
            self.lost = error
            with suppress(OSError), open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self._stream.fileno())


@contextmanager
def lasting_streams() -> Iterator[None]:
    """A context in which printing raises no error; at its end a line says whether some of the output was lost.

    Closed streams are opened on the null device: else the next file that is opened would take the place of one.
    """
    before = sys.stdout, sys.stderr
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)
    output, errors = Stream(sys.stdout), Stream(sys.stderr)
    sys.stdout, sys.stderr = cast(TextIO, output), cast(TextIO, errors)
    try:
        yield
    finally:
        output.flush()
        if output.lost is not None and not isinstance(output.lost, BrokenPipeError):
            errors.write(f"nearplane: the output could not be printed in full: {output.lost.strerror}.\n")
        errors.flush()
        sys.stdout, sys.stderr = before


def say_error(sentence: str) -> None:
    """Print a sentence on the error stream, or on the output stream if that one cannot be written."""
    print(f"nearplane: {sentence}", file=sys.stderr, flush=True)
    if getattr(sys.stderr, "lost", None) is not None:
        print(f"nearplane: {sentence}")


def refuse_unread() -> None:
    """End a command that prints more and more, if nobody reads its output any more.

    Raises:
        Unread: The output is a pipe without a reader.
    """
    if isinstance(getattr(sys.stdout, "lost", None), BrokenPipeError):
        raise Unread

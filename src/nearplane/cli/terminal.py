"""Progress bars, log output, signals and errors of the command line."""

from __future__ import annotations

import logging
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from cyclopts import CycloptsError, MissingArgumentError, UnusedCliTokensError

from nearplane.cli.streams import Unread, say_error
from nearplane.errors import FormatError, NearplaneError, RankError, printable
from nearplane.system.memory import is_refused, system_limit
from nearplane.system.progress_bar import console

PROGRESS = "nearplane.system.progress"  # name of the logger of steps that are done
QUICK = 1.0  # seconds within which another Ctrl-C is taken for the same


class Terminated(KeyboardInterrupt):
    """Exception for SIGTERM, which ends a command as Ctrl-C does."""


class _Lines(logging.Handler):
    """Log lines on the error stream; on a terminal above the bar, and broken between words.

    Args:
        stopped: The list of `stopping`.
    """

    def __init__(self, stopped: Sequence[KeyboardInterrupt]) -> None:
        super().__init__()
        self._stopped = stopped

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line, with its traceback if it has one; what cannot be printed stops no work.

        Where work goes on after Ctrl-C, because a library has swallowed it, the next line of progress raises it again; on a
        terminal a bar stands for these lines, and Ctrl-C can be pressed again after `QUICK` seconds.
        """
        if self._stopped and record.name == PROGRESS:
            raise self._stopped[-1]
        try:
            text = self.format(record)
            if sys.stderr.isatty():
                console().print(text)
            else:
                print(text, file=sys.stderr, flush=True)
        except Exception:  # as the handlers of logging do
            self.handleError(record)


@contextmanager
def stopping() -> Iterator[list[KeyboardInterrupt]]:
    """A context in which Ctrl-C and SIGTERM raise exceptions, which are also in the list that it yields.

    Ctrl-C pressed again within a second does not interrupt what the first one has begun to end.
    """
    stopped: list[KeyboardInterrupt] = []
    last: dict[int, float] = {}

    def stop(number: int, frame: object) -> None:
        quick, last[number] = monotonic() - last.get(number, -math.inf) < QUICK, monotonic()
        if not quick:
            stopped.append(Terminated() if number == signal.SIGTERM else KeyboardInterrupt())
            raise stopped[-1]

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, stop)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else ignored, as in background jobs of a shell
        before[signal.SIGINT] = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


@contextmanager
def attended(stopped: Sequence[KeyboardInterrupt]) -> Iterator[None]:
    """A context that writes nearplane's log to the error stream.

    Ctrl-C and SIGTERM are raised again if a library replaces them with an error of its own.

    Args:
        stopped: The list of `stopping`.

    Raises:
        FormatError: The user has no right to read or write a file, which the message names.
    """
    handler = _Lines(stopped)
    package, progress = logging.getLogger("nearplane"), logging.getLogger(PROGRESS)
    levels = package.level, progress.level
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    if sys.stderr.isatty():
        progress.setLevel(logging.WARNING)  # the bar shows the progress
    try:
        yield
    except Exception as error:
        if not stopped and isinstance(error, PermissionError):
            raise FormatError(f"{error.filename} cannot be read or written: {error.strerror}.") from error
        if not stopped or isinstance(error, RankError):  # torchrun ends all processes once one of them is gone
            raise
        for note in getattr(error, "__notes__", ()):
            stopped[-1].add_note(note if "Repeat the command" in note else f"{note} Repeat the command.")
        raise stopped[-1] from error  # e.g. safetensors raises a ValueError instead while it makes a tensor
    finally:
        package.removeHandler(handler)
        package.setLevel(levels[0])
        progress.setLevel(levels[1])


@contextmanager
def one_line_a_step() -> Iterator[Callable[[str], None]]:
    """A context without log lines of the work itself, except warnings; yields a function that logs the line of a step."""
    package, steps = logging.getLogger("nearplane"), logging.getLogger("nearplane.cli.steps")
    before = package.level
    package.setLevel(logging.WARNING)
    steps.setLevel(logging.INFO)
    try:
        yield lambda line: steps.info("%s", line)
    finally:
        package.setLevel(before)


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """A context whose errors are printed as one sentence, and end the program with their exit code."""
    try:
        yield
    except CycloptsError as error:
        say_error(printable(_mistyped(error)))
        sys.exit(2)
    except NearplaneError as error:
        say_error(str(error))
        sys.exit(1)
    except (MemoryError, RuntimeError, ImportError, BlockingIOError) as error:
        if not is_refused(error):  # outside of verbs: while torch is imported, or other processes are started
            raise
        say_error(str(system_limit(error)))
        sys.exit(1)
    except Unread:
        sys.exit(141)  # as of a command that SIGPIPE ends
    except KeyboardInterrupt as stopped:  # its notes name the files left on disk
        number = signal.SIGTERM if isinstance(stopped, Terminated) else signal.SIGINT
        state = " ".join(getattr(stopped, "__notes__", None) or ["Repeat the command."])
        say_error(f"stopped by {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}. {state}")
        sys.exit(128 + number)


def _mistyped(error: CycloptsError) -> str:
    """Return what is wrong with a command line, in a sentence."""
    command = " ".join(error.command_chain or ())
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.argument.name
        needs = name.removeprefix("--").upper() if error.argument.field_info.is_positional else f"{name} with a value"
        return f"{command} needs {needs}. See nearplane {command} --help."
    if isinstance(error, UnusedCliTokensError):
        return f"{command} does not take {' '.join(error.unused_tokens or ())}. See nearplane {command} --help."
    return str(error)

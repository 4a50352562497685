"""Exceptions of nearplane by cause, and helpers for messages: each says what was found, what was expected, what to do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

OF_CALLER = "_nearplane_of_caller"  # attribute of errors that a function of the caller raised
MAX_MESSAGE_LETTERS = 1600  # a longer message is cut in the middle
INSTALL = {  # commands that install the packages of an extra of pyproject.toml, also where nearplane is not on an index
    "datasets": 'pip install "datasets>=3.0"',
    "eval": 'pip install "lm_eval[hf]>=0.4.13,<0.5"',
    "figures": 'pip install "matplotlib>=3.9"',
    "gguf": 'pip install "gguf>=0.19"',
}


def printable(text: str) -> str:
    """Return a text with control and formatting characters and lone surrogates escaped, which could control a terminal.

    Names in files come from untrusted sources; nearplane prints them only through this function.
    """
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)


def first_few(texts: Sequence[str], most: int = 4, between: str = ", ") -> str:
    """Return the first `most` texts, joined, and the number of the others: "a, b and 3 more"."""
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


class NearplaneError(Exception):
    """Base class of the errors of nearplane; the command line prints the message and exits with code 1."""

    def __init__(self, message: str = "") -> None:
        message = printable(message)
        if len(message) > MAX_MESSAGE_LETTERS:  # a message may quote a file of any size; both ends matter
            message = f"{message[: MAX_MESSAGE_LETTERS // 2]} .. {message[-MAX_MESSAGE_LETTERS // 4 :]}"
        super().__init__(message)


class RecipeError(NearplaneError):
    """An option or recipe is invalid, or the chosen format cannot store its result."""


class ModelError(NearplaneError):
    """A model cannot be found, read or split into blocks and layers."""


class CalibrationError(NearplaneError):
    """The calibration text is missing, empty, too short, or makes the network produce NaN or Inf."""


class NumericalError(NearplaneError):
    """A matrix is not finite or not positive definite."""


class FormatError(NearplaneError):
    """A file violates its format, or cannot be written."""


class DeviceMemoryError(NearplaneError):
    """A GPU has no room for what is computed on it."""


class SystemLimitError(NearplaneError):
    """The operating system gives this process no more memory, threads or processes."""


class RankError(NearplaneError):
    """Another process of the same run failed or is gone, or the processes cannot be connected."""


@contextmanager
def of_caller() -> Iterator[None]:
    """A context around a call of a function that was passed to a verb, whose errors are not those of a model or file."""
    try:
        yield
    except Exception as error:
        setattr(error, OF_CALLER, True)
        raise


def is_of_caller(error: BaseException) -> bool:
    """Return whether an error was raised within `of_caller`."""
    return hasattr(error, OF_CALLER)


def first_line(error: Exception) -> str:
    """Return the first line of another library's error message, or the type of the error if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]

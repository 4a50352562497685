"""What can go wrong, by cause. Every message says what was found, what was expected and what to do."""

from collections.abc import Sequence

LONGEST = 1600  # letters of a message


def printable(text: str) -> str:
    """Return a text in which nothing can steer a terminal: control and formatting characters and lone surrogates escaped.

    Names in files are chosen by whoever wrote them. All that nearplane prints of them goes through here.
    """
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)


def first_few(texts: Sequence[str], most: int = 4, between: str = ", ") -> str:
    """Return the first texts in a row, and how many more there are: "a, b and 3 more"."""
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


class NearplaneError(Exception):
    """Base of all errors that nearplane raises on purpose; the command line prints its message and exits with 1."""

    def __init__(self, message: str = "") -> None:
        message = printable(message)
        if len(message) > LONGEST:  # what was found may be a file of any size: both ends say what it is about
            message = f"{message[: LONGEST // 2]} .. {message[-LONGEST // 4 :]}"
        super().__init__(message)


class RecipeError(NearplaneError):
    """The recipe asks for something that does not exist or that the chosen format cannot hold."""


class ModelError(NearplaneError):
    """The model cannot be found, read or taken apart into blocks and layers."""


class CalibrationError(NearplaneError):
    """The calibration text is missing, empty, too short, or makes the network produce NaN or Inf."""


class NumericalError(NearplaneError):
    """A matrix is not finite or not positive definite."""


class FormatError(NearplaneError):
    """A file on disk is not what its format says."""


def first_line(error: Exception) -> str:
    """Return the first line of what another library's error says, or its type if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]

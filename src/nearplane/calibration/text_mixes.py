"""Mixes of texts, `a.jsonl:2,b.txt:1`: their weights, and the order in which their windows alternate. Needs no torch."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, islice

from nearplane.calibration.named_texts import text_to_calibrate_on
from nearplane.errors import CalibrationError

SUFFIXES = (".txt", ".jsonl")  # of text files
NUMBER = re.compile(r"[-+]?(\d{1,9}(\.\d{0,9})?|\.\d{1,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedText:
    """A text of a mix.

    Args:
        name: File, folder, data set or named text, as the user wrote it.
        weight: Weight of its windows, relative to the other weights.
    """

    name: str
    weight: Fraction


def texts_of(calibration: str | os.PathLike[str] | None) -> tuple[WeightedText, ...]:
    """Return the texts of a mix with their weights; an empty tuple for a single text.

    A mix is a list with commas that is not itself the path of a file or folder. A `:NUMBER` at the end of a part is its
    weight, and 1 is the weight of a part without one.

    Raises:
        CalibrationError: A weight is no positive number, a part is empty, or a single text has a weight.
    """
    text = "" if calibration is None else os.fspath(calibration)
    parts = [part.strip() for part in text.split(",")]
    if _exists(text) or (_is_too_long(text) and not _exists(_split(parts[0])[0])):
        return ()
    if len(parts) == 1:
        name, weight = _split(text)
        if weight is not None and (_is_file_name(name) or text_to_calibrate_on(name)):
            raise CalibrationError(
                f"--calibration {text} gives a weight to a single text. Leave out :{weight}, or name more texts after a "
                f"comma: {text},OTHER.txt:1."
            )
        return ()
    texts = []
    for part in parts:
        name, weight = _split(part)
        if not name:
            raise CalibrationError(f"--calibration {text} has an empty text. Expected a list as a.jsonl:2,b.txt:1.")
        if weight is not None and (NUMBER.fullmatch(weight) is None or Fraction(weight) <= 0):
            raise CalibrationError(
                f"--calibration: the weight of {name} is {weight!r}; expected a positive number, as in {name}:2."
            )
        texts.append(WeightedText(name=name, weight=Fraction(weight or 1)))
    return tuple(texts)


def check_shares(texts: Sequence[WeightedText], samples: int) -> None:
    """Refuse a mix that gives a text no calibration window; a single text is no mix.

    Raises:
        CalibrationError: A text gets none of `samples` windows.
    """
    order = [*islice(turns([each.weight for each in texts]), samples if texts else 0)]
    for number, each in enumerate(texts):
        if number not in order:
            raise CalibrationError(
                f"--calibration: {each.name} gets none of the {samples} calibration windows. Use a larger weight for it, "
                f"or more --samples."
            )


def turns(weights: Sequence[Fraction]) -> Iterator[int]:
    """Yield, without end, the number of the text that gives the next window.

    After k windows each text has given its share of k, rounded up or down.

    Tijdeman, The chairman assignment problem, 1980.
    """
    shares = [weight / sum(weights) for weight in weights]
    given, slack = [0] * len(shares), Fraction(1, max(1, 2 * len(shares) - 2))
    for windows in count(1):
        due = (n for n, share in enumerate(shares) if share * windows - given[n] >= slack)
        turn = min(due, key=lambda n: (given[n] + 1 - slack) / shares[n])  # its deadline
        given[turn] += 1
        yield turn


def order_of_windows(weights: Sequence[Fraction], samples: int, extra: int) -> Iterator[int]:
    """Yield the number of the text of each window: `samples` calibration windows, extra windows, and all later ones.

    Extra windows are sorted by text, at least one of each.
    """
    order = turns(weights)
    yield from islice(order, samples)
    yield from sorted([*range(len(weights)), *islice(turns(weights), extra - len(weights))])
    yield from order


def _split(part: str) -> tuple[str, str | None]:
    """Return a text's name and its weight as it was written; None if there is none."""
    name, _, weight = part.rpartition(":")
    if name and (NUMBER.fullmatch(weight) or _is_file_name(name)):
        return name.strip(), weight.strip()
    return part, None


def _is_file_name(name: str) -> bool:
    """Return whether a name is that of a text file, whether it exists or not, or of an existing folder."""
    return name.endswith(SUFFIXES) or _exists(name)


def _exists(path: str) -> bool:
    return os.path.exists(os.path.expanduser(path))


def _is_too_long(path: str) -> bool:
    """Return whether a text is too long for a path, so that it may be a text in place of its file."""
    try:
        os.stat(path)
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    except ValueError:  # null characters
        return True
    return False

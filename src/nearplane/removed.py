"""Values of options that nearplane no longer takes, and what to use instead."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from nearplane.errors import RecipeError

REMOVED = {  # (option, value): what to use instead
    ("coder", "zstd"): (
        "use tans, the default, which takes fewer bytes. The last version that reads files coded with zstd is commit f3afb2a"
    ),
}


def refuse_removed(option: str, value: object) -> None:
    """Refuse a value that an option once had.

    Raises:
        RecipeError: with what replaced it.
    """
    if isinstance(value, str) and (instead := REMOVED.get((option, value))):
        raise RecipeError(f"{option} {value} was removed: {instead}.")


def refuse_removed_words(words: Sequence[str]) -> None:
    """Refuse a command line that gives an option a value that it once had.

    Raises:
        RecipeError: with what replaced it.
    """
    split = [part for word in words for part in word.split("=", 1)]
    for option, value in pairwise(split):
        if option.startswith("--"):
            refuse_removed(option.removeprefix("--").replace("-", "_"), value)

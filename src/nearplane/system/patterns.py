"""Regular expressions that recipes and config files hold."""

from __future__ import annotations

import re
from functools import lru_cache

from nearplane.errors import RecipeError
from nearplane.system.time_limit import time_limit

# signs of a regular expression for repetition and choice; with one of them, the time is at most quadratic
CHOICES = "*+{?|"


@lru_cache(maxsize=1 << 16)
def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression; the cache of `re` holds 512 patterns, fewer than the layers of a deep model."""
    return re.compile(pattern)


def has_match(pattern: str, name: str, *, at_start: bool = False) -> bool:
    """Return whether a regular expression matches a part of a name, or its beginning.

    Raises:
        RecipeError: The match does not end within a time, as with repetitions inside repetitions.
    """
    expression = compiled(pattern)
    match = expression.match if at_start else expression.search
    if sum(map(pattern.count, CHOICES)) < 2:  # most patterns, of which a recipe may have one for each layer
        return match(name) is not None
    try:
        with time_limit():
            return match(name) is not None
    except TimeoutError as error:
        raise RecipeError(
            f"The regular expression {pattern[:60]!r} cannot be tried on the name {name}: {error}. Write it without a "
            f"repetition inside a repetition."
        ) from error


@lru_cache(maxsize=1 << 16)
def fault_of(pattern: str) -> str | None:
    """Return the reason why a text is not a regular expression, or None if it is one."""
    try:
        with time_limit():
            compiled(pattern)
    except (re.error, RecursionError, OverflowError, TimeoutError) as error:
        return f"is not a regular expression ({error})"
    return None

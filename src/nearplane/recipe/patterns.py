"""Regular expressions of a recipe or a config."""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(maxsize=1 << 16)
def compiled(pattern: str) -> re.Pattern[str]:
    """Return a regular expression; `re` itself keeps 512, and a deep model has more layers with a type of their own."""
    return re.compile(pattern)


def fault_of(pattern: str) -> str | None:
    """Return why a text is no regular expression; None if it is one."""
    try:
        compiled(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is not a regular expression ({error})"
    return None

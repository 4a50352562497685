"""Regular expressions that recipes and config files hold."""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(maxsize=1 << 16)
def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression; the cache of `re` holds 512 patterns, fewer than the layers of a deep model."""
    return re.compile(pattern)


def fault_of(pattern: str) -> str | None:
    """Return the reason why a text is not a regular expression, or None if it is one."""
    try:
        compiled(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is not a regular expression ({error})"
    return None

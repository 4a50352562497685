"""Regular expressions of a recipe or a config, which anybody may have written: matched only if that takes no time."""

from __future__ import annotations

import re
from functools import lru_cache

UNBOUNDED = 4  # repetitions without a limit in one pattern: each may multiply the time by the length of a name


@lru_cache(maxsize=1 << 16)
def compiled(pattern: str) -> re.Pattern[str]:
    """Return a regular expression; `re` itself keeps 512, and a deep model has more layers with a type of their own."""
    return re.compile(pattern)


def fault_of(pattern: str) -> str | None:
    """Return what is wrong with a regular expression: it is none, or could take years to match; None if nothing is.

    Repeating what holds a repetition or alternatives, as in `(.+)+`, takes exponential time.
    """
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is not a regular expression ({error})"
    repetitions, ambiguous = 0, [False]  # of the groups that are open
    plain = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "a", pattern, flags=re.DOTALL)  # escapes and sets are one letter
    plain = re.sub(r"\(\?(?:[a-zA-Z-]*:|P?<[=!]?\w*>?|[=!>])", "(", plain)  # what a group is, its repetition aside
    for sign, following in zip(plain, [*plain[1:], ""], strict=True):
        if sign == "(":
            ambiguous.append(False)
        elif sign == ")" and len(ambiguous) > 1:
            inner = ambiguous.pop()
            if inner and following and following in "*+{":
                return "repeats a group that holds repetitions or alternatives, which could take years to match"
            ambiguous[-1] |= inner
        elif sign in "*+{":
            repetitions, ambiguous[-1] = repetitions + 1, True
        elif sign == "|":
            ambiguous[-1] = True
    return None if repetitions <= UNBOUNDED else f"has {repetitions} repetitions, at most {UNBOUNDED} are matched"

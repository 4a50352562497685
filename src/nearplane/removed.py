"""Values of options that nearplane no longer takes, and what to use instead."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from nearplane.errors import RecipeError

GONE = {  # option: what to use instead
    "gains": "leave it out: scales of rows and columns after the solve cost as much as they gained",
    "shrink": "leave it out: shrunken targets lose more in networks, where later layers make up for noise",
    "groups": "leave it out: steps are fitted before the sweep and by least squares after it (--rounds)",
}
FROM_PYTHON = {  # option of the command line: its values that only Python takes, None for all of them
    "factor": None,
    "method": None,
    "coder": None,
    "solver": ("obq",),
    "scale": None,
    "sweep_damp": None,
    "rows": None,
    "true_sequential": None,
    "seed": None,
}
REMOVED = {  # (option, value): what to use instead
    ("scale", "hessian"): "use mse, the default, which is as good",
    ("order", "reversed"): "use activation, the default, or natural",
    ("coder", "zstd"): (
        "use tans, the default, which takes fewer bytes. The last version that reads files coded with zstd is commit f3afb2a"
    ),
}


def refuse_removed(option: str, value: object) -> None:
    """Refuse a value that an option once had.

    Raises:
        RecipeError: with what replaced it.
    """
    if instead := GONE.get(option):
        raise RecipeError(f"{option} was removed: {instead}.")
    if isinstance(value, str) and (instead := REMOVED.get((option, value))):
        raise RecipeError(f"{option} {value} was removed: {instead}.")


def refuse_removed_words(words: Sequence[str]) -> None:
    """Refuse a command line that gives an option a value that it once had.

    Raises:
        RecipeError: with what replaced it.
    """
    split = [part for word in words for part in word.split("=", 1)]
    for option, value in pairwise([*split, ""]):
        if not option.startswith("--"):
            continue
        name = option.removeprefix("--").removeprefix("no-").replace("-", "_")
        refuse_removed(name, value)
        if words[0] == "quantize" and name in FROM_PYTHON and ((only := FROM_PYTHON[name]) is None or value in only):
            given = option if value.startswith("-") else f"{option} {value}".strip()
            raise RecipeError(
                f"{given} is for studies and no flag any more. Give {name} to nearplane.quantize() in Python, or see `nearplane "
                f"compare`."
            )

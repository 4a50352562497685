"""Flags of `nearplane quantize` that make up a recipe, and the groups in which its help shows them.

The fields, their types and their defaults are defined in `schemes.py` and `recipe.py`; other fields are only for Python.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import MISSING, field, fields, make_dataclass
from functools import wraps
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from cyclopts import Group, Parameter, convert

from nearplane.errors import RecipeError
from nearplane.recipe.recipe import Calibration, LayerScheme, merged_options, translated_options
from nearplane.recipe.scheme import names_of
from nearplane.recipe.schemes import AnyScheme, BlockScheme, GridScheme, RateScheme, scheme_of
from nearplane.system.arguments import check_device

EVERYDAY_GROUP = Group("Everyday", sort_key=1)
RATE_GROUP = Group("Entropy-coded, instead of --bits", sort_key=2)
GGUF_GROUP = Group("GGUF, for llama.cpp", sort_key=3)
TEXT_GROUP = Group("Calibration text", sort_key=4)
LAYER_GROUP = Group("Layer by layer", sort_key=5)
SOLVER_GROUP = Group("Solver: the defaults gave the best results", sort_key=6)
RUN_GROUP = Group("Running", sort_key=7)
GROUPS = {  # fields that are flags, and their groups in the help
    "grid": EVERYDAY_GROUP,
    "embeddings": EVERYDAY_GROUP,
    "bits": EVERYDAY_GROUP,
    "group_size": EVERYDAY_GROUP,
    "symmetric": EVERYDAY_GROUP,
    "rate": RATE_GROUP,
    "size": RATE_GROUP,
    "calibration": TEXT_GROUP,
    "samples": TEXT_GROUP,
    "seqlen": TEXT_GROUP,
    "first_token": TEXT_GROUP,
    "rare_experts": TEXT_GROUP,
    "include_head": LAYER_GROUP,
    "include_embeddings": LAYER_GROUP,
    "solver": SOLVER_GROUP,
    "beam": SOLVER_GROUP,
    "polish": SOLVER_GROUP,
    "rounds": SOLVER_GROUP,
    "order": SOLVER_GROUP,
    "damp": SOLVER_GROUP,
    "correct": SOLVER_GROUP,
}


def exactly(kind: Any, words: Sequence[Any]) -> Any:
    """Convert the words of an option as cyclopts does, but refuse what it would round or take for the current folder."""
    for text in (word.value for word in words):
        if {int, float} & {kind, *get_args(kind)} == {int} and "." in text and not float(text).is_integer():
            raise ValueError(f"{text} is not a whole number")
        if Path in (kind, *get_args(kind)) and not text:
            raise ValueError("the path is empty")
    return convert(kind, words)


def flags_of(part: type, but: str | None = None) -> type:
    """Return a dataclass of the fields of a part of a recipe that are flags, without the field `but`.

    Its objects have an attribute `given` with those that were passed.
    """
    hints = get_type_hints(part)
    flag_fields = []
    for each in sorted(fields(part), key=lambda f: list(GROUPS).index(f.name) if f.name in GROUPS else 0):
        if each.name in GROUPS and each.name != but:
            default = field(default=None if each.default is MISSING else each.default, kw_only=True)
            parameter = Parameter(group=GROUPS[each.name], help=help_of(part, each.name))
            flag_fields.append((each.name, Annotated[hints[each.name], parameter], default))
    flags = make_dataclass(part.__name__, flag_fields, frozen=True, kw_only=True)
    flags.__module__ = __name__  # else cyclopts treats it as a builtin type
    fill = flags.__init__  # type: ignore[misc]

    @wraps(fill)
    def remember(self: Any, **given: Any) -> None:
        fill(self, **given)
        object.__setattr__(self, "given", given)

    flags.__init__ = remember  # type: ignore[misc]
    return flags


def help_of(part: type, name: str) -> str:
    """Return the description of a field from the docstring of its dataclass or of a base class."""
    for each in part.__mro__:
        lines = (each.__doc__ or "").split("Args:")[-1].splitlines()
        for index, line in enumerate(lines):
            if line.strip().startswith(f"{name}: "):
                continuation = []
                for after in lines[index + 1 :]:
                    if not after.startswith(" " * 12):
                        break
                    continuation.append(after.strip())
                return " ".join([line.strip().removeprefix(f"{name}: "), *continuation])
    if sys.flags.optimize > 1:  # Python runs without docstrings
        return ""
    raise AssertionError(f"{part.__name__}.{name} is not explained in its docstring")


Flat = Parameter(name="*", negative="")  # of a dataclass whose fields are flags
Hidden = Parameter(parse=False)  # of a field that is only for Python
Switch = Annotated[bool, Parameter(negative="")]
Several = Parameter(consume_multiple=True, negative="")
DeviceFlag = Annotated[str, Parameter(validator=lambda _, name: check_device(name))]  # refused before torch is loaded
GridFlags = flags_of(GridScheme, but="grid")  # `scheme_of` accepts the grid for all kinds
BlockFlags, RateFlags = flags_of(BlockScheme), flags_of(RateScheme)
CalibrationFlags = flags_of(Calibration)
PURPOSES = {
    GridFlags: "for weights on a fixed grid",
    BlockFlags: "for weights on a named grid",
    RateFlags: "for entropy-coded weights",
}


def refuse_mixed(words: Sequence[str]) -> None:
    """Refuse a command line with flags of two kinds of scheme.

    Raises:
        RecipeError: The command line has flags of two kinds.
    """
    given = [word.split("=")[0].replace("--no-", "--") for word in words]
    kinds = [{f"--{name.replace('_', '-')}" for name in names_of(kind)} for kind in PURPOSES]
    for first, second in combinations(PURPOSES, 2):
        one, other = (
            next((word for word in given if word in {f"--{name.replace('_', '-')}" for name in alone}), None)
            for alone in (names_of(first) - names_of(second), names_of(second) - names_of(first))
        )
        if one is not None and other is not None and not any({one, other} <= kind for kind in kinds):
            raise RecipeError(f"{one} is {PURPOSES[first]}, {other} is {PURPOSES[second]}. Leave out one of them.")


def scheme_from(flags: Any, *, format: str | None = None, allocate: str | None = None) -> AnyScheme:
    """Return the scheme of the flags; None means the default."""
    return scheme_of(into=format, spread=allocate, **_given(flags))


def _given(flags: Any) -> dict[str, Any]:
    """Return the flags that were given, also with the value of their default, which another format may not allow."""
    return {} if flags is None else dict(flags.given)


def layer_schemes(texts: Sequence[str], flags: Any, *, format: str | None = None) -> tuple[LayerScheme, ...]:
    """Return the schemes of `--layer 'PATTERN=NAME:VALUE,NAME:VALUE'`, which override the flags for matching layers.

    Raises:
        RecipeError: A text does not have this form, or a name or value is invalid.
    """
    options = _given(flags)
    schemes = []
    for text in texts:
        pattern, _, changes = text.rpartition("=")
        pairs = [change.split(":", 1) for change in changes.split(",")]
        if not pattern or not all(len(pair) == 2 for pair in pairs):
            raise RecipeError(f"--layer {text!r} is not PATTERN=NAME:VALUE; expected for example 'down_proj=bits:4'.")
        changed = [name.strip() for name, _ in pairs]
        if twice := {name for name in changed if changed.count(name) > 1}:
            raise RecipeError(f"--layer {text!r} gives {min(twice)} twice. Leave out one of them.")
        overrides = translated_options({name.strip(): _value(value.strip()) for name, value in pairs})
        schemes.append(
            LayerScheme(pattern=pattern, scheme=scheme_of(into=format, **merged_options(options, overrides)))
        )
    return tuple(schemes)


def _value(text: str) -> Any:
    """Return the number, boolean or None that a text stands for, or else the text."""
    try:
        return None if text == "none" else json.loads(text)
    except ValueError:
        return text

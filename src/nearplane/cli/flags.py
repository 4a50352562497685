"""The flags of `nearplane quantize` that make up a recipe: which of its fields are flags, in which group they are shown.

The fields themselves, their types and defaults, are those of `schemes.py` and `recipe.py`; what is no flag is for Python.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, field, fields, make_dataclass
from itertools import combinations
from typing import Annotated, Any, get_type_hints

from cyclopts import Group, Parameter

from nearplane.errors import RecipeError
from nearplane.recipe.recipe import Calibration, LayerScheme, changed, chosen
from nearplane.recipe.scheme import names_of
from nearplane.recipe.schemes import AnyScheme, BlockScheme, GridScheme, RateScheme, scheme_of

EVERYDAY = Group("Everyday", sort_key=1)
RATES = Group("Entropy-coded, instead of --bits", sort_key=2)
LLAMA = Group("GGUF, for llama.cpp", sort_key=3)
TEXT = Group("Calibration text", sort_key=4)
LAYERS = Group("Layer by layer", sort_key=5)
SOLVING = Group("Solving: the defaults measured best", sort_key=6)
RUNNING = Group("Running", sort_key=7)
GROUPS = {  # of every field that is a flag
    "grid": EVERYDAY,
    "embeddings": EVERYDAY,
    "bits": EVERYDAY,
    "group_size": EVERYDAY,
    "symmetric": EVERYDAY,
    "rate": RATES,
    "size": RATES,
    "include_head": RATES,
    "include_embeddings": RATES,
    "calibration": TEXT,
    "samples": TEXT,
    "seqlen": TEXT,
    "rare_experts": TEXT,
    "solver": SOLVING,
    "beam": SOLVING,
    "polish": SOLVING,
    "rounds": SOLVING,
    "order": SOLVING,
    "damp": SOLVING,
    "correct": SOLVING,
}


def flags_of(part: type, but: str | None = None) -> type:
    """Return a dataclass of those fields of a part of a recipe that are flags, each in its group, `but` one."""
    hints = get_type_hints(part)
    chosen_fields = []
    for each in sorted(fields(part), key=lambda f: list(GROUPS).index(f.name) if f.name in GROUPS else 0):
        if each.name in GROUPS and each.name != but:
            default = field(default=None if each.default is MISSING else each.default, kw_only=True)
            parameter = Parameter(group=GROUPS[each.name], help=help_of(part, each.name))
            chosen_fields.append((each.name, Annotated[hints[each.name], parameter], default))
    made = make_dataclass(part.__name__, chosen_fields, frozen=True, kw_only=True)
    made.__module__ = __name__  # else cyclopts takes it for a type of the language
    return made


def help_of(part: type, name: str) -> str:
    """Return what the docstring of a dataclass, or of one that it derives from, says of a field."""
    for each in part.__mro__:
        lines = (each.__doc__ or "").split("Args:")[-1].splitlines()
        for index, line in enumerate(lines):
            if line.strip().startswith(f"{name}: "):
                more = []
                for after in lines[index + 1 :]:
                    if not after.startswith(" " * 12):
                        break
                    more.append(after.strip())
                return " ".join([line.strip().removeprefix(f"{name}: "), *more])
    raise AssertionError(f"{part.__name__}.{name} is not explained in its docstring")


GridFlags = flags_of(GridScheme, but="grid")  # which `scheme_of` understands for all
BlockFlags, RateFlags = flags_of(BlockScheme), flags_of(RateScheme)
CalibrationFlags = flags_of(Calibration)
KINDS = {
    GridFlags: "for weights on a fixed grid",
    BlockFlags: "for weights on a grid that it names",
    RateFlags: "for entropy-coded weights, which have none",
}


def refuse_mixed(words: Sequence[str]) -> None:
    """Refuse a command line with flags of two kinds of scheme.

    Raises:
        RecipeError: it has both.
    """
    given = [word.split("=")[0].replace("--no-", "--") for word in words]
    for first, second in combinations(KINDS, 2):
        one, other = (
            next((word for word in given if word in {f"--{name.replace('_', '-')}" for name in alone}), None)
            for alone in (names_of(first) - names_of(second), names_of(second) - names_of(first))
        )
        if one is not None and other is not None:
            raise RecipeError(f"{one} is {KINDS[first]}, {other} {KINDS[second]}: leave out one of them.")


def scheme_from(flags: Any, *, format: str | None = None, allocate: str | None = None) -> AnyScheme:
    """Return the scheme that flags stand for; None is the default."""
    return scheme_of(into=format, spread=allocate, **_given(flags))


def _given(flags: Any) -> dict[str, Any]:
    """Return what flags say that is not the default: several kinds of scheme have the others."""
    if flags is None:
        return {}
    return {each.name: value for each in fields(flags) if (value := getattr(flags, each.name)) != each.default}


def layer_schemes(texts: Sequence[str], flags: Any, *, format: str | None = None) -> tuple[LayerScheme, ...]:
    """Return the schemes of `--layer 'PATTERN=NAME:VALUE,NAME:VALUE'`, which change what the flags say for all layers.

    Raises:
        RecipeError: a text is not of this form, or a name or value means nothing.
    """
    options = _given(flags)
    found = []
    for text in texts:
        pattern, _, changes = text.rpartition("=")
        pairs = [change.split(":", 1) for change in changes.split(",")]
        if not pattern or not all(len(pair) == 2 for pair in pairs):
            raise RecipeError(f"--layer {text!r} is no scheme for layers; expected for instance 'down_proj=bits:4'.")
        own = chosen({name.strip(): _value(value.strip()) for name, value in pairs})
        found.append(LayerScheme(pattern=pattern, scheme=scheme_of(into=format, **changed(options, own))))
    return tuple(found)


def _value(text: str) -> Any:
    """Read a number, true, false or none; anything else is a word."""
    try:
        return None if text == "none" else json.loads(text)
    except ValueError:
        return text

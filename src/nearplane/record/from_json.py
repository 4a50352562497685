"""Reading of JSON as dataclasses, with every field checked against its annotation. Needs no torch."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from nearplane.errors import NearplaneError

WORDS = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false", NoneType: "null"}


def annotated(kind: Any, value: Any, where: str) -> Any:
    """Return a JSON value as a value of an annotation.

    Args:
        kind: The annotation: dataclasses, tuples of one kind, dict[str, str], or a kind of `_fits`.
        value: The JSON value.
        where: Place of the value in messages.

    Raises:
        ValueError: The value does not fit; the message says where, what was found and what was expected.
    """
    parts, origin = get_args(kind), get_origin(kind)
    if origin in (Union, UnionType) and is_dataclass(parts[0]) and isinstance(value, dict):
        kinds: list[Any] = [part for part in parts if is_dataclass(part)]
        kind = max(kinds, key=lambda part: len(value.keys() & _hints(part).keys()))  # most fields in common
    if is_dataclass(kind) and isinstance(value, dict):
        return _object(kind, value, where)
    if origin is tuple and isinstance(value, list) and (parts[-1] is ... or len(value) == len(parts)):
        return tuple(annotated(parts[0], part, f"{where}[{index}]") for index, part in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: annotated(parts[1], part, f"{where}[{key!r}]") for key, part in value.items()}
    if is_dataclass(kind) or origin in (tuple, dict) or not _fits(kind, value):
        text = json.dumps(value)
        raise ValueError(f"{where} is {text[:40]}{'..' if len(text) > 40 else ''}, expected {_expected(kind)}")
    return value


def _object(kind: Any, value: dict[str, Any], where: str) -> Any:
    """Return a JSON object as a dataclass."""
    title = value.get("name", value.get("layer"))
    of = f" of {title}" if isinstance(title, str) else "" if where == "record" else f" of {where}"
    hints = _hints(kind)
    if unknown := value.keys() - hints.keys():
        raise ValueError(f"{min(unknown)}{of} is not a field of this version")
    for each in fields(kind):
        if each.name not in value and each.default is each.default_factory is MISSING:
            raise ValueError(f"{each.name}{of} is missing")
    values = {name: annotated(hints[name], part, f"{name}{of}") for name, part in value.items()}
    try:
        return kind(**values)
    except (NearplaneError, OverflowError) as error:
        raise ValueError(f"{where}: {error}") from error


@cache
def _hints(kind: type) -> dict[str, Any]:
    return {each.name: get_type_hints(kind)[each.name] for each in fields(kind)}


def _fits(kind: Any, value: Any) -> bool:
    """Return whether a value is a finite number (integers: 64 bits), text, a truth value, null, or one of several."""
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(part, value) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and -(2**63) <= value < 2**63
    return isinstance(value, kind) and (kind is not float or math.isfinite(value))


def _expected(kind: Any) -> str:
    """Return the description of an annotation for messages."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(dict.fromkeys(_expected(part) for part in get_args(kind)))
    if get_origin(kind) is Literal:
        return " or ".join(repr(word) for word in get_args(kind))
    return WORDS.get(kind, "a list" if get_origin(kind) is tuple else "an object")

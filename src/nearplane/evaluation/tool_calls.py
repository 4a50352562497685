"""Calls of tools in an answer: JSON objects with a name and arguments, whatever markup stands around them. Needs no torch."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

ARGUMENTS = ("arguments", "parameters")  # names of the field with a call's arguments, by model


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


def calls(answer: str) -> list[Call]:
    """Return the calls of tools in an answer; those that do not parse are left out."""
    decoder, found, place = json.JSONDecoder(), list[Call](), answer.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(answer, place)
        except (ValueError, RecursionError):
            call = None
        else:
            call = _call(value)
        if call is not None:
            found.append(call)
        place = answer.find("{", place + 1 if call is None else end)  # one may begin within what is none
    return found


def _call(value: object) -> Call | None:
    """Return the call that a JSON value is: an object with a name and an object of arguments, or the JSON of one."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = next((value[name] for name in ARGUMENTS if name in value), None)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return None
    return Call(value["name"], given) if isinstance(given, dict) else None

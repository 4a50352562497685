"""Calls of tools in an answer, in whatever markup a model writes them: JSON objects with a name and arguments. Needs no torch."""

from __future__ import annotations

import json
from typing import Any

ARGUMENTS = ("arguments", "parameters")  # names of the field with a call's arguments, by model


def calls(answer: str) -> list[dict[str, Any]]:
    """Return the calls of tools in an answer, each an object with a name and arguments; those that do not parse are left out."""
    decoder, found, place = json.JSONDecoder(), list[dict[str, Any]](), answer.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(answer, place)
        except (ValueError, RecursionError):
            end = place + 1  # perhaps one begins within
        else:
            inner = value.get("function", value)  # {"type": "function", "function": {..}}
            if is_call(inner):
                found.append(inner)
        place = answer.find("{", end)
    return found


def is_call(value: object) -> bool:
    """Return whether a JSON value is a call: an object with a name and an object of arguments, or the JSON of one."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    given = next((value[name] for name in ARGUMENTS if name in value), None)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return False
    return isinstance(given, dict)

"""JSON as dataclasses: values of the annotated kinds, or a message that says where, what was found and what was expected."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from nearplane.errors import RecipeError
from nearplane.record.from_json import annotated


@dataclass(frozen=True)
class Small:
    name: str
    size: int | None = None
    mode: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Other:
    name: str
    rate: float = 1.0

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise RecipeError("rate is negative.")


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (Small, {"name": "x", "size": None, "mode": "b"}, Small("x", None, "b")),
        (Small | Other, {"name": "x", "rate": 2}, Other("x", 2)),
        (tuple[Small, ...], [{"name": "x"}, {"name": "y"}], (Small("x"), Small("y"))),
        (tuple[float, float], [1, 2.5], (1, 2.5)),
        (dict[str, str], {"a": "b"}, {"a": "b"}),
        (bool | None, None, None),
    ],
)
def test_values_of_the_annotated_kind_are_taken(kind: Any, value: object, expected: object) -> None:
    assert annotated(kind, value, "record") == expected


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (Small, {"name": "x", "new": 1}, "new of x is not a field of this version"),
        (Small, {}, "name is missing"),
        (Small, {"name": "x", "size": True}, "size of x is true, expected a whole number or null"),
        (Small, {"name": "x", "mode": "c"}, "mode of x is \"c\", expected 'a' or 'b'"),
        (tuple[int, ...], [1, 2.5], r"record[1] is 2.5, expected a whole number"),
        (tuple[int, int], [1], "record is [1], expected a list"),
        (dict[str, str], {"a": 1}, "record['a'] is 1, expected text"),
        (float, float("nan"), "record is NaN, expected a finite number"),
        (int, 2**63, "expected a whole number"),
        (bool, "x" * 50, f'record is "{"x" * 39}.., expected true or false'),
        (Other, {"name": "x", "rate": -1.0}, "record: rate is negative."),
    ],
)
def test_others_are_refused_by_their_place(kind: Any, value: object, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        annotated(kind, value, "record")

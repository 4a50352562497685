"""Which cases of a test `make test` runs, and which `make nightly` adds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def daily(values: Iterable[Any], chosen: Iterable[Any]) -> list[Any]:
    """Return all values as parameters: those that are chosen, and the others for `make nightly` alone."""
    chosen = set(chosen)
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.nightly) for value in values]


def daily_of_several(values: Iterable[tuple[Any, ...]], chosen: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return the same of tuples that are the values of several parameters."""
    chosen = set(chosen)
    return [value if value in chosen else pytest.param(*value, marks=pytest.mark.nightly) for value in values]

"""Which cases of a test `make test` runs, and which `make nightly` adds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def daily(values: Iterable[Any], chosen: Iterable[Any]) -> list[Any]:
    """Return all values, tuples of several parameters among them: the chosen ones, and the others for `make nightly` alone."""
    chosen = set(chosen)
    return [
        value
        if value in chosen
        else pytest.param(*(value if isinstance(value, tuple) else [value]), marks=pytest.mark.nightly)
        for value in values
    ]

"""Which library multiplied float32 matrices on the CPU, as data. Needs no torch; `matmul_library.py` makes the choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Library = Literal["default", "onednn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """The library of a run, and how exact the products were that were tried.

    Args:
        library: torch's default (MKL in most builds), or oneDNN.
        errors: the largest error of a product that was tried, relative to float64, by library.
    """

    library: Library = "default"
    errors: dict[Library, float]

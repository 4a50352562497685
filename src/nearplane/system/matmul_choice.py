"""Record of the library that multiplied float32 matrices on the CPU; `matmul_library.py` chooses it. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Library = Literal["default", "onednn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Matrix library of a run, and the errors of its trial products.

    Args:
        library: Library of the run: torch's default (MKL in most builds) or oneDNN.
        errors: Largest relative error of a trial product against float64, by library.
    """

    library: Library = "default"
    errors: dict[Library, float]

"""Products of matrices that have the same bits from any number of threads. Needs no torch."""

from __future__ import annotations

import os

STRICT = ("MKL_CBWR", "AUTO,STRICT")  # environment variable of MKL, and its mode


def repeatable_products() -> None:
    """Ask MKL for products that do not depend on the number of threads; a mode that the user has set stays.

    On processors with AVX-512, MKL 2024.2 (in torch 2.13) divides the sums of some float64 products among threads, as (116, 308)
    times (308, 192). It reads the variable when it first computes in a process, and later calls are without effect.
    """
    os.environ.setdefault(*STRICT)

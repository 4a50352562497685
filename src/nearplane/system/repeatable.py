"""Products of matrices that have the same bits from any number of threads. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path

STRICT = ("MKL_CBWR", "AUTO,STRICT")  # environment variable of MKL, and its mode
PROCESSORS = Path("/proc/cpuinfo")  # of Linux
WIDE = "avx512f"  # how it names processors with AVX-512


def repeatable_products() -> None:
    """Ask MKL for products that do not depend on the number of threads, where it needs that; a mode that the user has set stays.

    On processors with AVX-512, MKL 2024.2 (in torch 2.13) divides the sums of some float64 products among threads, as (116, 308)
    times (308, 192). On an AMD EPYC without AVX-512 it does so if it is asked for these products, and not by itself. It reads
    the variable when it first computes in a process, and later calls are without effect.
    """
    if divides_sums():
        os.environ.setdefault(*STRICT)


def divides_sums() -> bool:
    """Return whether MKL divides sums among threads by itself: with AVX-512, and where the processor is not known."""
    try:
        return WIDE in PROCESSORS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True

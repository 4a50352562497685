"""Entropy-coded matrices to load."""

from __future__ import annotations

import numpy as np

from nearplane.coding.blob import Contents
from nearplane.coding.scales import Scales, stored_base


def contents(out: int, columns: int, *, spread: float = 1.5, outliers: int = 0, seed: int = 0) -> Contents:
    """Return Gaussian codes whose spread follows the column, with some codes that no byte holds."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(-6, 7, columns).astype(np.int32)
    rows = rng.integers(-1, 2, out).astype(np.int32)
    codes = np.round(rng.normal(size=(out, columns)) * spread * 2.0 ** (-exponents / 4)).astype(np.int32)
    for _ in range(outliers):
        codes[rng.integers(out), rng.integers(columns)] = rng.choice([-(2**20), 40, 129, -129, 3000])
    scales = Scales(base=stored_base(0.01), columns=exponents, column_resolution=4, rows=rows, row_resolution=1)
    return Contents(codes=codes, scales=scales)

"""Sums and decompositions whose last bits do not depend on how many threads compute: the same command gives the same bytes.

torch splits a sum over all entries of a large tensor among its threads, MKL decompositions and triangular solves; they then add
in another order.
Products of matrices and sums along one dimension are the same for any number (measured with torch 2.13; a test keeps to it).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

BLOCK = 96  # rows of a triangle that one thread solves
SERIAL = 1 << 14  # entries that torch sums in one thread, whatever their number


@contextmanager
def one_thread() -> Iterator[None]:
    """Let this thread's tensors be computed by one thread inside: for decompositions of small matrices, or of rare ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def triangular(A: Tensor, B: Tensor, *, upper: bool, unit: bool = False) -> Tensor:
    """Return (n, m) the solution X of `A X = B`.

    By blocks of `BLOCK` rows: what is solved already is a product, which all threads share; the triangle is small.

    Args:
        A: (n, n) triangular; what is on the other side of its diagonal is not looked at.
        B: (n, m).
        upper: whether it is upper triangular.
        unit: whether its diagonal counts as 1.
    """
    X, n = torch.empty_like(B), len(A)
    starts = range(0, n, BLOCK)
    for a in reversed(starts) if upper else starts:
        b = min(a + BLOCK, n)
        known = slice(b, n) if upper else slice(0, a)
        rest = torch.addmm(B[a:b], A[a:b, known], X[known], alpha=-1) if known.start < known.stop else B[a:b]
        with one_thread():
            X[a:b] = torch.linalg.solve_triangular(A[a:b, a:b], rest, upper=upper, unitriangular=unit)
    return X


def total(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return () the sum of all entries of a tensor of any shape, taken in `dtype`."""
    sums = x.reshape(-1)
    while len(sums) > SERIAL:
        whole = len(sums) // SERIAL * SERIAL
        rows, rest = sums[:whole].view(-1, SERIAL), sums[whole:]
        sums = torch.cat([rows.sum(1, dtype=dtype), rest.sum(dtype=dtype)[None]])
    return sums.sum(dtype=dtype)

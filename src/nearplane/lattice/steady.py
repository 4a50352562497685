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

    By halves down to `BLOCK` rows: what the half that is solved adds to the other is a product, which all threads share.

    Args:
        A: (n, n) triangular; what is on the other side of its diagonal is not looked at.
        B: (n, m).
        upper: whether it is upper triangular.
        unit: whether its diagonal counts as 1.
    """
    X = B.clone()
    _solve(A, X, upper, unit)
    return X


def _solve(A: Tensor, X: Tensor, upper: bool, unit: bool) -> None:
    n = len(A)
    if n <= BLOCK:
        with one_thread():
            X.copy_(torch.linalg.solve_triangular(A, X, upper=upper, unitriangular=unit))
        return
    half = -(-n // 2 // BLOCK) * BLOCK
    first, second = (slice(half, n), slice(0, half)) if upper else (slice(0, half), slice(half, n))
    _solve(A[first, first], X[first], upper, unit)
    X[second].addmm_(A[second, first], X[first], alpha=-1)
    _solve(A[second, second], X[second], upper, unit)


def total(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return () the sum of all entries of a tensor of any shape, taken in `dtype`."""
    sums = x.reshape(-1)
    while len(sums) > SERIAL:
        whole = len(sums) // SERIAL * SERIAL
        rows, rest = sums[:whole].view(-1, SERIAL), sums[whole:]
        sums = torch.cat([rows.sum(1, dtype=dtype), rest.sum(dtype=dtype)[None]])
    return sums.sum(dtype=dtype)

"""The sweep of a block of columns on the CPU in float32, compiled by Numba; `solve.py` has the same algorithm in torch.

Rows are independent, so they are taken in strips that fit the cache: a strip goes through all columns of the block before
the next one starts. Threads share the rows and never wait for each other. The first call compiles, later runs load that.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]

STRIP = 256  # rows; a strip's errors, STRIP * block * 4 bytes, stay in the second-level cache
TERMS = 8  # products summed before a target goes back to memory


def sweep_block(
    target: Tensor, W: Tensor, scale: Tensor, zero: Tensor, group: Tensor, low: int | None, high: int | None,
    U: Tensor, codes: Tensor, E: Tensor, *, threads: int | None = None,
) -> None:  # fmt: skip
    """Sweep one block of columns, columns first; fills `codes` and `E`.

        t_j = target_j + sum_{k<j} E_k U_kj
        codes_j = clip(round(t_j / scale_j + zero_j)) ;  E_j = W_j - scale_j (codes_j - zero_j)

    Equal to `sweep_block_torch` but for the order in which the sum is taken.

    Args:
        target: (b, out) weights with the error of earlier blocks fed forward.
        W: (b, out) weights.
        scale, zero: (groups, out).
        group: (b,) group of every column of the block, int64.
        low, high: limits of the codes, inclusive; None where codes are unbounded.
        U: (b, b) the block's own triangle, unit upper.
        codes: (b, out) int32, written.
        E: (b, out) written.
        threads: None takes as many as torch does.
    """
    b, out = W.shape
    UT = U.new_zeros(b, -(-b // TERMS) * TERMS)  # (b, b padded): row j holds what column j needs
    UT[:, :b] = U.T
    arrays = [x.contiguous().numpy() for x in (target, W, scale, zero, group)]
    limits = np.float32(-np.inf if low is None else low), np.float32(np.inf if high is None else high)
    arguments: list[Any] = [*arrays, *limits, UT.numpy(), codes.numpy(), E.numpy()]
    threads = threads or torch.get_num_threads()
    share = -(-out // (16 * threads)) * 16  # rows of one thread, whole cache lines
    if share >= out:
        _sweep_rows(0, out, *arguments)
        return
    with ThreadPoolExecutor(threads) as pool:
        for part in [pool.submit(_sweep_rows, a, min(a + share, out), *arguments) for a in range(0, out, share)]:
            part.result()


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _feed(t: Floats, e: Floats, u: Floats, j: int) -> None:
    """Add to the targets `t` of column j what the columns before it did wrong. Rows of `e` from j on are 0."""
    for k in range(0, j, TERMS):
        for r in range(t.shape[0]):
            x = t[r]
            for i in range(TERMS):
                x += e[k + i, r] * u[k + i]
            t[r] = x


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _round(
    t: Floats, w: Floats, scale: Floats, zero: Floats, low: float, high: float, codes: Integers, E: Floats, e: Floats
) -> None:
    """Round one column of a strip. No fused products here: values are exactly those that the codes decode to."""
    for r in range(t.shape[0]):
        code = np.rint(t[r] / scale[r] + zero[r])
        code = low if code < low else code  # not min(): NaN stays NaN, and the loop stays free of branches
        code = high if code > high else code
        codes[r] = np.int32(code)
        E[r] = e[r] = w[r] - scale[r] * (code - zero[r])


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _sweep_rows(
    start: int, stop: int, target: Floats, W: Floats, scale: Floats, zero: Floats, group: Indices, low: float, high: float,
    UT: Floats, codes: Integers, E: Floats,
) -> None:  # fmt: skip
    """Sweep the rows from `start` to `stop`, strip by strip."""
    width = min(STRIP, stop - start)
    t = np.zeros(width, np.float32)
    e = np.empty((UT.shape[1], width), np.float32)
    for a in range(start, stop, width):
        c = min(a + width, stop)
        for k in range(e.shape[0]):
            for r in range(width):
                e[k, r] = 0
        for j in range(W.shape[0]):
            g = group[j]
            for r in range(a, c):
                t[r - a] = target[j, r]
            _feed(t, e, UT[j], j)
            _round(t[: c - a], W[j, a:c], scale[g, a:c], zero[g, a:c], low, high, codes[j, a:c], E[j, a:c], e[j])

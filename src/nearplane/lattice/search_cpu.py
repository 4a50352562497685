"""The search for steps on the CPU in float32, compiled by Numba. `scale.py` holds the same search in torch.

Every group tries every candidate step on its own; threads take groups without waiting for each other.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]


def best_candidate(
    weights: Tensor,
    scale: Tensor,
    zero: Tensor,
    low: int,
    high: int,
    importance: Tensor | None,
    *,
    threads: int | None = None,
) -> Tensor:
    """Return (n,) the first candidate with the least error in every group.

        error = sum_k importance_k |e_k|^p,  e = weights - scale (codes - zero),  p = 2 with importance and 2.5 without

    Args:
        weights: (n, g) float32.
        scale, zero: (candidates, n) float32.
        low, high: limits of the codes.
        importance: (n or 1, g) float32, or None.
        threads: None takes as many as torch does.
    """
    n = len(weights)
    weight = torch.ones(1, 1) if importance is None else importance
    arrays = [x.contiguous().numpy() for x in (weights, scale.T, zero.T, weight)]
    best = torch.empty(n, dtype=torch.int64)
    limits = np.float32(low), np.float32(high)
    kernel: Any = _search
    search = partial(kernel, *arrays, *limits, importance is not None, best.numpy())
    threads = threads or torch.get_num_threads()
    share = -(-n // threads)
    if share * weights.shape[1] < 10_000:
        search(0, n)
        return best
    with ThreadPoolExecutor(threads) as pool:
        for part in [pool.submit(search, a, min(a + share, n)) for a in range(0, n, share)]:
            part.result()
    return best


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
def _weighted(w: Floats, s: float, z: float, low: float, high: float, importance: Floats) -> np.float32:
    total = np.float32(0)
    for k in range(w.shape[0]):
        code = min(max(np.rint(w[k] / s + z), low), high)
        e = w[k] - s * (code - z)
        total += importance[k] * e * e
    return total


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
def _plain(w: Floats, s: float, z: float, low: float, high: float) -> np.float32:
    total = np.float32(0)
    for k in range(w.shape[0]):
        code = min(max(np.rint(w[k] / s + z), low), high)
        e = np.abs(w[k] - s * (code - z))
        total += e * e * np.sqrt(e)
    return total


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _search(
    weights: Floats, scale: Floats, zero: Floats, importance: Floats, low: float, high: float, weighted: bool, best: Indices,
    start: int, stop: int,
) -> None:  # fmt: skip
    """Search the groups from `start` to `stop`."""
    for i in range(start, stop):
        least = np.float32(np.inf)
        best[i] = 0
        for c in range(scale.shape[1]):
            if weighted:
                row = importance[i % importance.shape[0]]
                error = _weighted(weights[i], scale[i, c], zero[i, c], low, high, row)
            else:
                error = _plain(weights[i], scale[i, c], zero[i, c], low, high)
            if error < least:
                least = error
                best[i] = c

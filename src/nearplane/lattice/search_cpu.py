"""The search for steps on the CPU in float32, compiled by Numba. `kernels_torch.py` holds the same search in torch.

Every group tries every candidate step on its own; threads take groups without waiting for each other.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nearplane.lattice import kernels_torch
from nearplane.lattice.codebook import Codebook, Table, position_of, round_code, round_integer

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]


class Groups(NamedTuple):
    """What the kernel searches.

    Args:
        weights: (n, g).
        scale, zero: (n, candidates).
        table: of all groups.
    """

    weights: Floats
    scale: Floats
    zero: Floats
    table: Table


def best_candidate(
    weights: Tensor,
    scale: Tensor,
    zero: Tensor,
    codebook: Codebook,
    *,
    threads: int | None = None,
) -> Tensor:
    """Return (n,) the first candidate with the least error in every group.

        error = sum_k |e_k|^2.5,  e = weights - scale (codes - zero)

    Args:
        weights: (n, g); other dtypes than float32 are left to torch.
        scale, zero: (candidates, n).
        codebook: of all groups.
        threads: None takes as many as torch does.
    """
    if weights.dtype != torch.float32:
        return kernels_torch.best_candidate(weights, scale, zero, codebook)
    n = len(weights)
    w, s, z = (x.contiguous().numpy() for x in (weights, scale.T, zero.T))
    groups = Groups(w, s, z, codebook.table(weights.dtype))
    best = torch.empty(n, dtype=torch.int64)
    kernel: Any = _search
    search = partial(kernel, groups, best.numpy())
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
def _plain(w: Floats, s: float, z: float, low: float, high: float) -> np.float32:
    total = np.float32(0)
    for k in range(w.shape[0]):
        e = np.abs(w[k] - s * (round_integer(w[k] / s + z, low, high) - z))
        total += e * e * np.sqrt(e)
    return total


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _on_levels(w: Floats, s: float, z: float, table: Table) -> np.float32:
    total = np.float32(0)
    for k in range(w.shape[0]):
        e = np.abs(w[k] - s * (position_of(round_code(w[k] / s + z, table), table) - z))
        total += e * e * np.sqrt(e)
    return total


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _search(groups: Groups, best: Indices, start: int, stop: int) -> None:
    """Search the groups from `start` to `stop`."""
    weights, scale, zero, table = groups
    for i in range(start, stop):
        least = np.float32(np.inf)
        best[i] = 0
        for c in range(scale.shape[1]):
            w, s, z = weights[i], scale[i, c], zero[i, c]
            if len(table.levels) > 0:
                error = _on_levels(w, s, z, table)
            else:
                error = _plain(w, s, z, table.low, table.high)
            if error < least:
                least = error
                best[i] = c

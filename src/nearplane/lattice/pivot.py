"""The pivoted rounding order: at each elimination step the smallest remaining Schur complement goes first.

The column eliminated last is rounded first (Chen, Hoefler, Alistarh 2025, Algorithm 4). This is LAPACK's `pstrf` with
the smallest instead of the largest pivot, blocked the same way: nearly all of the work is matrix products.
"""

from __future__ import annotations

import torch
from torch import Tensor

UPDATED_ROWS = 512  # of the lower triangle by one product


def pivoted_order(H: Tensor, *, panel: int = 64) -> Tensor:
    """Return the rounding order (in,) by minimal pivots: `pivoted` without the pivots."""
    return pivoted(H, panel=panel)[0]


def pivoted(H: Tensor, *, panel: int = 64) -> tuple[Tensor, Tensor]:
    """Return the rounding order (in,) by minimal pivots, of equal ones the lowest index first, and the pivots (in,) in that order.

        S = H ;  k_i = argmin_k S_kk over the columns left ;  S -= S_{:,k} S_{k,:} / S_kk ;  p = (k_n, ..., k_1)

    The pivots are the squared lengths `d` of `factor.py` in that order. One that is only rounding error (`H` is singular) is passed
    over without an update: `p` is a permutation always.

    Args:
        H: (in, in) symmetric, finite, on any device; the order is computed in its dtype.
        panel: columns eliminated between two updates of the remaining matrix.
    """
    n = len(H)
    S = H.clone()  # (left, left) Schur complement as of the last update, lower triangle
    left = torch.arange(n, device=H.device)  # (left,) the columns that S holds, ascending
    floor = torch.finfo(H.dtype).eps * H.diagonal()
    diagonal = H.diagonal().clone()  # (left,) of the Schur complement as of the last pivot; infinite where eliminated
    order, pivots = torch.empty(n, dtype=torch.long, device=H.device), torch.empty_like(floor)
    for start in range(0, n, panel):
        if len(left) - (n - start) > len(left) // 4:  # dropping what is eliminated costs a copy: not at every panel
            kept = torch.isfinite(diagonal).nonzero()[:, 0]
            left, diagonal, S = left[kept], diagonal[kept], S[kept[:, None], kept]
        picked, L = _eliminate(S, diagonal, floor[left], pivots[start : start + panel])
        order[start : start + panel] = left[picked]
        for a in range(0, len(left), UPDATED_ROWS):
            b = a + UPDATED_ROWS
            S[a:b, :b].addmm_(L[:, a:b].T, L[:, :b], alpha=-1)
    return order.flip(0), pivots.flip(0)


def _eliminate(S: Tensor, diagonal: Tensor, floor: Tensor, pivots: Tensor) -> tuple[Tensor, Tensor]:
    """Eliminate the smallest pivots one by one. Updates `diagonal`, fills `pivots` (steps,); `S` is due for `S -= L^T L`.

    Returns:
        Where the pivots were (steps,), and L (steps, left).
    """
    steps = len(pivots)
    L = S.new_zeros(steps, len(S))
    picked = torch.empty(steps, dtype=torch.long, device=S.device)
    index = torch.arange(len(S), device=S.device)
    for i in range(steps):
        k = diagonal.argmin(keepdim=True)  # (1,), never read back: no step waits for the device
        column = torch.where(index < k, S.index_select(0, k)[0], S.index_select(1, k)[:, 0])  # (left,)
        column = torch.addmv(column, L[:i].T, L[:i].index_select(1, k)[:, 0], alpha=-1)
        L[i] = torch.where(diagonal[k] > floor[k], column / diagonal[k].sqrt(), 0)
        pivots[i : i + 1] = diagonal[k]
        diagonal -= L[i].square()
        diagonal.index_fill_(0, k, torch.inf)
        picked[i : i + 1] = k
    return picked, L

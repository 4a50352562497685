"""The pivoted rounding order: at each elimination step the smallest remaining Schur complement goes first.

The column eliminated last is rounded first (Chen, Hoefler, Alistarh 2025, Algorithm 4). This is LAPACK's `pstrf` with the
smallest instead of the largest pivot, blocked the same way, so that nearly all of the work is matrix products.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pivoted_order(H: Tensor, *, panel: int = 64) -> Tensor:
    """Return the rounding order (in,) by minimal pivots: eliminate the smallest, round it last; ties go to the lower index.

        k_i = argmin_{k left} S_kk ;  S -= S_{:,k} S_{k,:} / S_kk        S = H at first;  p = (k_n, ..., k_1)

    Args:
        H: (in, in) symmetric positive definite, on any device; the order is computed in its dtype.
        panel: columns eliminated between two updates of the remaining matrix.
    """
    n = len(H)
    S = H  # (left, left) Schur complement as of the last update
    left = torch.arange(n, device=H.device)  # (left,) columns that S holds, ascending
    diagonal = H.diagonal().clone()  # (left,) up to date; infinite where eliminated
    order = torch.empty(n, dtype=torch.long, device=H.device)
    gone = 0  # columns in S that are eliminated already
    for start in range(0, n, panel):
        stop = min(start + panel, n)
        if gone > len(left) // 8:
            kept = torch.isfinite(diagonal).nonzero()[:, 0]
            left, diagonal, S, gone = left[kept], diagonal[kept], S[kept][:, kept], 0
        picked, L = _eliminate(S, diagonal, stop - start)
        order[start:stop] = left[picked]
        S = torch.addmm(S, L.T, L, alpha=-1) if S is H else S.addmm_(L.T, L, alpha=-1)
        gone += stop - start
    return order.flip(0)


def _eliminate(S: Tensor, diagonal: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Eliminate the smallest pivots one by one; updates `diagonal`, leaves `S` alone.

    Returns:
        The pivots (steps,), and L (steps, left), by which the update of the whole is `S - L^T L`.
    """
    L = S.new_zeros(steps, len(S))
    picked = torch.empty(steps, dtype=torch.long, device=S.device)
    for i in range(steps):
        k = diagonal.argmin(keepdim=True)  # (1,), never read back: no step waits for the device
        column = torch.addmv(S.index_select(0, k)[0], L[:i].T, L[:i].index_select(1, k)[:, 0], alpha=-1)  # (left,)
        L[i] = column / diagonal[k].sqrt()
        diagonal -= L[i].square()
        diagonal.index_fill_(0, k, torch.inf)
        picked[i : i + 1] = k
    return picked, L

"""Rounding order by minimal pivots (`--order pivoted`), which needs the whole Hessian instead of its diagonal."""

from __future__ import annotations

import torch
from torch import Tensor

UPDATED_ROWS = 512  # of the remaining matrix, updated by one product


def pivoted_order(H: Tensor, *, panel: int = 64) -> Tensor:
    """Return the rounding order (in,) by minimal pivots; of equal pivots the lowest index is eliminated first.

        S = H ;  k_i = argmin_k S_kk over the columns left ;  S -= S_{:,k} S_{k,:} / S_kk ;  p = (k_n, ..., k_1)

    The column eliminated last is rounded first (Chen, Hoefler, Alistarh 2025, Algorithm 4). This is LAPACK's `pstrf`
    with the smallest instead of the largest pivot, blocked the same way: nearly all of the work is matrix products. A
    pivot that is only rounding error (`H` is singular) causes no update, so that `p` is always a permutation.

    Args:
        H: (in, in) symmetric, finite, on any device; the order is computed in its dtype.
        panel: Number of columns eliminated between two updates of the remaining matrix.
    """
    n = len(H)
    S = H.clone()  # (left, left) Schur complement after the last update, lower triangle
    left = torch.arange(n, device=H.device)  # (left,) the columns that S holds, ascending
    floor = torch.finfo(H.dtype).eps * H.diagonal()
    diagonal = H.diagonal().clone()  # (left,) of the Schur complement after the last pivot; infinite where eliminated
    order = torch.empty(n, dtype=torch.long, device=H.device)
    for start in range(0, n, panel):
        if len(left) - (n - start) > len(left) // 4:  # dropping eliminated columns costs a copy, so not at every panel
            active = torch.isinf(diagonal).to(torch.uint8).argsort(stable=True)[: n - start]
            left, diagonal, S = left[active], diagonal[active], S[active[:, None], active]
        picked, L = _eliminate(S, diagonal, floor[left], min(panel, n - start))
        order[start : start + panel] = left[picked]
        for a in range(0, len(left), UPDATED_ROWS):
            b = a + UPDATED_ROWS
            S[a:b, :b].addmm_(L[:, a:b].T, L[:, :b], alpha=-1)
    return order.flip(0)


def _eliminate(S: Tensor, diagonal: Tensor, floor: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Eliminate the smallest pivots one by one. Updates `diagonal`; the caller updates `S -= L^T L`.

    Returns:
        The positions (steps,) of the pivots in `S`, and L (steps, left).
    """
    L = S.new_zeros(steps, len(S))
    picked = torch.empty(steps, dtype=torch.long, device=S.device)
    index = torch.arange(len(S), device=S.device)
    for i in range(steps):
        k = diagonal.argmin(keepdim=True)  # (1,), kept on the device: reading it back would make every step wait
        column = torch.where(index < k, S.index_select(0, k)[0], S.index_select(1, k)[:, 0])  # (left,)
        column = torch.addmv(column, L[:i].T, L[:i].index_select(1, k)[:, 0], alpha=-1)
        L[i] = torch.where(diagonal[k] > floor[k], column / diagonal[k].sqrt(), 0)
        diagonal -= L[i].square()
        diagonal.index_fill_(0, k, torch.inf)
        picked[i : i + 1] = k
    return picked, L

"""What a layer should multiply to when the layers before it are already quantized.

The network upstream is quantized, so the layer really sees `X_hat`, while its target is `X W^T` of the original network.
Minimising `||X W^T + r - X_hat values^T - r_hat||^2` moves the target of the lattice problem from `W` to `W + Delta`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearplane.lattice.factor import Factor
from nearplane.lattice.steady import total


def mismatch(W: Tensor, H: Tensor, C: Tensor, S: Tensor | None) -> Tensor:
    """Return (out, in) `W (C - H) + S`: the part of the output that the quantized inputs lost, against those inputs.

    Products are formed in the dtype of `W`, of differences that are formed in that of the moments.

    Args:
        W: (out, in).
        H: (in, in) `X_hat^T X_hat / tokens`, undamped.
        C: (in, in) `X^T X_hat / tokens`.
        S: (out, in) `E[(r - r_hat) x_hat^T]` of the residual stream that the output is added to, or None.
    """
    apart = torch.empty(H.shape, dtype=W.dtype, device=W.device)
    for rows in torch.arange(len(H), device=W.device).split(512):  # never all of it in the dtype of the moments
        apart[rows] = (C[rows] - H[rows]).to(W.dtype)
    lost = W @ apart
    return lost if S is None else lost.add_(S)


def correction(lost: Tensor, factor: Factor) -> Tensor:
    """Return (out, in) `Delta = lost (H + lambda I)^-1`, the full correction of the weights."""
    return factor.solve(lost)


def trust(lost_held_out: Tensor, H_held_out: Tensor, Delta: Tensor) -> float:
    """Return in closed form how far to go along `Delta`: `rho` in [0, 1] with the least error on held-out tokens.

        rho = <lost_v, Delta> / tr(Delta H_v Delta^T)

    Args:
        lost_held_out: (out, in) `mismatch` of the held-out tokens.
        H_held_out: (in, in) of the held-out tokens.
        Delta: (out, in) correction fitted on the other tokens.
    """
    wide = H_held_out.dtype
    energy = float(total((Delta @ H_held_out.to(Delta.dtype)) * Delta, wide))
    if energy <= 0:
        return 0.0
    return min(1.0, max(0.0, float(total(lost_held_out * Delta, wide)) / energy))


def weighted_difference(whole: Tensor, tokens: int, part: Tensor, part_tokens: int) -> Tensor:
    """Return the average over the tokens of `whole` that are not in `part`, both averages over their tokens."""
    rest = tokens - part_tokens
    return (whole * (tokens / rest)).sub_(part, alpha=part_tokens / rest)

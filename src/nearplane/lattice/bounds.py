"""What was lost in one matrix: exact losses, the worst case that Babai's theorem allows, and the expected loss.

All losses are means over out * in. `loss` is measured under the undamped `H`: what the user cares about. The bounds hold for
the damped problem, row by row, where nothing clips.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearplane.lattice.factor import Factor
from nearplane.lattice.grid import Grid, QuantizedMatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Losses of one quantized matrix against its target.

    Args:
        loss: `tr(E H E^T) / (out * in)`, E the target minus the values.
        damped_loss: the same under `H + lambda I`; equals `sum_j d_j ||t_j - values_j||^2 / (out * in)` of the sweep.
        relative_loss: `loss` over `tr(W H W^T) / (out * in)`.
        worst_case: `1/4 sum_j d_j s_j^2`, mean over rows, / in: bounds `damped_loss` where nothing clips.
        expected: a third of it, the mean for a uniform offset.
        gamma: no grid point is closer than 1/gamma times this error, the largest over rows that do not clip; None if all do.
        clipped: fraction of codes at which what was rounded lay outside the grid.
        clipped_rows: fraction of rows with such a code: the bounds do not hold for them.

    The bounds are those of Babai's algorithm; for codes rounded to nearest, worst_case, expected and gamma are None.
    """

    loss: float
    damped_loss: float
    relative_loss: float
    worst_case: float | None
    expected: float | None
    gamma: float | None
    clipped: float
    clipped_rows: float


def quadratic(E: Tensor, H: Tensor) -> Tensor:
    """Return (out,) `e H e^T` of every row of `E` (out, in)."""
    return ((E @ H) * E).sum(1)


def certify(
    W: Tensor, target: Tensor, matrix: QuantizedMatrix, H: Tensor, factor: Factor, *, swept: bool = True
) -> Certificate:
    """Measure a quantized matrix against its target.

    Args:
        W: (out, in) weights, whose energy under `H` the relative loss refers to.
        target: (out, in) what was quantized: the weights, or the corrected target.
        matrix: codes and grid.
        H: (in, in) undamped, in the dtype that the certificate is computed in.
        factor: of the damped `H`, in the order of the sweep.
        swept: whether the codes come from a sweep; else every weight was rounded on its own.
    """
    T = target.to(H.dtype)
    assert isinstance(matrix.grid, Grid), "the bounds are those of the grid that was swept"
    grid = matrix.grid.to(H.dtype)
    E = T - grid.decode(matrix.codes)  # (out, in)
    size = E.numel()
    loss = quadratic(E, H).sum()
    damped = loss + factor.shift * E.square().sum()
    ordered = E[:, factor.order]
    fed = (
        ordered @ factor.U.to(H.dtype) - ordered if swept else torch.zeros_like(E)
    )  # (out, in), the error fed to each column
    outside = grid.clipped(matrix.codes, T.index_add(1, factor.order, fed))
    rows = ~outside.any(1)
    d = factor.d.to(H.dtype).masked_fill(factor.dead[factor.order], factor.shift)  # a dead input has no length
    profile = (grid.steps().square()[:, factor.order] * d).expand(len(E), -1)  # (out, in), d_j s_j^2
    bound = profile.sum(1) / 4
    tails = profile.flip(1).cumsum(1).flip(1)
    gammas = torch.where(profile > 0, tails / profile, 1).amax(1).sqrt()[rows]
    return Certificate(
        loss=float(loss / size),
        damped_loss=float(damped / size),
        relative_loss=float(loss / quadratic(W.to(H.dtype), H).sum().clamp(min=torch.finfo(H.dtype).tiny)),
        worst_case=float(bound.mean() / E.shape[1]) if swept else None,
        expected=float(bound.mean() / E.shape[1] / 3) if swept else None,
        gamma=float(gammas.max()) if swept and len(gammas) else None,
        clipped=float(outside.double().mean()),
        clipped_rows=float((~rows).double().mean()),
    )


def limit(loss: float, row_energy: Tensor, eigenvalues: Tensor) -> float:
    """Return the rate, in bits per weight, below which no code whatever reaches `loss` on a Gaussian matrix like this one.

    Reverse water-filling over rows `w_i ~ N(0, sigma_i^2 I)` and the eigenvalues of `H`:

        D(theta) = mean_ik min(theta, sigma_i^2 lambda_k) ;  R(theta) = mean_ik max(0, 1/2 log2(sigma_i^2 lambda_k / theta))

    A Gaussian reference, not a strict bound for real weights: other distributions of the same energy need fewer bits.

    Args:
        loss: `tr(E H E^T) / (out * in)`, reached or wanted.
        row_energy: (out,) `sigma_i^2`, mean square of every row.
        eigenvalues: (in,) of `H`.
    """
    log_rows = row_energy[row_energy > 0].double().log2()
    log_lengths = eigenvalues[eigenvalues > 0].double().log2()
    count = row_energy.numel() * eigenvalues.numel()
    if not len(log_rows) or not len(log_lengths):
        return 0.0
    variances, weights = _pairwise_sums(log_rows, log_lengths)
    low, high = float(variances.min()) - 60, float(variances.max())
    if loss <= 0:
        return math.inf
    for _ in range(60):  # bisection in log2 theta
        middle = (low + high) / 2
        distortion = float((torch.exp2(variances.clamp(max=middle)) * weights).sum()) / count
        low, high = (middle, high) if distortion < loss else (low, middle)
    return float(((variances - low).clamp(min=0) * weights).sum()) / (2 * count)


def _pairwise_sums(a: Tensor, b: Tensor, *, bins: int = 1 << 12, most: int = 1 << 19) -> tuple[Tensor, Tensor]:
    """Return all sums `a_i + b_k` and how often each occurs; of more than `most` pairs, `a` in `bins` bins of equal count."""
    if a.numel() * b.numel() > most:
        keep = max(1, most // b.numel())
        parts = a.sort().values.tensor_split(min(keep, bins, len(a)))
        a, counts = torch.stack([part.mean() for part in parts]), torch.tensor([float(len(part)) for part in parts])
    else:
        counts = torch.ones(len(a))
    sums = (a[:, None] + b).flatten()
    return sums, counts.to(sums)[:, None].expand(-1, len(b)).flatten()

"""What was lost in one matrix: exact losses, the worst case that Babai's theorem allows, and the expected loss.

All losses are means over out * in. `loss` is measured under the undamped `H`: what the user cares about. The bounds hold for
the damped problem, row by row, where nothing clips.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearplane.lattice.factor import Factor, total
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.moments import Extra
from nearplane.lattice.solvers import Solution

MEASURED_ROWS = 256  # at once: what is in memory beside the matrix does not grow with it, and stays in the caches
BLOCK = 512  # columns of a triangle at once
PAIRS = 1 << 19  # of rows and eigenvalues that a limit is computed from one by one
BINS = 1 << 12  # that rows are put in where there are more


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Losses of one quantized matrix against its target.

    Args:
        loss: `tr(E H E^T) / (out * in)`, E the target minus the values.
        row_losses: (out,) the same of every row, / in.
        relative_loss: `loss` over `tr(W H W^T) / (out * in)`.
        nearest_loss: `loss` of rounding the target to nearest on the grid of the sweep.
        damped_loss: the same under `H + lambda I`; equals `sum_j d_j ||t_j - values_j||^2 / (out * in)` of a sweep.
        worst_case: `1/4 sum_j d_j s_j^2`, mean over rows, / in: bounds `damped_loss` where nothing clips.
        expected: a third of it, the mean for a uniform offset.
        gamma: no grid point is closer than 1/gamma times this error, the largest over rows that do not clip; None if all do.
        clipped: fraction of codes at which what was rounded lay outside the grid.
        clipped_rows: fraction of rows with such a code: the bounds do not hold for them.

    The bounds are those of Babai's algorithm, and of whatever begins with its codes and never loses more; for other codes
    worst_case, expected and gamma are None.
    """

    loss: float
    row_losses: Tensor
    relative_loss: float
    nearest_loss: float
    damped_loss: float
    worst_case: float | None
    expected: float | None
    gamma: float | None
    clipped: float
    clipped_rows: float


def quadratic(E: Tensor, H: Tensor) -> Tensor:
    """Return (out,) `e H e^T` of every row of `E` (out, in)."""
    return ((E @ H) * E).sum(1)


def folded(H: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the upper triangle (in, in) with the same quadratic form as the symmetric `H`: half of the products do."""
    triangle = H.to(dtype, copy=True).triu_()
    triangle.diagonal().mul_(0.5)
    return triangle.mul_(2)


def _form(E: Tensor, triangle: Tensor) -> Tensor:
    """Return (rows,) the quadratic form of an upper triangle, see `folded`, of every row of `E`."""
    return (_through(E, triangle) * E).sum(1)


def certify(
    W: Tensor, target: Tensor, solution: Solution, H: Tensor, factor: Factor, *, values: Tensor | None = None
) -> Certificate:
    """Measure a quantized matrix against its target, some rows at a time.

    Args:
        W: (out, in) weights, whose energy under `H` the relative loss refers to.
        target: (out, in) what was quantized: the weights, or the corrected target.
        solution: codes, and the grid that was swept, with the targets of the sweep that lay beyond its codes. Without these every
            weight was rounded on its own, and the bounds do not hold.
        H: (in, in) undamped, in the dtype that the certificate is computed in. The loss is `damped_loss - lambda mean(E^2)`: as
            good as that dtype while damping does not outweigh it by many powers of ten.
        factor: of the damped `H`, in the order of the sweep.
        values: (out, in) what the codes were made to mean afterwards; None: what their grid says.
    """
    dtype, matrix = H.dtype, solution.matrix
    swept = solution.outside is not None
    order, U = factor.order, factor.U.to(dtype)
    d = factor.d.to(dtype).masked_fill(factor.dead[order], factor.shift)  # a dead input has no length
    rough = folded(H, torch.promote_types(W.dtype, torch.float32))  # for errors not small in its strong directions
    parts: list[tuple[Tensor, ...]] = []  # each (rows,)
    for rows in torch.split(torch.arange(len(target), device=target.device), MEASURED_ROWS):
        part, codes, t = matrix.grid.of_rows(rows).to(dtype), matrix.codes[rows], target[rows].to(dtype)
        book, (scale, zero) = part.codebook, part.columns(slice(None))  # (rows or 1, in) each
        E = t - scale * (book.position(codes, dtype) - zero)  # (rows, in)
        residual = _through(E[:, order], U)  # (rows, in), in rounding order
        damped = (residual.square() * d).sum(1)
        if values is not None:
            final = t - values[rows].to(dtype)
            loss = (_through(final[:, order], U).square() * d).sum(1) - factor.shift * final.square().sum(1)
        else:
            loss = damped - factor.shift * E.square().sum(1)
        loss = loss.clamp(min=0)
        plain = book.nearest(t / scale + zero)
        same = not swept and values is None and torch.equal(plain, codes.to(plain))
        missed = (t - scale * (book.position(plain) - zero)).to(rough.dtype)
        bounds, gammas = _bounds((scale * book.widest)[:, order].expand(len(t), -1), d)
        beyond = book.outside(t / scale + zero).sum(1) if solution.outside is None else solution.outside[rows]
        nearest = loss if same else _form(missed, rough).to(dtype)
        energy = _form(W[rows].to(rough.dtype), rough).to(dtype)
        parts.append((loss, damped, nearest, energy, bounds, gammas, beyond))
    losses, damped, nearest, energy, bounds, gammas, outside = (torch.cat(each) for each in zip(*parts, strict=True))
    size, columns = target.numel(), target.shape[1]
    inside = outside == 0
    bound, loss = float(bounds.mean() / columns), losses.sum()
    return Certificate(
        loss=float(loss / size),
        row_losses=losses / columns,
        relative_loss=float(loss / energy.sum().clamp(min=torch.finfo(dtype).tiny)),
        nearest_loss=float(nearest.sum() / size),
        damped_loss=float(damped.sum() / size),
        worst_case=bound if swept else None,
        expected=bound / 3 if swept else None,
        gamma=float(gammas[inside].max()) if swept and bool(inside.any()) else None,
        clipped=int(outside.sum()) / size,
        clipped_rows=float((~inside).double().mean()),
    )


def losses_beside(
    W: Tensor, target: Tensor, matrix: QuantizedMatrix, extra: Extra, *, values: Tensor | None = None
) -> tuple[float, float, float]:
    """Measure outputs `V x_hat` of a quantized matrix against `W x` of the original, on rows that nothing was fitted to.

    Outputs are computed in the dtype of `W`, some of them at a time; what they differ by is squared and summed in float64.

    Args:
        W, target, matrix, values: as for `certify`.
        extra: the rows; without those of the original network `x` is `x_hat`.

    Returns:
        The mean of `(W x - V x_hat)^2` over outputs and rows, / in; the same over that of `(W x)^2`; and as the first, of rounding
        `target` to nearest on the grid.
    """
    dtype = torch.promote_types(W.dtype, torch.float32)
    X_hat = extra.X_hat.to(dtype).T  # (in, tokens)
    X = X_hat if extra.X is None else extra.X.to(dtype).T
    loss = nearest = energy = 0.0
    for rows in torch.split(torch.arange(len(target), device=target.device), MEASURED_ROWS):
        part = matrix.grid.of_rows(rows).to(dtype)
        V = part.decode(matrix.codes[rows]) if values is None else values[rows]
        outputs = W[rows].to(dtype) @ X  # (rows, tokens)
        energy += _squared(outputs)
        loss += _squared(torch.addmm(outputs, V.to(dtype), X_hat, alpha=-1))
        nearest += _squared(outputs.addmm_(part.round(target[rows].to(dtype))[1], X_hat, alpha=-1))
    size = target.numel() * X.shape[1]
    return loss / size, loss / max(energy, torch.finfo(dtype).tiny), nearest / size


def _squared(x: Tensor) -> float:
    """Return the sum of squares, in float64."""
    return float(total(torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).square()))


def _bounds(steps: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Return (rows,) `1/4 sum_j d_j s_j^2` and gamma of steps (rows, in) and lengths `d` (in,), both in rounding order."""
    profile = (steps.square() * d).flip(1)
    tails = profile.cumsum(1)
    return tails[:, -1] / 4, torch.where(profile > 0, tails.div_(profile), 1).amax(1).sqrt()


def _through(E: Tensor, U: Tensor) -> Tensor:
    """Return (rows, in) `E U`, of which the zeros below the diagonal of `U` are left out block by block."""
    spans = [(a, a + BLOCK) for a in range(0, len(U), BLOCK)]
    return torch.cat([E[:, :b] @ U[:b, a:b] for a, b in spans], dim=1)


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
        water = variances.clamp(max=middle).mul_(math.log(2)).exp_()  # exp2 differs by where threads share it out
        distortion = float(total(water.mul_(weights))) / count
        low, high = (middle, high) if distortion < loss else (low, middle)
    return float(total((variances - low).clamp(min=0) * weights)) / (2 * count)


def limit_of_all(loss: float, row_energy: Tensor, mean_log: float) -> float:
    """Return what `limit` does where every `sigma_i^2 lambda_k` is above `loss`: no eigenvalue is needed then, but `log det H`.

        theta = D ;  R(D) = 1/2 (mean_i log2 sigma_i^2 + mean_k log2 lambda_k - log2 D)

    Args:
        loss, row_energy: as for `limit`; positive.
        mean_log: of the base-2 logarithms of all eigenvalues of `H`.
    """
    return 0.5 * (float(row_energy.double().log2().mean()) + mean_log - math.log2(loss))


def _pairwise_sums(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return all sums `a_i + b_k` and how often each occurs; of more than `PAIRS` pairs, `a` in bins of equal count."""
    if a.numel() * b.numel() > PAIRS:
        keep = max(1, PAIRS // b.numel())
        parts = a.sort().values.tensor_split(min(keep, BINS, len(a)))
        a, counts = torch.stack([part.mean() for part in parts]), torch.tensor([float(len(part)) for part in parts])
    else:
        counts = torch.ones(len(a))
    sums = (a[:, None] + b).flatten()
    return sums, counts.to(sums)[:, None].expand(-1, len(b)).flatten()

"""Certificate of one matrix: exact losses, the worst case that Babai's theorem allows, and the expected loss.

All losses are means over out * in. `loss` is measured under the undamped `H`, that is, on the layer's outputs.
The bounds hold for the damped problem, in rows where no code is clipped.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from nearplane.lattice.factor import Factor, one_thread, read, strips, total
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.kernels import tiling_of
from nearplane.lattice.moments import Extra
from nearplane.lattice.product_grid import ProductGrid
from nearplane.lattice.solvers import Solution

MEASURED_ROWS = 256  # rows measured at once: working memory stays in the caches and does not grow with the matrix
# tokens below which outputs are multiplied in one thread: MKL divides so few columns of float32 unevenly among three and more
SERIAL_TOKENS = 128
BLOCK_COLUMNS = 512  # columns of a triangle that are multiplied at once
MAX_PAIRS = 1 << 17  # pairs of a row and an eigenvalue; of more pairs, `limit` puts the rows into bins
MAX_BINS = 1 << 12  # bins of rows
NEWTON_STEPS = 24  # to the water level: two to four more than any spectrum of 100 octaves took
SAFE_SQUARES = (1e-24, 1e24)  # sums of such squares neither vanish nor overflow in float32
CONSTANT_INPUTS = 1 - 1e-5  # share of the inputs' energy in one direction from which they count as constant
ONE_WEIGHT = 0.99  # share of the energy of the weights from which one of them counts as the only one


class Certificate(NamedTuple):
    """Losses of one quantized matrix against its target.

    Args:
        loss: `tr(E H E^T) / (out * in)`, E the target minus the values.
        row_losses: (out,) loss of every row, divided by in.
        relative_loss: Ratio of `loss` to `tr(W H W^T) / (out * in)`.
        nearest_loss: Loss of rounding the target to nearest on the grid of the sweep.
        damped_loss: Loss under `H + lambda I`; after a sweep equal to `sum_j d_j ||t_j - values_j||^2 / (out * in)`.
        worst_case: Upper bound of `damped_loss` where nothing clips: mean over rows of `1/4 sum_j d_j s_j^2 / in`.
        expected: Expected `damped_loss` for a uniform offset of the grid: a third of `worst_case`.
        gamma: Bound on error / distance to the closest grid point, the largest over unclipped rows; None if all clip.
        clipped: Fraction of codes whose target lay outside the grid.
        clipped_rows: Fraction of rows with such a code; the bounds do not hold for these rows.
        degenerate: Why the losses tell nothing about the layer, see `degeneracy`; empty for usual layers.

    The bounds hold for Babai's algorithm, and for solvers that start from its codes and never increase the loss; for
    other codes worst_case, expected and gamma are None.
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
    degenerate: str


def quadratic(E: Tensor, H: Tensor) -> Tensor:
    """Return (out,) `e H e^T` of every row of `E` (out, in)."""
    return ((E @ H) * E).sum(1)


def folded(H: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the upper triangle (in, in) with the quadratic form of the symmetric `H`, at half the products."""
    triangle = H.to(dtype, copy=True).triu_()
    triangle.diagonal().mul_(0.5)
    return triangle.mul_(2)


def _quadratic_form(E: Tensor, triangle: Tensor) -> Tensor:
    """Return (rows,) the quadratic form of an upper triangle, see `folded`, of every row of `E`."""
    return (times_triangle(E, triangle) * E).sum(1)


class LayerFacts(NamedTuple):
    """Numbers of a whole layer that its certificate needs besides the figures of the rows.

    Args:
        largest: Largest magnitude of a weight.
        peak: Largest energy of an input, on the diagonal of H.
        trace: Energy of all inputs.
        alive: Number of inputs that are not always 0.
        squared: Sum of the squares of H in the row of the input of most energy.
    """

    largest: float
    peak: float
    trace: float
    alive: float
    squared: float

    @classmethod
    def of(cls, W: Tensor, H: Tensor) -> LayerFacts:
        """Return the facts of weights (out, in) and the Hessian (in, in)."""
        diagonal = H.diagonal()
        strongest = H.index_select(0, diagonal.argmax(keepdim=True))  # (1, in), of the input of most energy
        facts = diagonal.max(), diagonal.sum(), diagonal.count_nonzero(), strongest.square().sum()
        lowest, highest, *others = read(*W.aminmax(), *facts)
        return cls(max(-lowest, highest), *others)


def certify(
    W: Tensor, target: Tensor, solution: Solution, H: Tensor, factor: Factor, *, values: Tensor | None = None
) -> Certificate:
    """Return the certificate of a matrix from all its rows; see `figures_of_rows` for the arguments."""
    facts = LayerFacts.of(W, H)
    figures = figures_of_rows(W, target, solution, H, factor, facts, values=values)
    return certificate_of(figures, facts, target.shape[1], swept=solution.outside is not None)


def figures_of_rows(
    W: Tensor,
    target: Tensor,
    solution: Solution,
    H: Tensor,
    factor: Factor,
    facts: LayerFacts,
    *,
    values: Tensor | None = None,
) -> Tensor:
    """Measure rows of a quantized matrix against their target, some at a time.

    Args:
        W: (rows, in) weights; the relative loss is the loss over their energy under `H`.
        target: (rows, in) matrix that was quantized: the weights, or the corrected target.
        solution: Codes, their grid, and the counts of sweep targets outside the grid. Without these counts every weight
            was rounded separately, and the bounds do not hold.
        H: (in, in) undamped Hessian, in the dtype of the computation, which is float64 where squares of the weights would
            vanish or overflow in float32. The loss is `damped_loss - lambda mean(E^2)`, as accurate as that dtype unless
            damping exceeds `H` by many powers of ten.
        factor: Factor of the damped `H`, in the order of the sweep.
        facts: Numbers of the whole layer.
        values: (rows, in) decoded weights if they were changed after the sweep; None: those of the grid.

    Returns:
        (8, rows) of every row: loss, damped loss, loss of rounding to nearest, energy under H, sum of squared weights, upper
        bound of the damped loss, number of targets outside the grid, gamma; see `Certificate`. Sums over the inputs.
    """
    matrix, (least, most) = solution.matrix, SAFE_SQUARES
    safe = least < facts.largest**2 * facts.peak < most
    dtype = H.dtype if safe or not facts.largest else torch.float64
    swept = solution.outside is not None
    order, U = factor.order, factor.U.to(dtype)
    d = factor.d.to(dtype).masked_fill(factor.dead[order], factor.shift)  # a dead input has no length
    # for errors that are large along strong directions of `H`, where float32 is accurate enough
    triangle = folded(H, torch.promote_types(W.dtype, torch.float32) if safe else dtype)
    parts: list[Tensor] = []  # (8, rows) each
    for rows in strips(target, MEASURED_ROWS):
        part, codes, t = matrix.grid.of_rows(rows).to(dtype), matrix.codes[rows], target[rows].to(dtype)
        book, (scale, zero) = part.codebook, part.columns(slice(None))  # (rows or 1, in) each
        E = t - scale * (book.position(codes, dtype) - zero)  # (rows, in)
        residual = times_triangle(E[:, order], U)  # (rows, in), in rounding order
        damped = (residual.square() * d).sum(1)
        if values is not None:
            error = t - values[rows].to(dtype)
            loss = (times_triangle(error[:, order], U).square() * d).sum(1) - factor.shift * error.square().sum(1)
        else:
            loss = damped - factor.shift * E.square().sum(1)
        loss = loss.clamp(min=0)
        nearest_codes = book.nearest(t / scale + zero)
        unmoved = None if swept or values is not None else (nearest_codes == codes).all()
        nearest_error = (t - scale * (book.position(nearest_codes) - zero)).to(triangle.dtype)
        if isinstance(matrix.grid, ProductGrid):  # rows are multiples of each other
            bounds, gammas = _bounds((scale[:1] * book.widest)[:, order], d)
            bounds, gammas = bounds * (scale[:, 0] / scale[0, 0]).square(), gammas.expand(len(t))
        else:
            bounds, gammas = _bounds((scale * book.widest)[:, order].expand(len(t), -1), d)
        outside_part = book.outside(t / scale + zero).sum(1) if solution.outside is None else solution.outside[rows]
        if unmoved is not None and not tiling_of(unmoved.device).waits and bool(unmoved):
            nearest = loss  # elsewhere reading the flag would cost more than the product
        else:
            nearest = _quadratic_form(nearest_error, triangle).to(dtype)
            nearest = nearest if unmoved is None else torch.where(unmoved, loss, nearest)
        energy = _quadratic_form(W[rows].to(triangle.dtype), triangle).to(dtype)
        squares = W[rows].to(dtype).square().sum(1)
        figures = loss, damped, nearest, energy, squares, bounds, outside_part.to(dtype), gammas
        parts.append(torch.stack(figures))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def certificate_of(figures: Tensor, facts: LayerFacts, columns: int, *, swept: bool) -> Certificate:
    """Return the certificate of a layer of so many columns from the figures of its rows; see `figures_of_rows`."""
    losses, outside, gammas = figures[0], figures[-2], figures[-1]
    out, clipped = len(losses), outside > 0
    size = out * columns
    gamma = gammas.masked_fill(clipped, -torch.inf).max()
    sums = read(figures[:-1].sum(1), clipped.sum(dtype=figures.dtype), gamma)
    loss_sum, damped_sum, nearest_sum, energy_sum, square, bound_sum, outside_sum, clipped_rows, largest_gamma = sums
    bound = bound_sum / out / columns
    share, directions = facts.largest**2 / (square or 1.0), facts.squared / (facts.peak or 1.0)
    return Certificate(
        loss=loss_sum / size,
        row_losses=losses / columns,
        relative_loss=loss_sum / energy_sum if energy_sum else 0.0,
        nearest_loss=nearest_sum / size,
        damped_loss=damped_sum / size,
        worst_case=bound if swept else None,
        expected=bound / 3 if swept else None,
        gamma=largest_gamma if swept and clipped_rows < out else None,
        clipped=outside_sum / size,
        clipped_rows=clipped_rows / out,
        degenerate=degeneracy(share, energy_sum / out, columns, facts.trace, facts.alive, directions),
    )


def degeneracy(share: float, energy: float, inputs: int, trace: float, alive: float, in_one_direction: float) -> str:
    """Return why the losses of a layer tell nothing about it; empty for usual layers.

    Args:
        share: Share of the largest weight in the sum of the squared weights; 0 if all are 0.
        energy: Mean square of an output.
        inputs: Number of inputs.
        trace: Energy of all inputs.
        alive: Number of inputs that are not always 0.
        in_one_direction: Energy of the inputs along that of the input of most energy.
    """
    if not share:
        return "all its weights are 0"
    if not alive:
        return "all its inputs are 0"
    if energy < torch.finfo(torch.float32).tiny:
        return "its outputs are too small for float32"
    if alive > 1 and in_one_direction > CONSTANT_INPUTS * trace:
        return "its inputs are the same for every token"
    return "one weight outweighs all others" if share > ONE_WEIGHT and inputs > 1 else ""


def losses_on_extra(
    W: Tensor, target: Tensor, matrix: QuantizedMatrix, extra: Extra, *, values: Tensor | None = None
) -> Tensor:
    """Measure outputs `V x_hat` of a quantized matrix against outputs `W x` of the original, on rows outside every fit.

    Outputs are computed in the dtype of `W`, some rows of `W` at a time; squared differences are summed in float64.

    Args:
        W, target, matrix, values: Weights, target, codes on a grid, and changed values of some rows; see `figures_of_rows`.
        extra: Inputs of the layer on the extra windows; without those of the original model, `x` is `x_hat`.

    Returns:
        (parts, 4) float64, for `means_on_extra`: sums over the outputs of each part of the rows, means over tokens divided by
        in, of `(W x - V x_hat)^2`, of the same for rounding `target` to nearest on the grid, of `(W x)^2`, and, with T being
        the target, of `(T x_hat - V x_hat)^2`, which this layer alone loses.
    """
    dtype = torch.promote_types(W.dtype, torch.float32)
    X_hat = extra.X_hat.to(dtype).T  # (in, tokens)
    X = X_hat if extra.X is None else extra.X.to(dtype).T
    parts = []
    with one_thread() if X.shape[1] < SERIAL_TOKENS else nullcontext():
        for rows in strips(target, MEASURED_ROWS):
            part = matrix.grid.of_rows(rows).to(dtype)
            V = part.decode(matrix.codes[rows]) if values is None else values[rows]
            outputs = W[rows].to(dtype) @ X  # (rows, tokens)
            energy = _norms(outputs)
            loss = _norms(torch.addmm(outputs, V.to(dtype), X_hat, alpha=-1))
            nearest = _norms(outputs.addmm_(part.round(target[rows].to(dtype))[1], X_hat, alpha=-1))
            own = _norms((target[rows].to(dtype) - V.to(dtype)) @ X_hat)
            parts.append(torch.stack([loss, nearest, energy, own]).square_().sum(1))
    return torch.stack(parts) / X.shape.numel()


def means_on_extra(parts: Tensor, outputs: int) -> Tensor:
    """Return means over so many outputs from (parts, 4) of all parts of a layer, see `losses_on_extra`.

    Returns:
        (4,) float64: the mean of `(W x - V x_hat)^2` over outputs and tokens, divided by in; its ratio to the mean of
        `(W x)^2`; the first figure again, for rounding `target` to nearest on the grid; and the ratio of the mean of
        `(T x_hat - V x_hat)^2`, with T being the target, to that of `(W x)^2`.
    """
    loss, nearest, energy, own = parts.sum(0) / outputs
    shares = (torch.stack([loss, own]) / energy).masked_fill(energy == 0, 0)
    return torch.stack([loss, shares[0], nearest, shares[1]])


def _norms(x: Tensor) -> Tensor:
    """Return (rows,) the norm of every row, in float64."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    return norms


def _bounds(steps: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Return (rows,) `1/4 sum_j d_j s_j^2` and gamma for steps (rows, in) and lengths `d` (in,) in rounding order."""
    profile = (steps.square() * d).flip(1)
    tails = _running_sums(profile)
    return tails[:, -1] / 4, torch.where(profile > 0, tails.div_(profile), 1).amax(1).sqrt()


def _running_sums(x: Tensor) -> Tensor:
    """Return (rows, n) sums of the first 1, 2, .. n columns of x.

    A GPU computes them as products with triangles of ones, since the order of the additions in its cumsum is not fixed.
    """
    if not tiling_of(x.device).waits:
        return x.cumsum(1)
    (rows, n), width = x.shape, min(BLOCK_COLUMNS, x.shape[1])
    parts = torch.nn.functional.pad(x, (0, -n % width)).view(rows, -1, width)
    triangle = torch.ones(width, width, dtype=x.dtype, device=x.device).triu_()
    sums = parts @ triangle  # within each part
    totals = sums[:, :, -1]
    before = totals @ totals.new_ones(totals.shape[1], totals.shape[1]).triu(1)  # of all parts before each part
    return (sums + before[:, :, None]).view(rows, -1)[:, :n]


def times_triangle(E: Tensor, U: Tensor) -> Tensor:
    """Return (rows, in) `E U`; zeros below the diagonal of `U` are skipped block by block."""
    most = tiling_of(U.device).products
    width = BLOCK_COLUMNS if most is None else max(BLOCK_COLUMNS, -(-len(U) // most))
    spans = [(a, a + width) for a in range(0, len(U), width)]
    products = [E[:, :b] @ U[:b, a:b] for a, b in spans]
    return products[0] if len(products) == 1 else torch.cat(products, dim=1)


def limit(loss: float, row_energy: Tensor, eigenvalues: Tensor) -> float:
    """Return the rate in bits per weight below which no code reaches `loss` on a Gaussian matrix of this kind.

    Reverse water-filling over `v_ik = sigma_i^2 lambda_k`, rows `w_i ~ N(0, sigma_i^2 I)` and the eigenvalues of `H`:

        D(theta) = mean_ik min(theta, v_ik) ;  R(theta) = mean_ik max(0, 1/2 log2(v_ik / theta))

    This is a reference, not a strict bound for real weights: other distributions of the same energy need fewer bits.

    Args:
        loss: Loss `tr(E H E^T) / (out * in)`, of a result or as a goal.
        row_energy: (out,) `sigma_i^2`, mean square of every row.
        eigenvalues: (in,) eigenvalues of `H`.
    """
    positive = read((row_energy > 0).sum(), (eigenvalues > 0).sum())
    count = row_energy.numel() * eigenvalues.numel()
    if not all(positive):
        return 0.0
    log_rows, log_lengths = (  # selecting waits for a GPU
        (x if kept == x.numel() else x[x > 0]).double().log2()
        for x, kept in zip((row_energy, eigenvalues), positive, strict=True)
    )
    if loss <= 0:
        return math.inf
    logs, weights = _pairwise_sums(log_rows, log_lengths)
    variances = (logs * math.log(2)).exp_()  # exp2 depends on how threads divide the tensor
    weighted, waits = variances * weights, tiling_of(variances.device).waits
    level = loss * count / total(weights)  # below the water level; D is concave, so that Newton's steps stay below it
    for _ in range(NEWTON_STEPS):
        below, before = variances <= level, level
        wide = total(weights * ~below)
        level = torch.where(wide > 0, (loss * count - total(weighted * below)) / wide, level)
        if not waits and bool(level == before):
            break
    return float(total((logs - level.log2()).clamp(min=0) * weights)) / (2 * count)


def limit_of_all(loss: float, mean_log_energy: float, mean_log: float) -> float:
    """Return the same as `limit` where every `sigma_i^2 lambda_k` exceeds `loss`; only `log det H` is needed then.

        theta = D ;  R(D) = 1/2 (mean_i log2 sigma_i^2 + mean_k log2 lambda_k - log2 D)

    Args:
        loss: Loss, as for `limit`.
        mean_log_energy: Mean base-2 logarithm of the mean squares of the rows.
        mean_log: Mean base-2 logarithm of the eigenvalues of `H`.
    """
    return 0.5 * (mean_log_energy + mean_log - math.log2(loss))


def _pairwise_sums(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return all sums `a_i + b_k` and their counts; beyond `MAX_PAIRS` pairs, `a` is put into bins of equal count."""
    if a.numel() * b.numel() > MAX_PAIRS:
        bins = max(1, MAX_PAIRS // b.numel())
        parts = a.sort().values.tensor_split(min(bins, MAX_BINS, len(a)))
        a, counts = torch.stack([part.mean() for part in parts]), a.new_tensor([len(part) for part in parts])
    else:
        counts = torch.ones_like(a)
    sums = (a[:, None] + b).flatten()
    return sums, counts[:, None].expand(-1, len(b)).flatten()

"""Quantization of one matrix to a rate: unbounded codes whose entropy-coded size is the one asked for.

The search repeats: step c -> sweep -> coded size -> next c. `on_grid.py` is for fixed grids.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearplane.coding.blob import Contents, encode, size
from nearplane.coding.cost import geometric_bits
from nearplane.coding.scales import stored_base
from nearplane.errors import NumericalError, RecipeError
from nearplane.lattice.bounds import MEASURED_ROWS, folded, times_triangle
from nearplane.lattice.factor import Factor, read, strips
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.product_grid import ProductGrid, high_rate_step, ladder, row_exponents, waterfill_exponents
from nearplane.lattice.scale import too_small
from nearplane.matrix.certificate import SolvedMatrix, measured_rows, relative_loss
from nearplane.matrix.inputs import LayerInput, Target, named
from nearplane.matrix.on_grid import SolvedRows, rounded
from nearplane.recipe.rate_scheme import RateScheme
from nearplane.recipe.scheme import Solver
from nearplane.recipe.schemes import AnyScheme
from nearplane.system.arguments import within
from nearplane.system.memory import release

TOLERANCE = 0.003  # relative error of the rate, or absolute below one bit, at which the search stops
ESTIMATE_TOLERANCE = 0.05  # the same while the overhead of the file is not known yet
SEARCHED_ROWS = 256  # rows to search on if a matrix has more than twice as many
MAX_ATTEMPTS = 16  # trials of one search
MAX_RATE = 16  # bits per weight of one matrix, as fine as the weights themselves
HIGHEST_RATE = 7.0  # bits per weight, to which --max-loss may raise a rate
MAX_CODE = 1 << 23  # beyond it float32 does not hold a code to half a step
MAX_PREDICTED_WEIGHTS = 1 << 21  # above which the size is measured by coding instead of predicted
Sized = Callable[[QuantizedMatrix[ProductGrid]], float]
"""Function that returns bits per weight of a matrix once it is coded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Result of one step, for all rows or for some.

    Args:
        log_step: log2 of the step c.
        matrix: Codes and grid.
        rate: Bits per weight of the coded matrix.
    """

    log_step: float
    matrix: QuantizedMatrix[ProductGrid]
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Search for the factor `c` of a matrix's steps, which are `c` times those of `grid`.

    Args:
        T: (out, in) target.
        H: (in, in) Hessian.
        factor: Factor of the damped `H`.
        grid: Steps relative to c: exponents of rows and columns, base 1.
        scheme: Scheme with the solver.
        sized: Function that returns bits per weight of a coded matrix.
    """

    T: Tensor
    H: Tensor
    factor: Factor
    grid: ProductGrid
    scheme: AnyScheme
    sized: Sized

    def first_step(self, rate: float) -> float:
        """Return log2 c from the high-rate formula."""
        rms = (self.T / self.grid.row_scale()[:, None]).double().square().mean(0).sqrt()
        return high_rate_step(rms, 1 / self.grid.column_scale(), rate)

    def attempt(self, log_step: float) -> Trial:
        """Sweep with step `2^log_step` and compute the size of the codes."""
        release()  # free the memory of the previous attempt
        matrix = self.swept(log_step)
        return Trial(log_step=log_step, matrix=matrix, rate=self.sized(matrix))

    def estimated(self, log_step: float, rows: Tensor | slice, overhead: float) -> Trial:
        """Sweep some rows and estimate the size of all: the bits of these codes plus `overhead` bits per weight."""
        matrix = self.swept(log_step, rows)
        means = matrix.codes.abs().sum(0).double() / len(matrix.codes)  # (in,), exact sums
        return Trial(log_step=log_step, matrix=matrix, rate=geometric_bits(means.cpu().numpy()) + overhead)

    def swept(self, log_step: float, rows: Tensor | slice = slice(None)) -> QuantizedMatrix[ProductGrid]:
        """Sweep some rows with step `2^log_step`."""
        grid = replace(self.grid, base=stored_base(2.0**log_step), rows=self.grid.rows[rows])
        columns = torch.arange(len(grid.columns), device=self.T.device)
        scale = grid.column_scale()[None]
        swept = Grid(scale=scale, zero=torch.zeros_like(scale), group=columns)
        aim = self.T[rows].float() / grid.row_scale()[:, None]
        solution = rounded(aim, swept, self.factor, self.scheme, self.H)
        return QuantizedMatrix(codes=solution.matrix.codes, grid=grid)


def coded_rate(matrix: QuantizedMatrix[ProductGrid]) -> float:
    """Return bits per weight of the coded matrix: predicted for small matrices, measured by coding large ones.

    For large matrices the prediction would use a sample of the rows, which need not be typical.
    """
    matrix = matrix.to("cpu")
    contents, weights = Contents.of(matrix.codes, matrix.grid), matrix.codes.numel()
    if weights > MAX_PREDICTED_WEIGHTS:
        return 8 * len(encode(contents)) / weights
    return size(contents).bits / weights


def scaled(matrix: QuantizedMatrix[ProductGrid], T: Tensor, H: Tensor) -> QuantizedMatrix[ProductGrid]:
    """Rescale the whole matrix by one factor, which needs no space in the file.

    The factor of least loss, `<T,V> / <V,V>`, shrinks the outputs of every layer in the same sense. The factor without
    shrinkage, `<T,T> / <T,V>`, adds more noise. Their geometric mean keeps `T`'s energy; its predictions diverge least.
    It is stored to 1/256 octave, for which products in the dtype of `T` are exact enough.
    """
    grid, dtype = matrix.grid, torch.promote_types(T.dtype, torch.float32)
    weight, unit = grid.row_weight().double(), 1 / T.abs().amax().to(dtype)
    triangle = folded(H / H.diagonal().amax(), dtype)  # in these units no square vanishes or overflows
    sums = torch.zeros(3, dtype=torch.float64, device=T.device)  # <T, V>, <V, V> and <T, T> under H, rows weighted
    for rows in strips(T, MEASURED_ROWS):
        t, v = (x.to(dtype) * unit for x in (T[rows], replace(grid, rows=grid.rows[rows]).decode(matrix.codes[rows])))
        tQ, vQ = times_triangle(t, triangle), times_triangle(v, triangle)
        products = ((vQ * t).sum(1) + (tQ * v).sum(1)) / 2, (vQ * v).sum(1), (tQ * t).sum(1)
        sums += torch.stack([(x * weight[rows]).sum() for x in products])
    cross, square, energy = sums.tolist()
    if not (cross > 0 and square > 0):  # or NaN, of a target or inputs that are all 0
        return matrix
    return replace(matrix, grid=replace(grid, base=stored_base(grid.base * math.sqrt(energy / square))))


def solve_to_rate(
    W: Tensor,
    target: Target,
    inputs: LayerInput,
    scheme: RateScheme,
    rate: float | None,
    *,
    sensitivity: Tensor | None = None,
    max_loss: float | None = None,
    name: str = "matrix",
) -> SolvedRows:
    """Solve a layer at a rate from its target; see `quantize_matrix_to_rate`."""
    rate = scheme.rate if rate is None else rate
    if rate is None:
        raise RecipeError(f"{name}: a size is for a whole checkpoint. Pass a rate in bits per weight.")
    if sensitivity is not None and sensitivity.shape != W.shape[:1]:
        raise NumericalError(
            f"{name}: sensitivity is {tuple(sensitivity.shape)}; expected one number per row, ({len(W)},)."
        )
    within("rate", rate, 0 < rate <= MAX_RATE, f"up to {MAX_RATE} bits per weight")
    within("max_loss", max_loss, max_loss is None or 0 < max_loss < 1, "between 0 and 1")
    T = target.values
    with named(name, inputs.moments.tokens):
        steps = waterfilled_steps(W, inputs.factor_of_the_sweep(scheme), sensitivity)
        while True:
            trial = search(T, inputs, scheme, rate, steps)
            check_codes(trial.matrix.codes, T)
            check_scales(trial.matrix.grid, T)
            matrix = scaled(trial.matrix, T, inputs.moments.H)
            known = SolvedMatrix(matrix=matrix, base=trial.matrix.grid.base)
            measured = measured_rows(W, slice(None), target, known, inputs, scheme)
            if max_loss is None or rate >= HIGHEST_RATE:
                break
            if (loss := relative_loss(measured, W.shape[1])) <= max_loss:
                break
            rate = min(HIGHEST_RATE, rate + max(0.02, 0.5 * math.log2(loss / max_loss)))  # 6 dB per bit
    return SolvedRows(matrix=matrix, measured=measured, seconds=time.perf_counter() - target.began, asked=rate)


def check_codes(codes: Tensor, T: Tensor) -> None:
    """Raise NumericalError if a code is too large for float32, in which the sweep computes."""
    lowest, highest = read(*codes.aminmax())
    if max(-lowest, highest) > MAX_CODE:
        largest = max(abs(float(extreme)) for extreme in T.aminmax())
        raise NumericalError(
            f"The largest weight, {largest:.3g}, is more than {MAX_CODE:,} steps from 0 beside the others. Check the "
            f"checkpoint, or leave this layer unquantized with --ignore."
        )


def check_scales(grid: ProductGrid, T: Tensor) -> None:
    """Raise NumericalError if the step of a column that is not 0 lies below the normal numbers of float32."""
    smallest = torch.where((T != 0).any(0), grid.column_scale(), 1).min()
    if float(smallest) < torch.finfo(torch.float32).smallest_normal:
        raise too_small(float(T.abs().max()), torch.float32)


def waterfilled_steps(W: Tensor, factor: Factor, sensitivity: Tensor | None) -> ProductGrid:
    """Return steps of base 1 that give every plane the same error, and finer steps to more sensitive rows."""
    out, columns = W.shape
    lengths = torch.empty_like(factor.d)
    lengths[factor.order] = factor.d.sqrt()  # (in,), in the order of the columns
    exponents, resolution = torch.zeros(out, dtype=torch.int32, device=W.device), 1
    if sensitivity is not None:
        resolution = ladder(columns)
        exponents = row_exponents(sensitivity.to(W.device), columns, resolution)
    return ProductGrid(
        base=1.0,
        columns=waterfill_exponents(lengths, ladder(out)),
        column_resolution=ladder(out),
        rows=exponents,
        row_resolution=resolution,
    )


def search(
    T: Tensor, inputs: LayerInput, scheme: AnyScheme, rate: float, steps: ProductGrid, sized: Sized = coded_rate
) -> Trial:
    """Find the step c for which steps of c times `steps` give `rate` bits per weight as measured by `sized`.

    The search first sweeps, some rows of a large matrix only, and estimates sizes; one size from `sized` gives the
    overhead that estimates leave out. It then uses the scheme's solver, whose codes take nearly as many bits, and
    sizes from `sized`.
    """
    sweep_solver: Solver = "nearest-plane" if scheme.calibrated else "round-to-nearest"
    sweeps = replace(scheme, solver=sweep_solver, beam=None)
    factor = inputs.factor_of_the_sweep(scheme)
    cheap = Search(T=T, H=inputs.moments.H, factor=factor, grid=steps, scheme=sweeps, sized=sized)
    rows: Tensor | slice = slice(None)
    if len(T) > 2 * SEARCHED_ROWS:
        drawn = torch.randperm(len(T), generator=torch.Generator().manual_seed(0))[:SEARCHED_ROWS]
        rows = drawn.sort().values.to(T.device)
    trial, slope = secant(
        lambda y: cheap.estimated(y, rows, 0.0), cheap.first_step(rate), rate, within=ESTIMATE_TOLERANCE
    )
    full_matrix = trial.matrix if isinstance(rows, slice) else cheap.swept(trial.log_step)
    overhead = sized(full_matrix) - trial.rate
    x = trial.log_step + (trial.rate + overhead - rate) / slope
    trial, slope = secant(lambda y: cheap.estimated(y, rows, overhead), x, rate, slope)
    final = cheap if scheme.solver == sweep_solver else replace(cheap, scheme=scheme)
    return secant(final.attempt, trial.log_step, rate, slope)[0]


def secant(
    attempt: Callable[[float], Trial], x: float, rate: float, slope: float = 1.0, *, within: float = TOLERANCE
) -> tuple[Trial, float]:
    """Return the trial whose rate is closest to `rate`, and the bits by which the rate falls when the step doubles.

    Args:
        attempt: Function that makes a trial of log2 of a step.
        x: First value of log2 of the step.
        rate: Target in bits per weight.
        slope: Initial estimate of the bits by which the rate falls when the step doubles.
        within: Relative error of the rate, or absolute below one bit, at which the search stops.
    """
    best: Trial | None = None
    low, high = -math.inf, math.inf  # steps with a rate too high, too low
    last: tuple[float, float] | None = None
    for _ in range(MAX_ATTEMPTS):
        trial = attempt(x)
        excess = trial.rate - rate
        if best is None or abs(excess) < abs(best.rate - rate):
            best = trial
        if last is not None and x != last[0]:
            slope = min(2.0, max(0.1, (last[1] - excess) / (x - last[0])))
        if abs(excess) <= within * max(rate, 1.0):
            break
        low, high = (max(low, x), high) if excess > 0 else (low, min(high, x))
        last = (x, excess)
        x += min(1.0, max(-1.0, excess / slope))
        if not low < x < high:
            x = (low + high) / 2
        if abs(x - last[0]) < 2.0**-10:
            break
    assert best is not None
    return best, slope

"""One matrix to a rate: unbounded codes whose entropy-coded size is what was asked for. `on_grid.py` is for fixed grids.

Step c -> sweep -> coded size -> the next c, until it is right.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from nearplane.coding.blob import Contents, encode, size, stored_base
from nearplane.coding.cost import geometric_bits
from nearplane.errors import NumericalError, RecipeError
from nearplane.lattice.bounds import MEASURED_ROWS, quadratic
from nearplane.lattice.factor import Factor
from nearplane.lattice.grid import Grid, ProductGrid, QuantizedMatrix
from nearplane.lattice.moments import Moments
from nearplane.lattice.scale import high_rate_step, ladder, row_exponents, waterfill_exponents
from nearplane.matrix.certificate import Known, measure
from nearplane.matrix.inputs import Inputs, corrected, lattice_problem
from nearplane.matrix.on_grid import rounded
from nearplane.recipe.scheme import Solver
from nearplane.recipe.schemes import RateScheme
from nearplane.record.record import LayerRecord
from nearplane.system.memory import release

TOLERANCE = 0.003  # of the rate asked for, or of one bit if that is less: what the search is content with
NEAR = 0.05  # the same, of what is estimated before it is known what the estimate leaves out
SEARCHED_ROWS = 256  # where a matrix has many more
MAX_ATTEMPTS = 16  # of one search
HIGHEST_RATE = 7.0  # bits per weight to which --max-loss raises a rate
MAX_FORETOLD_WEIGHTS = 1 << 21  # above which a size is not taken as foretold
Sized = Callable[[QuantizedMatrix[ProductGrid]], float]
"""Bits per weight of a matrix once it is coded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one step led to, on all rows or on some.

    Args:
        log_step: log2 of the step c.
        matrix: codes and grid.
        rate: bits per weight of the coded matrix.
    """

    log_step: float
    matrix: QuantizedMatrix[ProductGrid]
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A matrix whose step is searched for: what is swept at steps `c` times those of `grid`.

    Args:
        T: (out, in) target.
        H: (in, in) Hessian.
        factor: of the damped `H`.
        grid: steps relative to c: exponents of rows and columns, base 1.
        scheme: solver.
        sized: bits per weight of a coded matrix.
    """

    T: Tensor
    H: Tensor
    factor: Factor
    grid: ProductGrid
    scheme: RateScheme
    sized: Sized

    def first_step(self, rate: float) -> float:
        """Return log2 c by the high-rate formula."""
        rms = (self.T / self.grid.row_scale()[:, None]).double().square().mean(0).sqrt()
        return high_rate_step(rms, 1 / self.grid.column_scale(), rate)

    def attempt(self, log_step: float) -> Trial:
        """Sweep with step `2^log_step`, and say what the codes cost."""
        release()  # what the attempt before took
        matrix = self.swept(log_step)
        return Trial(log_step=log_step, matrix=matrix, rate=self.sized(matrix))

    def estimated(self, log_step: float, rows: Tensor | slice, beside: float) -> Trial:
        """Sweep some rows, and say about what the codes of all would cost: `beside` bits per weight more than the codes alone."""
        matrix = self.swept(log_step, rows)
        return Trial(log_step=log_step, matrix=matrix, rate=geometric_bits(matrix.codes.cpu().numpy()) + beside)

    def swept(self, log_step: float, rows: Tensor | slice = slice(None)) -> QuantizedMatrix[ProductGrid]:
        """Sweep some rows with step `2^log_step`."""
        grid = replace(self.grid, base=stored_base(2.0**log_step), rows=self.grid.rows[rows])
        columns = torch.arange(len(grid.columns), device=self.T.device)
        scale = grid.column_scale()[None]
        swept = Grid(scale=scale, zero=torch.zeros_like(scale), group=columns)
        aim = self.T[rows].float() / grid.row_scale()[:, None]
        found = rounded(aim, swept, self.factor, self.scheme, self.H)
        return QuantizedMatrix(codes=found.matrix.codes, grid=grid)


def coded_rate(matrix: QuantizedMatrix[ProductGrid]) -> float:
    """Return bits per weight of the coded matrix: foretold, but that of a large one is coded in earnest.

    There sizes are foretold from a sample of the rows, which others need not be like.
    """
    contents, weights = Contents.of(matrix.codes, matrix.grid), matrix.codes.numel()
    if weights > MAX_FORETOLD_WEIGHTS:
        return 8 * len(encode(contents)) / weights
    return size(contents).bits / weights


def scaled(matrix: QuantizedMatrix[ProductGrid], T: Tensor, H: Tensor) -> QuantizedMatrix[ProductGrid]:
    """Scale the whole matrix, which costs nothing.

    The scale of least loss, `<T,V> / <V,V>`, shrinks the outputs of every layer in the same sense; the one whose outputs are not
    shrunken, `<T,T> / <T,V>`, makes more noise. Their geometric mean, which keeps the energy of `T`, gave predictions that
    diverge least.
    """
    grid = matrix.grid
    weight = grid.row_weight().to(H.dtype)
    both = own = energy = 0.0  # <T, V>, <V, V> and <T, T> under H, rows weighted
    for rows in torch.split(torch.arange(len(T), device=T.device), MEASURED_ROWS):
        t, v = T[rows].to(H.dtype), replace(grid, rows=grid.rows[rows]).decode(matrix.codes[rows]).to(H.dtype)
        vH = v @ H
        both, own = (a + float(((vH * x).sum(1) * weight[rows]).sum()) for a, x in ((both, t), (own, v)))
        energy += float((quadratic(t, H) * weight[rows]).sum())
    if both <= 0 or own <= 0:
        return matrix
    return replace(matrix, grid=replace(grid, base=stored_base(grid.base * math.sqrt(energy / own))))


def quantize_matrix_to_rate(
    W: Tensor | NDArray[Any],
    statistics: Tensor | NDArray[Any] | Moments | Inputs,
    scheme: RateScheme,
    rate: float | None = None,
    *,
    sensitivity: Tensor | None = None,
    max_loss: float | None = None,
    name: str = "matrix",
) -> tuple[QuantizedMatrix, LayerRecord]:
    """Quantize one matrix to `rate` bits per weight, every byte of its tensor counted.

    Args:
        W, statistics: as for `quantize_matrix`.
        scheme: order, solver, damping, correction.
        rate: bits per weight of this matrix; None: that of the scheme.
        sensitivity: (out,) how much the network minds errors of every output, see `calibration/sensitivity.py`; None: equally.
        max_loss: relative loss that is not to be exceeded: the rate is raised until it is not, to at most 7 bits; None: any.
        name: for the record and for errors.

    Raises:
        NumericalError: as `quantize_matrix`.
    """
    began = time.perf_counter()
    rate = scheme.rate if rate is None else rate
    if rate is None:
        raise RecipeError(f"{name}: a size is that of a whole checkpoint; give the matrix a rate in bits per weight.")
    W, inputs = lattice_problem(W, statistics, name)
    try:
        T, rho = corrected(W, inputs, scheme)
        steps = waterfilled_steps(W, inputs.factor_of_the_sweep(scheme), sensitivity)
        while True:
            trial = search(T, inputs, scheme, rate, steps)
            matrix = scaled(trial.matrix, T, inputs.moments.H)
            known = Known(matrix=matrix, base=trial.matrix.grid.base)
            record = measure(name, W, (T, rho), known, inputs, scheme)
            if max_loss is None or record.relative_loss <= max_loss or rate >= HIGHEST_RATE:
                break
            rate = min(HIGHEST_RATE, rate + max(0.02, 0.5 * math.log2(record.relative_loss / max_loss)))  # 6 dB a bit
    except NumericalError as error:
        raise NumericalError(f"{name} ({inputs.moments.tokens} tokens): {error}") from error
    return matrix, replace(record, asked=rate, seconds=round(time.perf_counter() - began, 6))


def waterfilled_steps(W: Tensor, factor: Factor, sensitivity: Tensor | None) -> ProductGrid:
    """Return steps that give every plane the same error, and rows that the network minds more finer ones; of base 1."""
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
    T: Tensor, inputs: Inputs, scheme: RateScheme, rate: float, steps: ProductGrid, sized: Sized = coded_rate
) -> Trial:
    """Find the step c, times which `steps` give codes whose size is `rate` bits a weight, as `sized` says.

    First by sweeps, of some rows where there are many, whose sizes are estimated; one is foretold to learn what the estimate
    leaves out. From there by the scheme's solver, whose codes take almost as many bits as a sweep's, and with sizes foretold.
    """
    nothing: Solver = "nearest-plane" if scheme.calibrated else "round-to-nearest"
    sweeps = replace(scheme, solver=nothing, beam=None)
    factor = inputs.factor_of_the_sweep(scheme)
    cheap = Search(T=T, H=inputs.moments.H, factor=factor, grid=steps, scheme=sweeps, sized=sized)
    some: Tensor | slice = slice(None)
    if len(T) > 2 * SEARCHED_ROWS:
        drawn = torch.randperm(len(T), generator=torch.Generator().manual_seed(0))[:SEARCHED_ROWS]
        some = drawn.sort().values.to(T.device)
    found, slope = secant(lambda y: cheap.estimated(y, some, 0.0), cheap.first_step(rate), rate, within=NEAR)
    whole = found.matrix if isinstance(some, slice) else cheap.swept(found.log_step)
    beside = sized(whole) - found.rate
    x = found.log_step + (found.rate + beside - rate) / slope
    found, slope = secant(lambda y: cheap.estimated(y, some, beside), x, rate, slope)
    final = cheap if scheme.solver == nothing else replace(cheap, scheme=scheme)
    return secant(final.attempt, found.log_step, rate, slope)[0]


def secant(
    attempt: Callable[[float], Trial], x: float, rate: float, slope: float = 1.0, *, within: float = TOLERANCE
) -> tuple[Trial, float]:
    """Return the trial whose rate is closest to the one asked for, and how fast the rate falls as the step grows.

    Args:
        attempt: makes a trial of a step, log2.
        x: the first one.
        rate: bits per weight.
        slope: by how many bits the rate is taken to fall where the step doubles, before two trials tell.
        within: of the rate asked for, or of one bit if that is less: what is near enough.
    """
    best: Trial | None = None
    low, high = -math.inf, math.inf  # steps known to cost too much, too little
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

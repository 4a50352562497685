"""One matrix to a rate: unbounded codes whose entropy-coded size is what was asked for. The second screen beside `matrix.py`.

Step c -> noise of the rounding -> shrunken target and its factor -> sweep -> gains -> coded size -> the next c, until it is right.
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

from nearplane.certificate import measure
from nearplane.coding.blob import Size, encode, size, stored_base
from nearplane.errors import NumericalError
from nearplane.formats.native import contents
from nearplane.inputs import Inputs, corrected, damp_of_the_sweep, lattice_problem
from nearplane.lattice.bounds import MEASURED_ROWS, quadratic
from nearplane.lattice.factor import Factor
from nearplane.lattice.grid import Grid, ProductGrid, QuantizedMatrix
from nearplane.lattice.polish import polish
from nearplane.lattice.scale import high_rate_step, ladder, row_exponents, waterfill_exponents
from nearplane.lattice.target import column_gains, row_gains, shrunken
from nearplane.matrix import rounded
from nearplane.models.statistics import Statistics
from nearplane.recipe import Gains, Rate, Rule
from nearplane.record import LayerRecord

CLOSE = 0.002  # of the rate asked for: what the search is content with
SUBSET = 256  # rows that the search looks at where a matrix has many more
EVALUATIONS = 16  # of one search
HIGHEST = 7.0  # bits per weight to which --max-loss raises a rate
FINER = 16  # steps per octave of gains
LARGE = 1 << 21  # weights above which a size is not taken as foretold


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one step led to, on all rows or on some.

    Args:
        log_step: log2 of the step c.
        matrix: codes and grid, gains included.
        size: of the coded matrix, foretold.
        bytes: of the coded matrix, where it was coded to know; None: as foretold.
    """

    log_step: float
    matrix: QuantizedMatrix[ProductGrid]
    size: Size
    bytes: int | None = None

    def rate(self, out: int) -> float:
        """Bits per weight of a matrix with `out` rows like those tried."""
        rows, columns = self.matrix.codes.shape
        if self.bytes is not None:
            return 8 * self.bytes / (rows * columns)
        return (8 * self.size.side / out + self.size.payload / rows) / columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A matrix whose rounding noise is foreseen: what is swept at steps near `c`.

    Args:
        T: (out, in) target.
        H: (in, in) damped Hessian `H_l`.
        aim: (out, in) what is swept: T, or T shrunken for noise `mu`.
        factor: of `H_l + mu I`.
        grid: steps relative to c: exponents of rows and columns, base 1.
        mu: noise of the rounding over the mean square of T.
        rule: solver and polish.
    """

    T: Tensor
    H: Tensor
    aim: Tensor
    factor: Factor
    grid: ProductGrid
    mu: float
    rule: Rule

    @classmethod
    def foresee(
        cls, T: Tensor, inputs: Inputs, rule: Rule, wanted: Rate, rows: ProductGrid, log_step: float | None
    ) -> Problem:
        """Prepare the sweep at steps near `2^log_step / sqrt(d_j)`; None foresees no noise. `rows` has the rows' exponents."""
        H = inputs.moments.H
        base = inputs.factor(rule.order, damp_of_the_sweep(inputs, rule, plain=wanted.method == "hptq"))
        damped = inputs.damped(base, H.dtype)
        power = float((T.square().mean(1).double() * rows.row_weight()).mean())
        mu = 0.0 if log_step is None or power == 0 else 4.0**log_step / 12 / power
        factor = base if mu == 0 else inputs.noisier(base, mu)
        grid = rows
        if wanted.method == "waterfill":
            lengths = torch.empty_like(factor.d)
            lengths[factor.order] = factor.d.sqrt()  # (in,), in the order of the columns
            resolution = ladder(len(T))
            grid = replace(rows, columns=waterfill_exponents(lengths, resolution), column_resolution=resolution)
        return cls(T=T, H=damped, aim=shrunken(T, factor, mu), factor=factor, grid=grid, mu=mu, rule=rule)

    def first_step(self, rate: float) -> float:
        """Return log2 c by the high-rate formula."""
        rms = (self.aim / self.grid.row_scale()[:, None]).double().square().mean(0).sqrt()
        return high_rate_step(rms, 1 / self.grid.column_scale(), rate)

    def attempt(self, log_step: float, wanted: Rate, rows: Tensor | slice = slice(None)) -> Trial:
        """Sweep some rows with step `2^log_step`, fit gains, and say what the codes would cost."""
        grid = replace(self.grid, base=stored_base(2.0**log_step), rows=self.grid.rows[rows])
        columns = torch.arange(len(grid.columns), device=self.aim.device)
        scale = grid.column_scale()[None]
        swept = Grid(scale=scale, zero=torch.zeros_like(scale), group=columns)
        aim = self.aim[rows].float() / grid.row_scale()[:, None]
        found = rounded(aim, swept, self.factor, self.rule, self.H, self.mu)
        if self.rule.polish:
            H = self.H.to(aim.dtype, copy=True)
            H.diagonal().add_(self.mu)
            found = polish(aim, found, H, sweeps=self.rule.polish)
        matrix = QuantizedMatrix(codes=found.codes, grid=grid)
        if wanted.gains != "none":
            matrix = with_gains(matrix, self.T[rows], self.H, wanted.gains)
        return Trial(
            log_step=log_step, matrix=matrix, size=size(contents(matrix), coder=wanted.coder, classes=wanted.classes)
        )


def with_gains(
    matrix: QuantizedMatrix[ProductGrid], T: Tensor, H: Tensor, gains: Gains
) -> QuantizedMatrix[ProductGrid]:
    """Scale rows and columns as `gains` says to the least loss against `T` under `H`, in steps of the stored ladders."""
    grid = matrix.grid
    T, V = T.to(H.dtype), matrix.decode().to(H.dtype)
    if gains in ("columns", "both"):
        finer = max(1, FINER // grid.column_resolution)
        g = column_gains(T, V, H).clamp(min=0.25)
        columns = grid.columns * finer + (g.log2() * grid.column_resolution * finer).round().to(torch.int32)
        grid = replace(grid, columns=columns, column_resolution=grid.column_resolution * finer)
        V = grid.decode(matrix.codes).to(H.dtype)
    if gains in ("rows", "both"):
        finer = max(1, FINER // grid.row_resolution)
        r = row_gains(T, V, H).clamp(0.25, 4.0).log2()
        rows = grid.rows * finer + ((r - r.median()) * grid.row_resolution * finer).round().to(torch.int32)
        grid = replace(grid, rows=rows, row_resolution=grid.row_resolution * finer)
    return replace(matrix, grid=grid)


def scaled(
    matrix: QuantizedMatrix[ProductGrid], T: Tensor, H: Tensor, *, keep_energy: bool
) -> QuantizedMatrix[ProductGrid]:
    """Scale the whole matrix, which costs nothing.

    The scale of least loss, `<T,V> / <V,V>`, shrinks the outputs of every layer in the same sense; the one whose outputs are not
    shrunken, `<T,T> / <T,V>`, makes more noise. Their geometric mean, which keeps the energy of `T`, gave predictions that
    diverge least, but for targets that were shrunken on purpose.
    """
    grid = matrix.grid
    weight = grid.row_weight().to(H.dtype)
    both = own = wanted = 0.0  # <T, V>, <V, V> and <T, T> under H, rows weighted
    for rows in torch.split(torch.arange(len(T), device=T.device), MEASURED_ROWS):
        t, v = T[rows].to(H.dtype), replace(grid, rows=grid.rows[rows]).decode(matrix.codes[rows]).to(H.dtype)
        vH = v @ H
        both, own = (a + float(((vH * x).sum(1) * weight[rows]).sum()) for a, x in ((both, t), (own, v)))
        wanted += float((quadratic(t, H) * weight[rows]).sum()) if keep_energy else 0.0
    if both <= 0 or own <= 0:
        return matrix
    scale = math.sqrt(wanted / own) if keep_energy else both / own
    return replace(matrix, grid=replace(grid, base=stored_base(grid.base * scale)))


def quantize_matrix_to_rate(
    W: Tensor | NDArray[Any],
    statistics: Tensor | NDArray[Any] | Statistics | Inputs,
    rule: Rule,
    wanted: Rate,
    rate: float,
    *,
    sensitivity: Tensor | None = None,
    max_loss: float | None = None,
    name: str = "matrix",
) -> tuple[QuantizedMatrix, LayerRecord]:
    """Quantize one matrix to `rate` bits per weight, every byte of its tensor counted.

    Args:
        W, statistics: as for `quantize_matrix`.
        rule: order, solver, damping, correction.
        wanted: method, coder, gains.
        rate: bits per weight of this matrix.
        sensitivity: (out,) how much the network minds errors of every output, see `models/sensitivity.py`; None: equally.
        max_loss: relative loss that is not to be exceeded: the rate is raised until it is not, to at most 7 bits; None: any.
        name: for the record and for errors.

    Raises:
        NumericalError: as `quantize_matrix`.
    """
    began, rule = time.perf_counter(), rule.resolved(wanted)
    W, inputs = lattice_problem(W, statistics, name)
    try:
        T, rho = corrected(W, inputs, rule)
        rows = _rows(W, wanted, sensitivity)
        while True:
            trial = search(T, inputs, rule, wanted, rate, rows)
            matrix = trial.matrix
            if wanted.method == "waterfill":
                matrix = scaled(matrix, T, inputs.moments.H, keep_energy=not wanted.shrink)
            record = measure(
                name, W, T, matrix, inputs, rule, wanted, correction=rho, base=trial.matrix.grid.base, asked=rate
            )
            if max_loss is None or record.relative_loss <= max_loss or rate >= HIGHEST:
                break
            rate = min(HIGHEST, rate + max(0.02, 0.5 * math.log2(record.relative_loss / max_loss)))  # 6 dB a bit
    except NumericalError as error:
        raise NumericalError(f"{name} ({inputs.moments.tokens} tokens): {error}") from error
    return matrix, replace(record, seconds=time.perf_counter() - began)


def _rows(W: Tensor, wanted: Rate, sensitivity: Tensor | None) -> ProductGrid:
    """Return a grid of step 1 with the exponents of the rows."""
    out, columns = W.shape
    zeros = torch.zeros(columns, dtype=torch.int32, device=W.device)
    exponents, resolution = torch.zeros(out, dtype=torch.int32, device=W.device), 1
    if sensitivity is not None and wanted.method == "waterfill":
        resolution = ladder(columns)
        exponents = row_exponents(sensitivity.to(W.device), columns, resolution)
    return ProductGrid(base=1.0, columns=zeros, column_resolution=1, rows=exponents, row_resolution=resolution)


def search(T: Tensor, inputs: Inputs, rule: Rule, wanted: Rate, rate: float, rows: ProductGrid) -> Trial:
    """Find the step whose coded size is `rate` bits a weight: on some rows where there are many, then on all.

    By nearest plane, and only from there by a solver or a polish that costs more.
    """
    foreseeing = wanted.shrink and wanted.method == "waterfill"
    costly, plain = rule, "round-to-nearest" if rule.solver == "round-to-nearest" else "nearest-plane"
    rule = replace(rule, solver=plain, beam=None, polish=0)
    problem = Problem.foresee(T, inputs, rule, wanted, rows, None)
    x = problem.first_step(rate)
    for _ in range(2 if foreseeing else 0):  # step and noise determine each other; here by the high-rate formula
        problem = Problem.foresee(T, inputs, rule, wanted, rows, x)
        x = problem.first_step(rate)
    out = len(T)
    if out > 2 * SUBSET:
        some = torch.randperm(out, generator=torch.Generator().manual_seed(0))[:SUBSET].sort().values
        x = secant(lambda y: problem.attempt(y, wanted, some), x, rate, out).log_step
    found = secant(lambda y: _coded(problem.attempt(y, wanted), wanted), x, rate, out)
    for _ in range(2):
        if not foreseeing or abs(found.log_step - x) < 0.05:
            break
        x = found.log_step
        problem = Problem.foresee(T, inputs, rule, wanted, rows, x)
        found = secant(lambda y, p=problem: _coded(p.attempt(y, wanted), wanted), x, rate, out)
    if costly.solver != plain or costly.polish:
        problem = replace(problem, rule=costly)
        found = secant(lambda y: _coded(problem.attempt(y, wanted), wanted), found.log_step, rate, out)
    return found


def _coded(trial: Trial, wanted: Rate) -> Trial:
    """Code a large matrix in earnest: its size is foretold from a sample of the rows, which others need not be like."""
    if trial.matrix.codes.numel() <= LARGE:
        return trial
    return replace(trial, bytes=len(encode(contents(trial.matrix), coder=wanted.coder, classes=wanted.classes)))


def secant(attempt: Callable[[float], Trial], x: float, rate: float, out: int) -> Trial:
    """Return the trial whose rate is closest to the one asked for; the rate falls as the step grows."""
    best: Trial | None = None
    low, high = -math.inf, math.inf  # steps known to cost too much, too little
    last: tuple[float, float] | None = None
    for _ in range(EVALUATIONS):
        trial = attempt(x)
        excess = trial.rate(out) - rate
        if best is None or abs(excess) < abs(best.rate(out) - rate):
            best = trial
        if abs(excess) <= CLOSE * rate:
            break
        low, high = (max(low, x), high) if excess > 0 else (low, min(high, x))
        slope = 1.0
        if last is not None and x != last[0]:
            slope = min(2.0, max(0.1, (last[1] - excess) / (x - last[0])))
        last = (x, excess)
        x += min(1.0, max(-1.0, excess / slope))
        if not low < x < high:
            x = (low + high) / 2
        if abs(x - last[0]) < 2.0**-10:
            break
    assert best is not None
    return best

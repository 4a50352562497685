"""How fast this machine computes what a run is made of: a few products, sweeps and codings of small matrices, timed in a second.

The constants of `foreseen.py`. Times are of the CPU that this process gets, divided by its threads: what a quiet machine takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from nearplane.budget.perturb import waterfilled
from nearplane.coding.blob import size
from nearplane.formats.native import contents
from nearplane.lattice.bounds import certify
from nearplane.lattice.factor import factorize
from nearplane.lattice.grid import ProductGrid, QuantizedMatrix
from nearplane.lattice.polish import polish
from nearplane.lattice.scale import Steps
from nearplane.lattice.solvers import SOLVERS, Problem

SIDE, ROWS, TALL = 512, 256, 1536  # inputs and outputs of the matrices, rows of the largest product
REPEATS = 2  # the first warms up


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds of one thread.

    Args:
        product: of a multiplication in a float32 product, and `double` in float64.
        search: of a weight whose step is searched for.
        sweep: of a weight in a sweep by the solver, beside products.
        descent: of a weight in a pass over codes, beside products.
        certificate: of a weight that is certified, beside products.
        coding: of a weight whose coded size is foretold, and `perturb` that is perturbed for a probe, beside products; 0 on grids.
        touch: of a byte of memory that is written and read again.
        threads: that compute.
    """

    product: float
    double: float
    search: float
    sweep: float
    descent: float
    certificate: float
    coding: float
    perturb: float
    touch: float
    threads: int


@cache
def measured(solver: str | None, beam: int, *, coded: bool, threads: int) -> Speed:
    """Time the parts of a run whose layers a solver rounds; once a process and number of threads.

    Args:
        solver: see `lattice/solvers.py`.
        beam: its candidates of a row.
        coded: whether codes are entropy-coded.
        threads: that torch computes with.
    """
    made = torch.Generator().manual_seed(0)
    W, X = torch.randn(ROWS, SIDE, generator=made), torch.randn(TALL, TALL, generator=made)
    H = (X[:, :SIDE].T @ X[:, :SIDE] / TALL).double()
    factor = factorize(H, "activation", damp=0.1)
    steps = Steps(bits=4, symmetric=True, search="mse", storage=torch.float16)
    grid = steps.grid(W, 128)
    matrix = SOLVERS["nearest-plane"].round(Problem(W=W, grid=grid, factor=factor, H=H, shift=factor.shift)).matrix
    zeros = torch.zeros(SIDE, dtype=torch.int32)
    scales = ProductGrid(base=1.0, columns=zeros, column_resolution=1, rows=zeros[:ROWS], row_resolution=1)
    problem = Problem(W=W, grid=grid, factor=factor, H=H, shift=factor.shift, beam=beam)
    D, weights, triangle = X[:SIDE, :SIDE].double(), ROWS * SIDE, ROWS * SIDE**2 / 2
    product = seconds(lambda: X @ X) / TALL**3
    double = seconds(lambda: D @ D) / SIDE**3
    candidates = beam if solver == "k-best" else 1

    def beside(took: float, products: float, doubles: float = 0.0) -> float:
        return max(0.0, took - products * product - doubles * double) / weights

    return Speed(
        product=product,
        double=double,
        search=beside(seconds(lambda: steps.grid(W, 128)), 0.0),
        sweep=beside(seconds(lambda: SOLVERS[solver].round(problem)), candidates * triangle),
        descent=beside(seconds(lambda: polish(W, matrix, H.float(), storage=torch.float16)), 2 * triangle),
        certificate=beside(seconds(lambda: certify(W, W, matrix, H, factor)), 2 * triangle, triangle),
        coding=seconds(lambda: size(contents(QuantizedMatrix(codes=matrix.codes, grid=scales)))) / weights
        if coded
        else 0.0,
        perturb=beside(seconds(lambda: waterfilled(W, factor, 3.0)), triangle) if coded else 0.0,
        touch=seconds(lambda: X + 1) / X.nbytes,
        threads=threads,
    )


def seconds(compute: Callable[[], object]) -> float:
    """Return the CPU seconds of one of this process' threads' worth of work: the best of some repeats."""
    best = float("inf")
    for _ in range(REPEATS):
        began = time.process_time()
        compute()
        best = min(best, time.process_time() - began)
    return best

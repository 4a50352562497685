"""Rows that make up for each other's errors: the second side of a two-sided lattice problem.

A layer's errors E (out, in) cost the network about `tr(G E H E^T)`: H of its inputs, which the solver knows, and `G = E[g g^T]` of
the gradients by its outputs. With `G = U diag(d) U^T`, U unit upper triangular, that is

    sum_i d_i |e_i + sum_{k<i} U_ki e_k|_H^2

so that a row is best solved for its target plus what the rows before it leave to it, as columns are in a sweep. Here rows are
taken some at a time, each with one solve of its own; runs of rows, between which nothing is known, at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice.factor import factorize, one_thread
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.solvers import Solution

DAMP = 0.1  # of G, relative to the mean of its diagonal
PARTS, LEAST_ROWS = 16, 16  # of a run, that are solved one after the other; rows of a part at least


def solve_joined(target: Tensor, together: Sequence[Tensor], solve: Callable[[Tensor], Solution]) -> Solution:
    """Solve rows part by part, each for its target plus what the parts before leave to it.

    Args:
        target: (out, in).
        together: (rows, rows) `E[g g^T]` of the outputs of each run of rows, which make up `out`, in order.
        solve: rounds some rows (rows, in) to a grid that it fits to them.

    Raises:
        NumericalError: the runs do not make up the rows, or one cannot be factored.
    """
    if sum(map(len, together)) != len(target):
        raise NumericalError(f"Gradients of {sum(map(len, together))} outputs are given; expected {len(target)}.")
    feedback, parts, first = [], [], 0
    for G in together:
        factor = factorize(G.double(), "natural", damp=DAMP)
        feedback.append((factor.d.sqrt()[:, None] * factor.U.T).to(target))  # M of G = M^T M, lower triangular
        size = max(LEAST_ROWS, -(-len(G) // PARTS))
        parts.append(torch.arange(first, first + len(G), device=target.device).split(size))
        first += len(G)
    left = torch.zeros_like(target)  # errors of the rows that are solved
    starts = [int(each[0][0]) for each in parts]
    found: list[tuple[Tensor, QuantizedMatrix[Grid]]] = []
    for step in range(max(map(len, parts))):
        here = [each[step] if step < len(each) else each[0][:0] for each in parts]
        wanted = [
            target[rows] + _passed_on(M, left[start : start + len(M)], rows - start)
            for M, rows, start in zip(feedback, here, starts, strict=True)
        ]
        rows = torch.cat(here)
        matrix = solve(torch.cat(wanted)).matrix
        left[rows] = target[rows] - matrix.decode().to(target)
        found.append((rows, matrix))
    return Solution(matrix=_together(found))


def _passed_on(M: Tensor, errors: Tensor, rows: Tensor) -> Tensor:
    """Return (rows, in) what the errors (run, in) of the rows before some leave to these."""
    if not len(rows) or not rows[0]:
        return errors[rows]  # all 0
    first, end = int(rows[0]), int(rows[-1]) + 1
    left = M[first:end, :first] @ errors[:first]
    with one_thread():
        passed: Tensor = torch.linalg.solve_triangular(M[first:end, first:end], left, upper=False)
    return passed


def _together(found: Sequence[tuple[Tensor, QuantizedMatrix[Grid]]]) -> QuantizedMatrix[Grid]:
    """Return the matrix whose rows were found apart."""
    back = torch.cat([rows for rows, _ in found]).argsort()
    codes = torch.cat([matrix.codes for _, matrix in found])[back]

    def of_all(name: str) -> Tensor:
        return torch.cat([getattr(m.grid, name).expand(len(m.codes), -1) for _, m in found])[back]

    return QuantizedMatrix(codes=codes, grid=replace(found[0][1].grid, scale=of_all("scale"), zero=of_all("zero")))

"""Rows that compensate each other's errors: the second side of a two-sided lattice problem.

Errors E (out, in) of a layer cost the network about `tr(G E H E^T)`, with H of its inputs and `G = E[g g^T]` of the
gradients by its outputs. With `G = U diag(d) U^T`, U unit upper triangular, the cost is

    sum_i d_i |e_i + sum_{k<i} U_ki e_k|_H^2

Each row is therefore solved for its target plus the errors that the rows before it pass on, as columns in a sweep.
Rows are solved part by part. Runs of rows, between which G is not known, are solved at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice.factor import factorize, one_thread
from nearplane.lattice.grid import Grid, QuantizedMatrix, stacked
from nearplane.lattice.solvers import Solution

ROW_DAMP = 0.1  # damping of G, relative to the mean of its diagonal
MAX_PARTS, MIN_ROWS = 16, 16  # a run of rows is solved in at most 16 parts, of at least 16 rows


def solve_compensating(target: Tensor, together: Sequence[Tensor], solve: Callable[[Tensor], Solution]) -> Solution:
    """Solve rows part by part, each for its target plus the errors that the parts before it pass on.

    Args:
        target: (out, in) target of all rows.
        together: (rows, rows) `E[g g^T]` of the outputs of each run of rows; the runs make up `out`, in order.
        solve: Function that fits a grid to some rows (rows, in) and rounds them to it.

    Raises:
        NumericalError: The runs do not make up the rows, or a G cannot be factored.
    """
    if sum(map(len, together)) != len(target):
        raise NumericalError(f"Found gradients of {sum(map(len, together))} outputs; expected {len(target)}.")
    feedback, parts, starts = [], [], [0, *accumulate(map(len, together))]
    for G in together:
        factor = factorize(G.double(), "natural", damp=ROW_DAMP)
        feedback.append((factor.d.sqrt()[:, None] * factor.U.T).to(target))  # M of G = M^T M, lower triangular
        size = max(MIN_ROWS, -(-len(G) // MAX_PARTS))
        parts.append([range(len(G))[a : a + size] for a in range(0, len(G), size)])
    errors = torch.zeros_like(target)  # errors of the rows that are solved already
    solved: list[tuple[Tensor, QuantizedMatrix[Grid]]] = []
    for step in range(max(map(len, parts))):
        targets, current = [], []
        for M, each, start in zip(feedback, parts, starts, strict=False):
            if step < len(each):
                rows = torch.arange(start + each[step].start, start + each[step].stop, device=target.device)
                targets.append(target[rows] + _passed_on(M, errors[start : start + len(M)], each[step]))
                current.append(rows)
        rows = torch.cat(current)
        matrix = solve(torch.cat(targets)).matrix
        errors[rows] = target[rows] - matrix.decode().to(target)
        solved.append((rows, matrix))
    return Solution(matrix=_assembled(solved))


def _passed_on(M: Tensor, errors: Tensor, rows: range) -> Tensor:
    """Return (rows, in) errors that these rows take over from the errors (run, in) of the rows before them."""
    first, end = rows.start, rows.stop
    if not first:
        return errors[:end]  # all 0
    carried = M[first:end, :first] @ errors[:first]
    with one_thread():
        passed: Tensor = torch.linalg.solve_triangular(M[first:end, first:end], carried, upper=False)
    return passed


def _assembled(solved: Sequence[tuple[Tensor, QuantizedMatrix[Grid]]]) -> QuantizedMatrix[Grid]:
    """Return the matrix of all rows from parts that were solved separately."""
    inverse = torch.cat([rows for rows, _ in solved]).argsort()
    matrix = stacked([matrix for _, matrix in solved])
    return QuantizedMatrix(codes=matrix.codes[inverse], grid=matrix.grid.of_rows(inverse))

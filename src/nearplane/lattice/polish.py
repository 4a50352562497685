"""After a solve: coordinate descent on the codes, and rounds of new steps and new codes. Any grid, any solver, any device.

A sweep rounds every column once, knowing only what came before it. Polishing comes back: each column moves to the grid point
nearest to its optimum given all others. It is the arithmetic of a nearest-plane sweep with other numbers, so the same kernel
does it (`sweep_cpu.py`). Knows no rules or records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.scale import least_squares_steps
from nearplane.lattice.solve import sweep_of
from nearplane.lattice.sweep_cpu import Columns


def polish(
    W: Tensor, matrix: QuantizedMatrix[Grid], H: Tensor, *, sweeps: int = 1, block: int = 128
) -> QuantizedMatrix[Grid]:
    """Move codes one column at a time, each to the grid point that is best given all other columns, `sweeps` times over.

        t_j = values_j + (E H)_j / H_jj ;  codes_j = round(t_j / scale_j + zero_j) clipped to the grid ;  E = W - values

    The loss `tr(E H E^T)` never rises, but for rounding errors of the dtype of `W`. Blocked: what all columns of a block are
    due is one matrix product, `out * in^2` multiplications a sweep, twice those of the nearest-plane sweep.

    Args:
        W: (out, in) target, float32 or float64; the descent runs in its dtype.
        matrix: codes to begin with, on a `Grid`.
        H: (in, in) positive semi-definite: damped as the problem that is to be solved. Codes of inputs with `H_jj = 0` stay.
        sweeps: over all columns, in their natural order; stops early where a sweep changes nothing.
        block: columns that are due one matrix product.

    Returns:
        Codes no worse, on the same grid.
    """
    grid = matrix.grid
    H = H.to(W.dtype)
    diagonal = torch.where(H.diagonal() > 0, H.diagonal(), torch.inf)  # a dead input stays what it is
    scale, zero = (part.to(W.dtype).expand(len(W), -1).T.contiguous() for part in (grid.scale, grid.zero))
    positions = grid.codebook.position(matrix.codes.T, W.dtype)
    V = (scale[grid.group] * (positions - zero[grid.group])).contiguous()  # (in, out) values
    E = W.T - V
    codes = matrix.codes.T.clone(
        memory_format=torch.contiguous_format
    )  # (in, out); of one row it would be the same memory
    moved = torch.empty_like(E[:block])
    sweep = sweep_of(W)
    for _ in range(sweeps):
        before = codes.clone()
        for a in range(0, len(E), block):
            b = min(a + block, len(E))
            target = (H[a:b] @ E).div_(diagonal[a:b, None]).add_(V[a:b])
            U = H[a:b, a:b] / diagonal[a:b]  # what a column's move means for those after it; only the triangle is read
            delta = moved[: b - a]
            columns = Columns(scale, zero, grid.group[a:b], grid.codebook)
            sweep(target, V[a:b], columns, U.triu(1), codes[a:b], delta)  # delta: the value before minus the value now
            E[a:b] += delta
            V[a:b] -= delta
        if torch.equal(before, codes):
            break
    return replace(matrix, codes=codes.T.contiguous())


def refine(
    W: Tensor,
    H: Tensor,
    grid: Grid,
    storage: torch.dtype,
    solve: Callable[[Grid], QuantizedMatrix[Grid]],
    *,
    rounds: int,
    sweeps: int,
) -> QuantizedMatrix[Grid]:
    """Solve, polish, fit the steps to the codes by least squares, and solve again; keep the best round of every row.

    Args:
        W: (out, in) target.
        H: (in, in) damped as the problem that `solve` solves.
        grid: to begin with.
        storage: dtype in which steps are stored; they are rounded to it before each solve.
        solve: rounds `W` to a grid.
        rounds: solves after the first.
        sweeps: of polish: one after each solve, the others over the best rows of all.
    """
    best, least = None, None
    for remaining in range(rounds, -1, -1):
        matrix = solve(grid)
        if sweeps:
            matrix = polish(W, matrix, H)
        if not rounds:
            best = matrix
            break
        E = W - matrix.decode().to(W.dtype)
        EH = E @ H.to(W.dtype)
        found = (EH * E).sum(1)  # (out,)
        if best is None or least is None:
            best, least = matrix, found
        else:
            best, least = merge((found < least)[:, None], matrix, best), torch.minimum(found, least)
        if remaining:
            grid = least_squares_steps(matrix, EH, H, storage)
    assert best is not None
    return polish(W, best, H, sweeps=sweeps - 1) if sweeps > 1 else best


def merge(chosen: Tensor, one: QuantizedMatrix[Grid], other: QuantizedMatrix[Grid]) -> QuantizedMatrix[Grid]:
    """Take the rows where `chosen` (out, 1) bool from one matrix, the rest from the other; their groups and limits are the same."""
    a, b = one.grid, other.grid
    grid = replace(b, scale=torch.where(chosen, a.scale, b.scale), zero=torch.where(chosen, a.zero, b.zero))
    return QuantizedMatrix(codes=torch.where(chosen, one.codes, other.codes), grid=grid)

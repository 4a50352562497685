"""After a solve: coordinate descent on codes, and on the steps of the grid together with them. Any grid, any solver, any device.

A sweep rounds every column once, knowing only what came before it. Polishing comes back: each column moves to the grid point
nearest to its optimum given all others. It is the arithmetic of a nearest-plane sweep with other numbers, so the same kernel
does it (`kernels.py`). What a pass needs for the codes of some columns, `E H`, is also what their steps need: one product
serves both. Knows no rules or records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.kernels import kernels_of
from nearplane.lattice.kernels_torch import Columns, Tally
from nearplane.lattice.scale import stored
from nearplane.lattice.solvers import Solution

SPAN = 256  # columns, of whole groups where steps are fitted, that one product with the Hessian serves


@dataclass(slots=True)
class State:
    """A matrix during a descent on codes and steps, columns first, so that the rows of a block are contiguous.

    Args:
        grid: groups and codes, not steps.
        scale, zero: (groups, out).
        codes: (in, out) int32.
        E: (in, out) weights minus values.
        H: (in, in).
        diagonal: (in,) of H, infinite for a dead input, which stays what it is.
        gained: (out,) what moves of codes changed the loss by, and `fitted` (out,) what moves of steps did.
    """

    grid: Grid
    scale: Tensor
    zero: Tensor
    codes: Tensor
    E: Tensor
    H: Tensor
    diagonal: Tensor
    gained: Tensor
    fitted: Tensor

    def positions(self, a: int, b: int) -> Tensor:
        """Return (b - a, out) what the codes of some columns stand for, in steps."""
        return self.grid.codebook.position(self.codes[a:b], self.E.dtype)

    def in_steps(self, a: int, b: int) -> Tensor:
        """Return (b - a, out) the same less their zeros."""
        return self.positions(a, b) - self.zero[self.grid.group[a:b]]


class Fit(Protocol):
    """How the steps of a grid are fitted to codes while a descent runs."""

    def fit(self, state: State, a: int, b: int, EH: Tensor) -> bool:
        """Fit the steps of the columns from `a` to `b`, whole groups, everything else given.

        Args:
            state: scale, zero, E and what was gained are kept up to date.
            a, b: columns.
            EH: (b - a, out) `(E H)^T` of these columns, kept up to date.

        Returns:
            Whether any changed.
        """

    def grid(self, state: State, begun: Grid) -> Grid:
        """Return the grid that a descent on `begun` has come to."""


@dataclass(frozen=True, slots=True)
class PlainFit:
    """Steps of a plain grid by least squares, rounded to the dtype in which they are stored."""

    storage: torch.dtype

    def fit(self, state: State, a: int, b: int, EH: Tensor) -> bool:
        """Fit the groups one after another; see `Fit`."""
        group, end, changed = state.grid.group[a:b], a, False
        for g, size in zip(*(part.tolist() for part in group.unique_consecutive(return_counts=True)), strict=True):
            start, end = end, end + size
            v = state.in_steps(start, end)  # (size, out)
            vH = state.H[a:b, start:end] @ v  # (b - a, out)
            own = slice(start - a, end - a)
            energy, due = (v * vH[own]).sum(0), (v * EH[own]).sum(0)  # (out,) each
            old = state.scale[g]
            new = torch.where(energy > 0, old + due / energy, old)
            kept = (new > old / 3) & (new < (old * 3).clamp(max=torch.finfo(self.storage).max))
            move = stored(torch.where(kept, new, old), self.storage) - old
            change = move * (move * energy - 2 * due)
            move = torch.where(kept & (change < 0), move, 0)
            state.fitted += torch.where(move == 0, 0, change)
            state.scale[g] += move
            state.E[start:end] -= v * move
            EH -= vH.mul_(move)
            changed = bool(move.any()) or changed
        return changed

    def grid(self, state: State, begun: Grid) -> Grid:
        """Return the grid with the steps that were fitted."""
        return replace(begun, scale=state.scale.T.to(begun.scale.dtype).contiguous())


def polish(
    W: Tensor,
    matrix: QuantizedMatrix[Grid],
    H: Tensor,
    *,
    sweeps: int = 1,
    storage: torch.dtype | None = None,
    block: int = 128,
) -> QuantizedMatrix[Grid]:
    """Move codes one column at a time, each to the grid point that is best given all other columns, `sweeps` times over.

        t_j = values_j + (E H)_j / H_jj ;  codes_j = round(t_j / scale_j + zero_j) clipped to the grid ;  E = W - values

    With `storage`, the step of every group is fitted by least squares just before its codes move, everything else given:

        scale_g += sum_{j in g} v_j (E H)_j / sum_{j, k in g} v_j H_jk v_k ;  v = codes - zero

    The loss `tr(E H E^T)` never rises, but for rounding errors of the dtype of `W`: a step that would leave [1/3, 3] times its old
    value, or that `storage` cannot hold or rounds to where the loss is larger, stays. Blocked: what all columns of some blocks are
    due is one matrix product, `out * in^2` multiplications a sweep, twice those of the nearest-plane sweep.

    Args:
        W: (out, in) target, float32 or float64; the descent runs in its dtype.
        matrix: codes to begin with, on a `Grid`.
        H: (in, in) positive semi-definite: damped as the problem that is to be solved. Codes of inputs with `H_jj = 0` stay.
        sweeps: over all columns, in their natural order, with `storage` group by group; stops early where a sweep changes nothing.
        storage: dtype in which steps are stored; None: they stay as they are.
        block: columns that a compiled sweep takes at a time.

    Returns:
        Codes no worse, on the same grid but for its steps.
    """
    fit = None if storage is None else PlainFit(storage)
    return descend(W, matrix, H, sweeps=sweeps, fit=fit, block=block)[0]


def refine(
    W: Tensor,
    H: Tensor,
    grid: Grid,
    fit: Callable[[Grid], Fit],
    solve: Callable[[Grid], Solution],
    *,
    rounds: int,
) -> Solution:
    """Solve, descend on steps and codes together, solve again on the fitted steps, keep the better codes of every row.

    No row loses more than the first solve, nor than the last, which is on the grid that is returned: bounds of a solver hold.

    Args:
        W: (out, in) target.
        H: (in, in) damped as the problem that `solve` solves.
        grid: to begin with.
        fit: gives what fits the steps of a grid while codes move.
        solve: rounds `W` to a grid; losses of its solutions, where it tells them, are under `H`.
        rounds: passes over steps and codes together; without any the second solve is left out too.
    """
    found = solve(grid)
    if not rounds:
        return found
    before = _losses(W, found, H)
    matrix, gained = descend(W, found.matrix, H, sweeps=rounds, fit=fit(found.matrix.grid))
    found = solve(matrix.grid)
    chosen = (before + gained <= _losses(W, found, H))[:, None]
    return replace(found, matrix=merge(chosen, matrix, found.matrix), losses=None)  # those of the solve


def merge(chosen: Tensor, one: QuantizedMatrix[Grid], other: QuantizedMatrix[Grid]) -> QuantizedMatrix[Grid]:
    """Take the rows where `chosen` (out, 1) bool from one matrix, the rest from the other; their groups and limits are the same."""
    return QuantizedMatrix(codes=torch.where(chosen, one.codes, other.codes), grid=one.grid.merged(chosen, other.grid))


def _losses(W: Tensor, solution: Solution, H: Tensor) -> Tensor:
    """Return (out,) float64 the loss of every row under `H`."""
    if solution.losses is not None:
        return solution.losses
    E = W - solution.matrix.decode().to(W.dtype)
    return ((E @ H.to(W.dtype)) * E).sum(1, dtype=torch.float64)


def descend(
    W: Tensor, matrix: QuantizedMatrix[Grid], H: Tensor, *, sweeps: int, fit: Fit | None = None, block: int = 128
) -> tuple[QuantizedMatrix[Grid], Tensor]:
    """Descend as `polish` does; also returns (out,) float64 by how much the loss of every row changed."""
    begun, grid, H, dtype = matrix, matrix.grid, H.to(W.dtype), W.dtype
    columns = torch.arange(len(H), device=W.device)
    if fit is not None and bool((grid.group.diff() < 0).any()):  # groups side by side
        columns = torch.argsort(grid.group, stable=True)
        grid, H = replace(grid, group=grid.group[columns]), H[columns[:, None], columns]
        W, matrix = W[:, columns], QuantizedMatrix(codes=matrix.codes[:, columns], grid=grid)
    scale, zero = (
        part.to(dtype).expand(len(W), -1).T.clone(memory_format=torch.contiguous_format)
        for part in (grid.scale, grid.zero)
    )
    state = State(
        grid=grid,
        scale=scale,
        zero=zero,
        codes=matrix.codes.T.clone(memory_format=torch.contiguous_format),
        E=W.T.clone(memory_format=torch.contiguous_format),
        H=H,
        diagonal=torch.where(H.diagonal() > 0, H.diagonal(), torch.inf),
        gained=W.new_zeros(len(W)),
        fitted=W.new_zeros(len(W)),
    )
    for a in range(0, len(H), SPAN):
        state.E[a : a + SPAN] -= state.in_steps(a, a + SPAN).mul_(scale[grid.group[a : a + SPAN]])
    spans = _spans(grid.group, fitted=fit is not None)
    for _ in range(sweeps):
        if not any([_pass(state, a, b, fit, block) for a, b in spans]):
            break
    codes = torch.empty_like(begun.codes)
    codes[:, columns] = state.codes.T
    grid = begun.grid if fit is None else fit.grid(state, begun.grid)
    return QuantizedMatrix(codes=codes, grid=grid), state.gained.double() + state.fitted.double()


def _spans(group: Tensor, *, fitted: bool) -> list[tuple[int, int]]:
    """Return the ranges of columns that one product serves; of whole groups, at least one, where steps are fitted."""
    if not fitted:
        return [(a, min(a + SPAN, len(group))) for a in range(0, len(group), SPAN)]
    spans: list[tuple[int, int]] = []
    end = 0
    for size in group.bincount().tolist():
        start, end = end, end + size
        if spans and end - spans[-1][0] <= SPAN:
            spans[-1] = (spans[-1][0], end)
        elif size:
            spans.append((start, end))
    return spans


def _pass(state: State, a: int, b: int, fit: Fit | None, block: int) -> bool:
    """Fit the steps of the columns from `a` to `b`, if `fit` is given, and move their codes; return whether any changed."""
    EH = state.H[a:b] @ state.E  # (b - a, out), kept up to date for the columns still to come
    changed = fit is not None and fit.fit(state, a, b, EH)
    grid, delta = state.grid, torch.empty_like(EH[:block])
    sweep = kernels_of(EH).sweep
    for i in range(a, b, block):
        k = min(i + block, b)
        V = state.in_steps(i, k).mul_(state.scale[grid.group[i:k]])
        d = state.diagonal[i:k]
        target = EH[i - a : k - a].div_(d[:, None]).add_(V)
        U = state.H[i:k, i:k] / d  # what a column's move means for those after it; only the triangle is read
        tally = Tally(d.masked_fill(d == torch.inf, 0), state.gained, state.codes.new_empty(0), moves=True)
        moved = delta[: k - i]  # the value before minus the value now
        columns = Columns(V, state.scale, state.zero, grid.group[i:k], grid.codebook)
        sweep(target, columns, U.triu(1), state.codes[i:k], moved, tally)
        changed = bool(moved.any()) or changed
        state.E[i:k] += moved
        if k < b:
            EH[k - a :].addmm_(state.H[k:b, i:k], moved)
    return changed

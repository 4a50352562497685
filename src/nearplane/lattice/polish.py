"""Coordinate descent over codes, and over steps together with them, after a solve by any solver on any grid.

A nearest-plane sweep rounds every column once, given only the columns before it. Coordinate descent revisits the
columns: each one moves to the grid point nearest to its optimum given all others. The arithmetic is that of a
nearest-plane sweep with other numbers, so the same kernel does it (`kernels.py`). Codes and steps of some columns both
need `E H`; one matrix product serves both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.kernels import kernels_of
from nearplane.lattice.kernels_torch import Columns, Rounding, Spans, State, Tally
from nearplane.lattice.scale import to_storage
from nearplane.lattice.solvers import Solution

SMALL = 32  # columns of a group that is fitted by compiled kernels, where the device has them
SPAN = 256  # columns per product with the Hessian; whole groups where steps are fitted


class Fit(Protocol):
    """Fit of the steps of a grid to its codes during coordinate descent."""

    @property
    def rounding(self) -> Rounding | None:
        """Return how steps are rounded if kernels of whole passes can do what `fit` does, else None."""

    def fit(self, state: State, a: int, b: int, EH: Tensor) -> None:
        """Fit the steps of the columns from `a` to `b`, which are whole groups, everything else fixed.

        Args:
            state: State of the descent; scale, zero, E, fitted and moved are updated.
            a, b: First column, and the column after the last.
            EH: (b - a, out) `(E H)^T` of these columns, updated.
        """

    def grid(self, state: State, start: Grid) -> Grid:
        """Return the grid `start` with the steps that the descent reached."""


class PlainFit:
    """Fit of a plain grid's steps by least squares, rounded to the dtype in which they are stored."""

    def __init__(self, storage: torch.dtype) -> None:
        self.storage = storage

    def stored(self, steps: Tensor, group: int) -> Tensor:
        """Round the steps (out,) of a group to those that the file holds, in their dtype."""
        del group
        return to_storage(steps, self.storage)  # all below `largest`

    @property
    def largest(self) -> float:
        """Largest step."""
        return torch.finfo(self.storage).max

    @property
    def rounding(self) -> Rounding | None:
        """Return the rounding of `stored`."""
        info = torch.finfo(self.storage)
        mantissa = -round(math.log2(info.eps))
        return Rounding(mantissa, info.smallest_normal * info.eps, 1.0, info.max)

    def fit(self, state: State, a: int, b: int, EH: Tensor) -> None:
        """Fit the groups one after another; see `Fit`."""
        groups, kernel, rounding = groups_in(state, a, b), kernels_of(EH).fit_steps, self.rounding
        if kernel is not None and rounding is not None and EH.dtype == torch.float32 and are_small(groups):
            kernel(state, groups, EH, rounding)
            return
        for g, start, end in groups:
            v = in_steps(state, start, end)  # (size, out)
            vH = state.H[a:b, start:end] @ v  # (b - a, out)
            inner = slice(start - a, end - a)
            energy, product = (v * vH[inner]).sum(0), (v * EH[inner]).sum(0)  # (out,) each
            old = state.scale[g]
            new = torch.where(energy > 0, old + product / energy, old)
            valid = (new > old / 3) & (new < (old * 3).clamp(max=self.largest))
            move = self.stored(torch.where(valid, new, old), g) - old
            change = move * (move * energy - 2 * product)
            move = torch.where(valid & (change < 0), move, 0)
            state.fitted += torch.where(move == 0, 0, change)
            state.scale[g] += move
            state.E[start:end] -= v * move
            EH -= vH.mul_(move)
            state.moved |= move.any()

    def grid(self, state: State, start: Grid) -> Grid:
        """Return the grid `start` with the fitted steps."""
        return replace(start, scale=state.scale.T.to(start.scale.dtype).contiguous())


def groups_in(state: State, a: int, b: int) -> list[tuple[int, int, int]]:
    """Return the groups in the columns from `a` to `b`."""
    return [each for each in state.groups if a <= each[1] < b]


def are_small(groups: Sequence[tuple[int, int, int]]) -> bool:
    """Return whether groups are so small that operations on each of them take longer than their arithmetic."""
    return all(end - start <= SMALL for _, start, end in groups)


def positions(state: State, a: int, b: int) -> Tensor:
    """Return (b - a, out) positions of the codes of some columns, in steps."""
    return state.codebook.position(state.codes[a:b], state.E.dtype)


def in_steps(state: State, a: int, b: int) -> Tensor:
    """Return (b - a, out) positions minus zeros."""
    return positions(state, a, b) - state.zero[state.group[a:b]]


def polish(
    W: Tensor,
    matrix: QuantizedMatrix[Grid],
    H: Tensor,
    *,
    sweeps: int = 1,
    storage: torch.dtype | None = None,
    block: int = 128,
) -> QuantizedMatrix[Grid]:
    """Move codes column by column to the best grid point given all other columns, in `sweeps` passes.

        t_j = values_j + (E H)_j / H_jj ;  codes_j = round(t_j / scale_j + zero_j) clipped to the grid ;  E = W - values

    With `storage`, the step of every group is fitted by least squares just before its codes move, all else fixed:

        scale_g += sum_{j in g} v_j (E H)_j / sum_{j, k in g} v_j H_jk v_k ;  v = codes - zero

    The loss `tr(E H E^T)` never rises, except by rounding errors of the dtype of `W`. A step stays if the new one is
    outside [1/3, 3] times the old one, does not fit `storage`, or would increase the loss after rounding to it. `E H`
    of many columns is one matrix product: `out * in^2` multiplications per sweep, twice those of nearest-plane.

    Args:
        W: (out, in) target, float32 or float64; the descent runs in its dtype.
        matrix: Initial codes on a `Grid`.
        H: (in, in) positive semi-definite, damped as in the problem to solve. Codes of inputs with `H_jj = 0` stay.
        sweeps: Limit of passes over all columns in order, with `storage` by group; fewer if a pass changes nothing.
        storage: Dtype in which steps are stored; None: steps are not fitted.
        block: Columns that a compiled sweep handles at a time.

    Returns:
        Codes with a loss no larger, on the same grid except for fitted steps.
    """
    fit = None if storage is None else PlainFit(storage)
    return descend(W, matrix, H, sweeps=sweeps, fit=fit, block=block)[0]


def refine(
    W: Tensor,
    H: Tensor,
    grid: Grid,
    fit: Callable[[Grid], Fit | None],
    solve: Callable[[Grid], Solution],
    *,
    rounds: int,
) -> Solution:
    """Solve, descend over steps and codes, solve again on the fitted steps, and keep the better codes of every row.

    No row has a larger loss than in either solve. The last one is on the returned grid: bounds of a solver hold.

    Args:
        W: (out, in) target.
        H: (in, in) damped Hessian, the same as in the problem of `solve`.
        grid: Initial grid.
        fit: Constructor of the fit for the steps of a grid, which may return None: steps stay.
        solve: Solver of `W` on a grid; if its solutions have losses, these are under `H`.
        rounds: Number of passes over steps and codes; with 0, only the first solve is done.
    """
    solution = solve(grid)
    if not rounds:
        return solution
    before = _row_losses(W, solution, H)
    matrix, gained = descend(W, solution.matrix, H, sweeps=rounds, fit=fit(solution.matrix.grid))
    solution = solve(matrix.grid)
    chosen = (before + gained <= _row_losses(W, solution, H))[:, None]
    return replace(solution, matrix=merge(chosen, matrix, solution.matrix), losses=None)  # for the solve only


def merge(chosen: Tensor, one: QuantizedMatrix[Grid], other: QuantizedMatrix[Grid]) -> QuantizedMatrix[Grid]:
    """Take rows of `one` where `chosen` (out, 1) is True, else of `other`; both have the same groups and limits."""
    return QuantizedMatrix(codes=torch.where(chosen, one.codes, other.codes), grid=one.grid.merged(chosen, other.grid))


def _row_losses(W: Tensor, solution: Solution, H: Tensor) -> Tensor:
    """Return (out,) float64 loss of every row under `H`."""
    if solution.losses is not None:
        return solution.losses
    E = W - solution.matrix.decode().to(W.dtype)
    return ((E @ H.to(W.dtype)) * E).sum(1, dtype=torch.float64)


def descend(
    W: Tensor, matrix: QuantizedMatrix[Grid], H: Tensor, *, sweeps: int, fit: Fit | None = None, block: int = 128
) -> tuple[QuantizedMatrix[Grid], Tensor]:
    """Descend as `polish` does; also return the (out,) float64 change of the loss of every row."""
    start, grid, H = matrix, matrix.grid, H.to(W.dtype)
    columns = torch.arange(len(H), device=W.device)
    group = torch.empty(0) if fit is None else grid.group.cpu()  # read once, not by every pass
    if bool((group.diff() < 0).any()):  # make the columns of a group adjacent
        columns, group = torch.argsort(grid.group, stable=True), group.sort().values
        grid, H = replace(grid, group=grid.group[columns]), H[columns[:, None], columns]
        W, matrix = W[:, columns], QuantizedMatrix(codes=matrix.codes[:, columns], grid=grid)
    state = state_of(W, matrix, H, _groups(group))
    spans = [(a, min(a + SPAN, len(H))) for a in range(0, len(H), SPAN)] if fit is None else _spans(state.groups)
    rounding = None if fit is None else fit.rounding
    descend_pass = kernels_of(W).descend_pass if fit is None or rounding else None
    if descend_pass is None:
        for a in range(0, len(H), SPAN):
            state.E[a : a + SPAN] -= in_steps(state, a, a + SPAN).mul_(state.scale[grid.group[a : a + SPAN]])
    else:
        ranges = _ranges(state, spans)
    for left in reversed(range(sweeps)):
        if descend_pass is None:
            for a, b in spans:
                _pass(state, a, b, fit, block)
        else:
            descend_pass(state, W, ranges, rounding, begins=left == sweeps - 1)
        if not left or not bool(state.moved):
            break
        state.moved.zero_()
    codes = torch.empty_like(start.codes)
    codes[:, columns] = state.codes.T
    grid = start.grid if fit is None else fit.grid(state, start.grid)
    return QuantizedMatrix(codes=codes, grid=grid), state.gained.double() + state.fitted.double()


def state_of(W: Tensor, matrix: QuantizedMatrix[Grid], H: Tensor, groups: Sequence[tuple[int, int, int]]) -> State:
    """Return the state of a descent before its first pass, whose E is still the target `W` (out, in).

    Args:
        W, matrix, H: See `polish`, in one dtype and with the columns of a group adjacent.
        groups: See `State`.
    """
    scale, zero = matrix.grid.columns_first(W)
    return State(
        group=matrix.grid.group,
        codebook=matrix.grid.codebook,
        scale=scale,
        zero=zero,
        codes=matrix.codes.T.clone(memory_format=torch.contiguous_format),
        E=W.T.clone(memory_format=torch.contiguous_format),
        H=H,
        diagonal=torch.where(H.diagonal() > 0, H.diagonal(), torch.inf),
        gained=W.new_zeros(len(W)),
        fitted=W.new_zeros(len(W)),
        moved=torch.zeros((), dtype=torch.bool, device=W.device),
        groups=groups,
    )


def _groups(group: Tensor) -> list[tuple[int, int, int]]:
    """Return number, first column and column after the last of every group, from (in,) sorted groups on the CPU."""
    numbers, sizes = (part.tolist() for part in group.unique_consecutive(return_counts=True))
    ends = [0, *accumulate(sizes)]
    return list(zip(numbers, ends, ends[1:], strict=False))


def _spans(groups: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Return the column ranges that share one product where steps are fitted: each is one or more whole groups."""
    spans: list[tuple[int, int]] = []
    for _, start, end in groups:
        if spans and end - spans[-1][0] <= SPAN:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return spans


def _ranges(state: State, spans: Sequence[tuple[int, int]]) -> Spans:
    """Return the column ranges of `_spans` for passes that are one kernel each."""
    starts = [start for _, start, _ in state.groups] or [a for a, _ in spans]
    place = {start: i for i, start in enumerate(starts)}
    numbers = [*starts, len(state.E), *(place[a] for a, _ in spans), len(starts)]
    both = torch.tensor(numbers, dtype=torch.int32).to(state.E.device).split([len(starts) + 1, len(spans) + 1])
    return Spans(both[0], both[1], max(b - a for a, b in spans))


def _pass(state: State, a: int, b: int, fit: Fit | None, block: int) -> None:
    """Fit the steps of columns `a` to `b` if `fit` is given, and move their codes."""
    EH = state.H[a:b] @ state.E  # (b - a, out), updated for the later columns
    if fit is not None:
        fit.fit(state, a, b, EH)
    moves_buffer = torch.empty_like(EH[:block])
    sweep = kernels_of(EH).sweep
    for i in range(a, b, block):
        k = min(i + block, b)
        values = in_steps(state, i, k).mul_(state.scale[state.group[i:k]])
        d = state.diagonal[i:k]
        target = EH[i - a : k - a].div_(d[:, None]).add_(values)
        U = state.H[i:k, i:k] / d  # effect of a column's move on later columns; only the triangle is read
        tally = Tally(d.masked_fill(d == torch.inf, 0), state.gained, state.codes.new_empty(0), moves=True)
        moves = moves_buffer[: k - i]  # old minus new values
        columns = Columns(values, state.scale, state.zero, state.group[i:k], state.codebook)
        sweep(target, columns, U.triu(1), state.codes[i:k], moves, tally)
        state.moved |= moves.any()
        state.E[i:k] += moves
        if k < b:
            EH[k - a :].addmm_(state.H[k:b, i:k], moves)

"""Steps on two levels: the search for them from the weights, before a solve, and their least-squares fit to codes.

A kernel of the device searches (`kernels.py`). The fit is under the Hessian: the steps and minima of blocks, then the
integers of groups. Where levels leave no minima (llama.cpp's iq4_xs), steps are rounded to multiples of their block's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from nearplane.lattice.grid import Grid
from nearplane.lattice.kernels import kernels_of
from nearplane.lattice.kernels_torch import State
from nearplane.lattice.polish import Fit, PlainFit, positions
from nearplane.lattice.scale import Steps, refuse_infinite
from nearplane.lattice.superblock import SuperGrid, rounded
from nearplane.number_formats import BlockFormat

INTEGER_OFFSETS = (-1, 0, 1)  # candidates around the best real number, besides the current integer


def fit_blocks(kind: BlockFormat, W: Tensor, importance: Tensor, storage: torch.dtype) -> SuperGrid:
    """Fit every block of `W` (out, in): search real steps and offsets of groups, then stored numbers close to them.

    Args:
        kind: Type of the blocks; its columns divide those of `W`.
        W: (out, in) finite weights.
        importance: (in,) weight of each column's errors, not negative.
        storage: Dtype in which steps and offsets of blocks are stored.

    Raises:
        NumericalError: A step or an offset is too large for this dtype.
    """
    out, columns = W.shape
    blocks, groups = columns // kind.columns, columns // kind.group
    weights = W.float().contiguous()
    spread = importance.to(weights).clamp(min=0)
    h = (spread / spread.mean().clamp(min=torch.finfo(torch.float32).tiny)).clamp(min=1e-6).view(groups, kind.group)
    parts = kernels_of(weights).blocks(kind, weights.view(-1, kind.group), h, storage)
    refuse_infinite(storage, *parts.values())
    counts = {"d": blocks, "dmin": blocks, "sc": groups, "m": groups}
    numbers: Any = {name: part.view(out, counts[name]) for name, part in parts.items()}
    group = torch.arange(columns, device=W.device) // kind.group
    return SuperGrid(**numbers, group=group, low=kind.low, high=kind.high)


class SuperFit:
    """Fit of the steps and offsets of a `SuperGrid`; see `polish.Fit`.

    A block's step and offset, `d` and `dmin`, move by the solution of

        min over x, y of the loss of E - (x v - y u),  v = sc * codes,  u = m

    a pair of numbers per row, rounded to the dtype in which they are stored. Then `sc` and `m` move group by group to the best pair
    of integers near the best real numbers. Moves that do not lower the loss of a row are not made.
    """

    rounding = None  # several numbers make up a step

    def __init__(self, grid: Grid, kind: BlockFormat, storage: torch.dtype) -> None:
        assert isinstance(grid, SuperGrid), f"{kind.name} has steps of blocks"
        self.kind, self.storage = kind, storage
        # (blocks | groups, out) each
        self.parts = {name: part.T.to(grid.d.dtype, copy=True).contiguous() for name, part in grid.parts.items()}

    def grid(self, state: State, start: Grid) -> Grid:
        """Return the grid `start` with the fitted numbers."""
        stored = start.parts
        return start.with_parts({name: part.T.to(stored[name].dtype).contiguous() for name, part in self.parts.items()})

    def fit(self, state: State, a: int, b: int, EH: Tensor) -> None:
        """Fit the blocks of the columns from `a` to `b`, one after another."""
        if (kernel := kernels_of(EH).fit_columns) is not None:
            kernel(self.kind, self.storage, self.parts, state, EH, a)
            return
        for start in range(a, b, self.kind.columns):
            self._block(state, a, b, start, EH)
            if not self.kind.single:
                for first in range(start, start + self.kind.columns, self.kind.group):
                    self._group(state, a, b, first, EH)

    def _block(self, state: State, a: int, b: int, start: int, EH: Tensor) -> None:
        """Fit step and offset of the block that begins with column `start`."""
        end, block = start + self.kind.columns, start // self.kind.columns
        group, inner = state.group[start:end], slice(start - a, end - a)
        H = state.H[a:b, start:end]
        v = positions(state, start, end).mul_(self.parts["sc"][group])  # (size, out)
        vH = H @ v  # (b - a, out)
        vv, vr = (v * vH[inner]).sum(0), (v * EH[inner]).sum(0)  # (out,) each
        d = self.parts["d"][block]
        if not self.kind.m:
            x = self._step(d, vr / vv, vv > 0)
            change = x * (x * vv - 2 * vr)
            x = torch.where(change < 0, x, 0)
            self._move_block(state, block, x, None)
            self._apply(state, EH, start, v * x, vH.mul_(x), torch.where(x == 0, 0, change))
            return
        u = self.parts["m"][group]
        uH = H @ u
        uu, uv, ur = (u * uH[inner]).sum(0), (u * vH[inner]).sum(0), (u * EH[inner]).sum(0)
        determinant = vv * uu - uv * uv
        independent = determinant > 1e-5 * vv * uu  # else v and u are nearly parallel, and one of them suffices
        x = self._step(d, torch.where(independent, (vr * uu - uv * ur) / determinant, vr / vv), vv > 0)
        y = self._offset(self.parts["dmin"][block], torch.where(uu > 0, (uv * x - ur) / uu, 0))
        change = x * x * vv - 2 * x * y * uv + y * y * uu - 2 * x * vr + 2 * y * ur
        better = change < 0
        x, y = torch.where(better, x, 0), torch.where(better, y, 0)
        self._move_block(state, block, x, y)
        self._apply(state, EH, start, v * x - u * y, vH.mul_(x).sub_(uH.mul_(y)), torch.where(better, change, 0))

    def _step(self, d: Tensor, move: Tensor, known: Tensor) -> Tensor:
        """Return (out,) changes of steps, to stored numbers of the same sign within [1/3, 3] times the old ones."""
        new = rounded(torch.where(known, d + move, d), self.storage)
        ratio = new / d
        return torch.where(torch.isfinite(new) & (ratio > 1 / 3) & (ratio < 3), new - d, 0)

    def _offset(self, dmin: Tensor, move: Tensor) -> Tensor:
        """Return (out,) changes of offsets, to stored numbers that are not negative if integers multiply them."""
        new = dmin + move if self.kind.single else (dmin + move).clamp(min=0)
        stored = new.to(self.storage).to(dmin.dtype)
        return torch.where(torch.isfinite(stored), stored - dmin, 0)

    def _move_block(self, state: State, block: int, x: Tensor, y: Tensor | None) -> None:
        """Change the step and offset of a block."""
        self.parts["d"][block] += x
        if y is not None:
            self.parts["dmin"][block] += y
        count = self.kind.columns // self.kind.group
        for group in range(block * count, (block + 1) * count):
            self._update_grid(state, group)

    def _update_grid(self, state: State, group: int) -> None:
        """Update scale and zero of a group from its numbers."""
        block = group * self.kind.group // self.kind.columns
        scale = self.parts["d"][block] * self.parts["sc"][group]
        state.scale[group] = scale
        if self.kind.m:
            state.zero[group] = self.parts["dmin"][block] * self.parts["m"][group] / scale

    def _group(self, state: State, a: int, b: int, start: int, EH: Tensor) -> None:
        """Fit the integers of the group that begins with column `start`."""
        end, g, block = start + self.kind.group, start // self.kind.group, start // self.kind.columns
        inner, H = slice(start - a, end - a), state.H[a:b, start:end]
        d, sc = self.parts["d"][block], self.parts["sc"][g]
        q = positions(state, start, end)  # (size, out)
        qH = H @ q  # (b - a, out)
        qq, qr = (q * qH[inner]).sum(0), (q * EH[inner]).sum(0)  # (out,) each
        ones = H.sum(1)  # (b - a,)
        if self.kind.m:
            total, q1, r1 = ones[inner].sum().clamp(min=1e-30), qH[inner].sum(0), EH[inner].sum(0)
            determinant = qq * total - q1 * q1
            x = torch.where(determinant > 1e-5 * qq * total, (qr * total - q1 * r1) / determinant, qr / qq)
        else:
            x = qr / qq
        middle = (sc + torch.where(qq > 0, x, 0) / d).round()
        candidates = torch.stack([sc, *(middle + step for step in INTEGER_OFFSETS)]).clamp_(*self.kind.sc)  # (4, out)
        candidates = torch.where((candidates == 0) | (candidates * sc < 0), sc, candidates)
        x = d * (candidates - sc)
        change = x * (x * qq - 2 * qr)
        if self.kind.m:
            dmin, m = self.parts["dmin"][block], self.parts["m"][g]
            shift = torch.where(dmin > 0, (q1 * x - r1) / total / dmin, 0)
            integers = (m + shift).round_().clamp_(0, self.kind.m)
            y = dmin * (integers - m)
            change += y * (y * total - 2 * x * q1 + 2 * r1)
        least, best = change.min(0)
        better = least < 0
        index = best[None]
        self.parts["sc"][g] = torch.where(better, candidates.gather(0, index)[0], sc)
        x = torch.where(better, x.gather(0, index)[0], 0)
        moves, H_moves = q.mul_(x), qH.mul_(x)
        if self.kind.m:
            self.parts["m"][g] = torch.where(better, integers.gather(0, index)[0], m)
            y = torch.where(better, y.gather(0, index)[0], 0)
            moves, H_moves = moves.sub_(y), H_moves.sub_(ones[:, None] * y)
        self._update_grid(state, g)
        self._apply(state, EH, start, moves, H_moves, torch.where(better, least, 0))

    def _apply(self, state: State, EH: Tensor, start: int, moves: Tensor, H_moves: Tensor, change: Tensor) -> None:
        """Subtract (size, out) changes of values from E, and (b - a, out) their products with H from EH."""
        state.fitted += change
        state.E[start : start + len(moves)] -= moves
        EH -= H_moves
        state.moved |= change.any()


def multiples(target: Tensor, importance: Tensor, steps: Steps) -> tuple[Grid, Callable[[Grid], Fit]]:
    """Fit one step to every group, and round the steps of a block to multiples of the largest one's share.

    See `fits.GridFit`; `importance` is ignored.
    """
    del importance
    kind, grid = steps.format, steps.grid(target)
    assert isinstance(kind, BlockFormat), "only formats of blocks name this fit"
    used = (target.reshape(*grid.scale.shape, -1) != 0).any(-1)  # a group of zeros has step 1, which no other needs
    wanted = grid.scale.masked_fill(~used, 0).unflatten(1, (-1, kind.columns // kind.group))
    d = rounded(wanted.amax(-1) / kind.sc[1], steps.stored_in)
    sc = _multiple(wanted, d[..., None], kind.sc[1]).flatten(1).to(torch.int32)
    made = SuperGrid(d=d, sc=sc, group=grid.group, low=grid.low, high=grid.high, levels=grid.levels)
    return made, lambda start: MultiplesFit(cast(SuperGrid, start), kind, steps.stored_in)


class MultiplesFit(PlainFit):
    """Fit of steps by least squares, rounded to multiples of their block's number, which stays."""

    def __init__(self, grid: SuperGrid, kind: BlockFormat, storage: torch.dtype) -> None:
        super().__init__(storage)
        self._kind, self._d = kind, grid.d.repeat_interleave(kind.columns // kind.group, 1).T  # (groups, out)

    @property
    def rounding(self) -> None:
        """None: kernels of whole passes round to floats."""

    def stored(self, steps: Tensor, group: int) -> Tensor:
        """Round the steps (out,) of a group."""
        d = self._d[group].to(steps.dtype)
        return d * _multiple(steps, d, self._kind.sc[1])

    def grid(self, state: State, start: Grid) -> Grid:
        """Return the grid `start` with the fitted steps."""
        d = self._d.to(state.scale.dtype)
        sc = _multiple(state.scale, d, self._kind.sc[1]).T.to(torch.int32).contiguous()
        return replace(cast(SuperGrid, start), sc=sc)


def _multiple(steps: Tensor, d: Tensor, largest: int) -> Tensor:
    """Return the whole numbers from 1 to `largest` of which steps are nearest to d times one."""
    return (steps / d).round_().clamp_(1, largest)

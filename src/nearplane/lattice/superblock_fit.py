"""Steps on two levels fitted to codes by least squares under the Hessian: those of blocks, then the integers of their groups.

`superblock_search.py` finds them to begin with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearplane.lattice.grid import Grid
from nearplane.lattice.number_formats import BlockType
from nearplane.lattice.polish import State
from nearplane.lattice.superblock import SuperGrid

AROUND = (-1, 0, 1)  # integers tried about the best real number, beside the one that is there
TINY = 2.0**-24  # the smallest number of 16-bit floating point


def rounded(numbers: Tensor) -> Tensor:
    """Return numbers as 16-bit floating point holds them, in their dtype; never 0, infinite where they are too large."""
    short = numbers.half().to(numbers.dtype)
    return torch.where(short == 0, torch.where(numbers < 0, -TINY, TINY), short)


class SuperFit:
    """What `polish.Fit` asks for, of a `SuperGrid`.

    A block's step and offset, `d` and `dmin`, move by the solution of

        min over x, y of the loss of E - (x v - y u),  v = sc * codes,  u = m

    a pair of numbers a row, rounded to 16-bit floating point; then `sc` and `m` of one group after another, of some pairs of
    integers about the best real ones the best pair. A move that would not lower the loss of a row is not made.
    """

    def __init__(self, grid: Grid, kind: BlockType) -> None:
        assert isinstance(grid, SuperGrid), f"{kind.name} has steps on two levels"
        self.kind = kind
        # (blocks | groups, out) each
        self.parts = {name: part.T.to(grid.d.dtype).contiguous() for name, part in grid.parts.items()}

    def grid(self, state: State, begun: Grid) -> Grid:
        """Return the grid with the numbers that were fitted."""
        stored = begun.parts
        return begun.with_parts({name: part.T.to(stored[name].dtype).contiguous() for name, part in self.parts.items()})

    def fit(self, state: State, a: int, b: int, EH: Tensor) -> bool:
        """Fit the blocks of the columns from `a` to `b`, one after another."""
        changed = False
        for start in range(a, b, self.kind.columns):
            changed |= self._block(state, a, b, start, EH)
            if not self.kind.single:
                for first in range(start, start + self.kind.columns, self.kind.group):
                    changed |= self._group(state, a, b, first, EH)
        return changed

    def _block(self, state: State, a: int, b: int, start: int, EH: Tensor) -> bool:
        """Fit step and offset of the block that begins with column `start`."""
        end, block = start + self.kind.columns, start // self.kind.columns
        group, own = state.grid.group[start:end], slice(start - a, end - a)
        H = state.H[a:b, start:end]
        v = state.positions(start, end).mul_(self.parts["sc"][group])  # (size, out)
        vH = H @ v  # (b - a, out)
        vv, vr = (v * vH[own]).sum(0), (v * EH[own]).sum(0)  # (out,) each
        d = self.parts["d"][block]
        if not self.kind.m:
            x = _step(d, vr / vv, vv > 0)
            change = x * (x * vv - 2 * vr)
            x = torch.where(change < 0, x, 0)
            self._moved(state, block, x, None)
            return self._apply(state, EH, start, v * x, vH.mul_(x), torch.where(x == 0, 0, change))
        u = self.parts["m"][group]
        uH = H @ u
        uu, uv, ur = (u * uH[own]).sum(0), (u * vH[own]).sum(0), (u * EH[own]).sum(0)
        determinant = vv * uu - uv * uv
        apart = determinant > 1e-5 * vv * uu  # else one of the two says it all
        x = _step(d, torch.where(apart, (vr * uu - uv * ur) / determinant, vr / vv), vv > 0)
        y = self._offset(self.parts["dmin"][block], torch.where(uu > 0, (uv * x - ur) / uu, 0))
        change = x * x * vv - 2 * x * y * uv + y * y * uu - 2 * x * vr + 2 * y * ur
        better = change < 0
        x, y = torch.where(better, x, 0), torch.where(better, y, 0)
        self._moved(state, block, x, y)
        return self._apply(state, EH, start, v * x - u * y, vH.mul_(x).sub_(uH.mul_(y)), torch.where(better, change, 0))

    def _offset(self, dmin: Tensor, move: Tensor) -> Tensor:
        """Return (out,) by how much offsets move: to numbers that are stored, not negative where integers multiply them."""
        wanted = dmin + move if self.kind.single else (dmin + move).clamp(min=0)
        short = wanted.half().to(dmin.dtype)
        return torch.where(torch.isfinite(short), short - dmin, 0)

    def _moved(self, state: State, block: int, x: Tensor, y: Tensor | None) -> None:
        """Note new steps and offsets of a block."""
        self.parts["d"][block] += x
        if y is not None:
            self.parts["dmin"][block] += y
        count = self.kind.columns // self.kind.group
        for group in range(block * count, (block + 1) * count):
            self._note(state, group)

    def _note(self, state: State, group: int) -> None:
        """Set scale and zero of a group to what its numbers say."""
        block = group * self.kind.group // self.kind.columns
        scale = self.parts["d"][block] * self.parts["sc"][group]
        state.scale[group] = scale
        if self.kind.m:
            state.zero[group] = self.parts["dmin"][block] * self.parts["m"][group] / scale

    def _group(self, state: State, a: int, b: int, start: int, EH: Tensor) -> bool:
        """Fit the integers of the group that begins with column `start`."""
        end, g, block = start + self.kind.group, start // self.kind.group, start // self.kind.columns
        own, H = slice(start - a, end - a), state.H[a:b, start:end]
        d, sc = self.parts["d"][block], self.parts["sc"][g]
        q = state.positions(start, end)  # (size, out)
        qH = H @ q  # (b - a, out)
        qq, qr = (q * qH[own]).sum(0), (q * EH[own]).sum(0)  # (out,) each
        ones = H.sum(1)  # (b - a,)
        if self.kind.m:
            total, q1, r1 = ones[own].sum().clamp(min=1e-30), qH[own].sum(0), EH[own].sum(0)
            determinant = qq * total - q1 * q1
            x = torch.where(determinant > 1e-5 * qq * total, (qr * total - q1 * r1) / determinant, qr / qq)
        else:
            x = qr / qq
        middle = (sc + torch.where(qq > 0, x, 0) / d).round()
        tried = torch.stack([sc, *(middle + step for step in AROUND)]).clamp_(*self.kind.sc)  # (4, out)
        tried = torch.where((tried == 0) | (tried * sc < 0), sc, tried)
        x = d * (tried - sc)
        change = x * (x * qq - 2 * qr)
        if self.kind.m:
            dmin, m = self.parts["dmin"][block], self.parts["m"][g]
            wanted = torch.where(dmin > 0, (q1 * x - r1) / total / dmin, 0)
            integers = (m + wanted).round_().clamp_(0, self.kind.m)
            y = dmin * (integers - m)
            change += y * (y * total - 2 * x * q1 + 2 * r1)
        least, best = change.min(0)
        better = least < 0
        picked = best[None]
        self.parts["sc"][g] = torch.where(better, tried.gather(0, picked)[0], sc)
        x = torch.where(better, x.gather(0, picked)[0], 0)
        moved, through = q.mul_(x), qH.mul_(x)
        if self.kind.m:
            self.parts["m"][g] = torch.where(better, integers.gather(0, picked)[0], m)
            y = torch.where(better, y.gather(0, picked)[0], 0)
            moved, through = moved.sub_(y), through.sub_(ones[:, None] * y)
        self._note(state, g)
        return self._apply(state, EH, start, moved, through, torch.where(better, least, 0))

    def _apply(self, state: State, EH: Tensor, start: int, moved: Tensor, through: Tensor, change: Tensor) -> bool:
        """Take (size, out) what values moved by, and (b - a, out) what that is through the Hessian, off the errors."""
        state.fitted += change
        state.E[start : start + len(moved)] -= moved
        EH -= through
        return bool(change.any())


def _step(d: Tensor, move: Tensor, known: Tensor) -> Tensor:
    """Return (out,) by how much steps move: to numbers that are stored, of the same sign, within a third and three times."""
    wanted = rounded(torch.where(known, d + move, d))
    ratio = wanted / d
    return torch.where(torch.isfinite(wanted) & (ratio > 1 / 3) & (ratio < 3), wanted - d, 0)

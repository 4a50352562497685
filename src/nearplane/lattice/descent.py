"""What a descent on codes and steps has in hand, and how it fits the steps of plain grids. `polish.py` descends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from nearplane.lattice.grid import Grid
from nearplane.lattice.scale import stored


@dataclass(slots=True)
class State:
    """A matrix during a descent, columns first, so that the rows of a block are contiguous.

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

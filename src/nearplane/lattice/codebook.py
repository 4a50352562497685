"""Rounding of a position to a code: the nearest integer between two limits, or the nearest entry of a table of levels.

`round_code` and `position_of` in `kernels_cpu.py` are the same for compiled kernels; there are no other copies of the
formula. A position is a weight in steps, `weight / scale + zero`; `Codebook.position` returns the position of a code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nearplane.errors import RecipeError


class Table(NamedTuple):
    """A codebook for compiled kernels, all in one floating-point type.

    Args:
        low, high: Limits of integer codes, infinite where there are none.
        levels: Ascending positions of codes 0, 1, ...; empty where codes are integers.
        middles: Midpoints of neighbouring levels.
    """

    low: Any
    high: Any
    levels: npt.NDArray[Any]
    middles: npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Codebook:
    """The codes of a grid and their positions.

    Args:
        low, high: Limits of the codes, inclusive; None where codes are unbounded.
        levels: (codes,) ascending positions of the codes 0, 1, ..., on the CPU; None where a code is its own position.
    """

    low: int | None = None
    high: int | None = None
    levels: Tensor | None = None
    _placed: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.levels is None:
            return
        if self.levels.dim() != 1 or len(self.levels) < 2 or bool((self.levels.diff() <= 0).any()):
            raise RecipeError(f"The levels are {self.levels.tolist()}; expected two or more ascending numbers.")
        if (self.low, self.high) != (0, len(self.levels) - 1):
            raise RecipeError(
                f"{len(self.levels)} levels have the codes 0 to {len(self.levels) - 1}, not {self.low} to {self.high}."
            )

    @property
    def bounded(self) -> bool:
        """Whether there are positions beyond the codes."""
        return self.low is not None or self.high is not None

    @property
    def widest(self) -> float:
        """Return the largest distance between the positions of neighbouring codes, in steps."""
        return 1.0 if self.levels is None else float(self.levels.diff().max())

    def nearest(self, position: Tensor) -> Tensor:
        """Return the nearest codes, in the shape and dtype of positions; ties: the even integer or the lower level."""
        if self.levels is not None:
            return torch.bucketize(position, self.on(position.device, position.dtype)[1]).to(position.dtype)
        code = position.round()
        return code.clamp_(self.low, self.high) if self.bounded else code

    def position(self, codes: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the positions of codes, in steps."""
        if self.levels is None:
            return codes if dtype is None else codes.to(dtype)
        levels, _ = self.on(codes.device, dtype or codes.dtype)
        return levels[codes.long().clamp(0, len(levels) - 1)]

    def on(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the levels and the midpoints of neighbouring ones on a device, copied there on first use."""
        assert self.levels is not None, "only levels are copied"
        if (device, dtype) not in self._placed:
            levels = self.levels.to(device, dtype)
            self._placed[device, dtype] = levels, (levels[1:] + levels[:-1]) / 2
        return self._placed[device, dtype]

    @property
    def limits(self) -> tuple[float, float]:
        """Return the positions half a (widest) step below and above all codes; infinite where codes are unbounded."""
        low, high = (self.low, self.high) if self.levels is None else (float(self.levels[0]), float(self.levels[-1]))
        half = 0.5 * self.widest
        return -math.inf if low is None else low - half, math.inf if high is None else high + half

    def outside(self, position: Tensor) -> Tensor:
        """Return a bool tensor that marks the positions beyond the limits."""
        low, high = self.limits
        return (position < low) | (position > high)

    def table(self, dtype: torch.dtype) -> Table:
        """Return the codebook for kernels that compute in `dtype`, float32 or float64."""
        kind = np.float32 if dtype == torch.float32 else np.float64
        low, high = (-np.inf if self.low is None else self.low), (np.inf if self.high is None else self.high)
        levels: npt.NDArray[Any] = np.empty(0, kind) if self.levels is None else self.levels.cpu().numpy().astype(kind)
        return Table(kind(low), kind(high), levels, (levels[1:] + levels[:-1]) / kind(2))

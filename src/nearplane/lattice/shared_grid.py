"""Grids whose steps are 8-bit floats divided by one number that all share, as NVFP4 stores them.

    value = (block / divisor) * level

Solvers, descents and certificates use such a grid like any other: its `scale` is `block / divisor`. The divisor stretches
the range of the weights over that of the 8-bit floats. Layers that a runtime joins to one product share it, see `divisor_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from nearplane import number_formats
from nearplane.errors import NumericalError
from nearplane.lattice.grid import Grid
from nearplane.lattice.kernels_torch import Rounding, State
from nearplane.lattice.polish import Fit, PlainFit
from nearplane.lattice.scale import Steps, least_error, other_steps

E4M3 = torch.tensor([level for level in number_formats.E4M3 if level > 0])  # all positive values, ascending
SMALLEST, LARGEST = float(E4M3[0]), float(E4M3[-1])  # 2^-9 and 448
UNIT_PEAK = LARGEST * number_formats.E2M1[-1]  # largest magnitude of weights in NVFP4 whose divisor is 1
WINDOW = range(-20, 9)  # candidates for a block's step around the one that covers its weights, in places of E4M3


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedGrid(Grid):
    """A grid whose steps are 8-bit floats divided by a number that all groups share.

    Args:
        block: (out, groups) step of every group before the division, exact in E4M3.
        divisor: Positive number, exact in float32.
        scale: (out, groups) `block / divisor` in the dtype of `block`; computed.
        zero: (out, groups) zeros; computed.
    """

    block: Tensor
    divisor: float
    scale: Tensor = field(init=False)
    zero: Tensor = field(init=False)

    fit: ClassVar[str] = "shared"

    def __post_init__(self) -> None:
        scale = divided(self.block, self.divisor)
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "zero", torch.zeros_like(scale))

    @property
    def parts(self) -> dict[str, Tensor]:
        """Return the numbers that make up the grid, by name, rows first."""
        return {"block": self.block}

    def same_as(self, other: object) -> bool:
        """Return whether another grid has the same steps, divisor, groups and levels."""
        return isinstance(other, SharedGrid) and self.divisor == other.divisor and Grid.same_as(self, other)


def divided(block: Tensor, divisor: float) -> Tensor:
    """Return the steps `block / divisor`, rounded to float32, in the dtype of `block`.

    The divisor becomes a tensor on the device: by a number, CUDA would multiply with its reciprocal and round otherwise.
    """
    steps: Tensor = block.float() / torch.full((), divisor, dtype=torch.float32, device=block.device)
    return steps.to(block.dtype)


def divisor_of(peak: float, highest: float) -> float:
    """Return the divisor of numbers of at most this magnitude, in float32: `448 * highest / peak`, and 1 for zeros.

    Args:
        peak: Largest magnitude, for weights among all matrices that share the divisor.
        highest: Largest level.

    Raises:
        NumericalError: The numbers are too small or too large for float32.
    """
    divisor = float(torch.tensor(LARGEST * highest / peak if peak else 1.0, dtype=torch.float32))
    if not 0 < divisor < float("inf"):
        raise NumericalError(
            f"The largest magnitude is {peak:.3g}, whose global scale does not fit float32. {other_steps(torch.float32)}"
        )
    return divisor


def shared(target: Tensor, importance: Tensor, steps: Steps) -> tuple[Grid, Callable[[Grid], Fit]]:
    """Choose the step of every group among all E4M3 values by the error of its weights; see `fits.GridFit`.

    The error of a weight counts as much as the squared importance of its column, the diagonal of the Hessian.
    """
    groups, levels = steps.groups(target), steps.codebook.levels
    assert levels is not None, "only formats with levels name this fit"
    levels = levels.to(target)
    peak = float(target.abs().max()) if steps.peak is None else steps.peak
    divisor = divisor_of(peak, float(levels[-1]))
    values = E4M3.to(target)
    scales = divided(values, divisor)
    place = torch.bucketize(groups.abs().amax(-1) / levels[-1], scales)
    places = ((place + offset).clamp_(0, len(values) - 1) for offset in WINDOW)
    best = least_error(groups, importance, steps.codebook, ((each, scales[each]) for each in places))
    grid = SharedGrid(block=values[best], divisor=divisor, **steps.columns(target))
    return grid, lambda _: SharedFit(divisor)


class SharedFit(PlainFit):
    """Fit of the steps by least squares, rounded to E4M3 values over the divisor."""

    def __init__(self, divisor: float) -> None:
        self.divisor = divisor  # exact in float32

    def stored(self, steps: Tensor, group: int) -> Tensor:
        """Round steps to those that the file holds, in their dtype."""
        return divided(self.blocks(steps), self.divisor).to(steps.dtype)

    @property
    def largest(self) -> float:
        """Largest step."""
        return LARGEST / self.divisor

    @property
    def rounding(self) -> Rounding:
        """Return the rounding of `stored`: E4M3 has three bits behind the point."""
        return Rounding(3, SMALLEST, self.divisor, self.largest)

    def grid(self, state: State, start: Grid) -> Grid:
        """Return the grid `start` with the fitted steps."""
        assert isinstance(start, SharedGrid)
        return start.with_parts({"block": self.blocks(state.scale.T).to(start.block.dtype).contiguous()})

    def blocks(self, steps: Tensor) -> Tensor:
        """Return the E4M3 values, as float32, of steps."""
        scaled = (steps * self.divisor).clamp(SMALLEST, LARGEST)
        return scaled.to(torch.float8_e4m3fn).float()

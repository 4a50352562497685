"""Steps of a grid from the range of the weights or by search; `polish.py` fits them to codes later.

Steps are rounded to their storage dtype *before* any error is measured with them. Functions take weights (..., g) with
a group along the last axis, so that one call fits all groups of a matrix or one group of every row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice.grid import Codebook, Grid
from nearplane.lattice.kernels import kernels_of
from nearplane.number_formats import E4M3, NumberFormat

Search = Literal["minmax", "mse"]
SHRINKS = tuple(1 - 0.8 * i / 80 for i in range(80))  # factors by which the search narrows the range
# the same for eight-bit floats: half a step gives them the same levels in half the range
OCTAVE = tuple(shrink for shrink in SHRINKS if shrink > 0.5)


class StepStorage(NamedTuple):
    """How the steps of a matrix are stored.

    Args:
        dtype: Dtype of the steps, if the number format does not define it.
        peak: Largest magnitude of a weight among all matrices with which this one shares a global scale, for number formats
            that have one; None: of this matrix.
    """

    dtype: torch.dtype
    peak: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Settings for the initial fit of steps to weights.

    Args:
        format: Number format: symmetric, with integer zero points, or with levels and no zero points.
        search: Method: "minmax" takes the range of the weights, "mse" the narrowed range with the least p-norm error.
        storage: Dtype in which steps are stored if the format does not define it.
        peak: See `StepStorage`.
    """

    format: NumberFormat
    search: Search
    storage: torch.dtype
    peak: float | None = None

    @property
    def stored_in(self) -> torch.dtype:
        """Dtype in which steps are stored."""
        dtype: torch.dtype = self.storage if self.format.steps is None else getattr(torch, self.format.steps)
        return dtype

    @property
    def codebook(self) -> Codebook:
        """The codes and their positions."""
        levels = None if self.format.levels is None else torch.tensor(self.format.levels, dtype=torch.float64)
        return Codebook(low=self.format.low, high=self.format.high, levels=levels)

    def groups(self, W: Tensor) -> Tensor:
        """Return (out, groups, g) the groups of every row of `W` (out, in)."""
        groups: Tensor = W.unflatten(1, (-1, self.format.group or W.shape[1]))
        return groups

    def columns(self, W: Tensor) -> dict[str, Any]:
        """Return what a grid of `W` (out, in) has besides its steps: the group of every column, and the codebook."""
        book, group = self.codebook, torch.arange(W.shape[1], device=W.device) // (self.format.group or W.shape[1])
        return {"group": group, "low": book.low, "high": book.high, "levels": book.levels}

    def grid(self, W: Tensor) -> Grid:
        """Fit every group of `W` (out, in)."""
        scale, zero = self.fit(self.groups(W))
        return Grid(scale=scale, zero=zero, **self.columns(W))

    def fit(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and zero (...) for weights (..., g)."""
        minimum, maximum = weights.amin(-1).clamp(max=0), weights.amax(-1).clamp(min=0)
        if self.search == "minmax":
            return self._from_range(minimum, maximum)
        shrinks = weights.new_tensor(OCTAVE if self.format.levels == E4M3 else SHRINKS).view(-1, *[1] * minimum.dim())
        scales, zeros = self._from_range(minimum * shrinks, maximum * shrinks)  # (candidates, ...)
        flat = weights.reshape(-1, weights.shape[-1]), scales.flatten(1), zeros.flatten(1)
        # (1, ...) index of the candidate with the least error; ties: the first
        best = kernels_of(weights).search(*flat, self.codebook).view(1, *weights.shape[:-1])
        return scales.gather(0, best)[0], zeros.gather(0, best)[0]

    def _from_range(self, minimum: Tensor, maximum: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest step, and the zero, of a grid that covers `minimum` <= 0 to `maximum` >= 0."""
        low, high, levels = self.format.low, self.format.high, self.format.levels
        if self.format.symmetric:
            ends = (low, high) if levels is None else (levels[0], levels[-1])
            scale = stored(torch.maximum(minimum / ends[0], maximum / ends[1]), self.stored_in)
            return scale, torch.zeros_like(scale)
        scale = stored((maximum - minimum) / high, self.stored_in)
        return scale, (-minimum / scale).round_().clamp_(low, high)


def stored(scale: Tensor, storage: torch.dtype) -> Tensor:
    """Round steps as `to_storage` does, and check that they are not too large; see `refuse_infinite`."""
    rounded = to_storage(scale, storage)
    refuse_infinite(storage, rounded)
    return rounded


def refuse_infinite(storage: torch.dtype, *rounded: Tensor) -> None:
    """Refuse numbers of a grid that became infinite when they were rounded to `storage`; `fits.check_steps` refuses small ones.

    Raises:
        NumericalError: A number is not finite.
    """
    if not bool(torch.stack([torch.isfinite(part).all() for part in rounded]).all()):
        raise NumericalError(f"A step does not fit {storage}: the weights are too large for it. {other_steps(storage)}")


def other_steps(storage: torch.dtype) -> str:
    """Return a sentence with what to do about weights whose steps a dtype cannot store."""
    others = {
        torch.float16: ", or use a --format whose steps have the dtype of a bfloat16 model: compressed-tensors or mlx",
        torch.float8_e4m3fn: ", or use --grid mxfp4",
    }
    return f"Leave the layer unquantized with --ignore{others.get(storage, '')}."


def too_small(largest: float, storage: torch.dtype, lost: str = "") -> NumericalError:
    """Return the error about weights of at most this magnitude whose steps are too small for a dtype, and what they lose."""
    return NumericalError(
        f"The steps of these weights, the largest of which is {largest:.2g}, are too small for {storage}{lost}. "
        f"{other_steps(storage)}"
    )


def to_storage(scale: Tensor, storage: torch.dtype) -> Tensor:
    """Round steps to values of `storage`, in the dtype of `scale`; a group of zeros gets step 1."""
    info = torch.finfo(storage)
    tiny = info.smallest_normal * info.eps
    return scale.to(storage).to(scale.dtype).clamp(min=tiny).masked_fill(scale == 0, 1)


def least_error(
    groups: Tensor, importance: Tensor, codebook: Codebook, trials: Iterable[tuple[Tensor, Tensor]]
) -> Tensor:
    """Return which of several steps has the least error in every group; of equal ones the first.

    The error of a weight, rounded to the nearest level, counts as much as the squared importance of its column.

    Args:
        groups: (out, groups, size) weights.
        importance: (in,) importance of the columns.
        codebook: Codebook with levels.
        trials: Steps (out, groups) to try, each with (out, groups) whole numbers below 2^15, to return where it is best.
    """
    weight = importance.to(groups).square().view(groups.shape[1:])
    exponent = torch.frexp(groups.abs().amax(-1)).exponent.clamp(-126, 126)
    unit = torch.exp2(-exponent.to(groups))  # of every group: no square overflows, and powers of two change nothing
    groups = groups * unit[..., None]
    search = kernels_of(groups).least_squares
    if search is not None and groups.dtype == torch.float32:
        kept = [
            (key.to(torch.int16), step.mul(unit), key.dtype) for key, step in trials
        ]  # keys are small whole numbers
        keys, steps, (dtype, *_) = zip(*kept, strict=True)
        place = search(groups, weight, codebook, torch.stack(steps))
        return torch.stack(keys).gather(0, place[None])[0].to(dtype)
    least, best = groups.new_full(groups.shape[:2], torch.inf), None
    for key, step in trials:
        scale = (step * unit)[..., None]
        values = codebook.position(codebook.nearest(groups / scale))
        error = values.mul_(scale).sub_(groups).square_().mul_(weight).sum(-1)
        better = error < least
        best, least = torch.where(better, key, torch.zeros_like(key) if best is None else best), error.minimum(least)
    assert best is not None, "there is a step to try"
    return best

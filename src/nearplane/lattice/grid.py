"""Grids that weights are rounded to, and matrices that have been rounded to one.

A grid is data: one class covers steps per tensor, row, group or column, groups in activation order, and unbounded
codes; solvers treat all alike. Steps are chosen in `scale.py`; codes are stored by `formats/`.

A position is a weight in steps, `weight / scale + zero`. A `Codebook` rounds it to a code: the nearest integer between two
limits, or the nearest entry of a table of levels. `round_code`, `round_to_levels` and `position_of` in `kernels_cpu.py` are the
same for compiled kernels; there are no other copies of the formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import TypeVar

from nearplane.errors import RecipeError
from nearplane.number_formats import NumberFormat

LEADING = 19  # bits of a float32 behind those by which `Table.first` is looked up
NARROW = (torch.int8, torch.uint8, torch.int16)  # dtypes in which codes leave a GPU, instead of int32


class Table(NamedTuple):
    """A codebook for compiled kernels, all in one floating-point type.

    Args:
        low, high: Limits of integer codes, infinite where there are none.
        levels: Ascending positions of codes 0, 1, ...; empty where codes are integers.
        middles: Midpoints of neighbouring levels.
        first: Code of the least number that has the same leading bits, by these bits, which in float32 are the sign, the
            exponent and four more; empty in float64.
    """

    low: Any
    high: Any
    levels: npt.NDArray[Any]
    middles: npt.NDArray[Any]
    first: npt.NDArray[np.int16]


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
        middles = (levels[1:] + levels[:-1]) / kind(2)
        first = _first_codes(middles.tobytes()) if kind is np.float32 else np.empty(0, np.int16)
        return Table(kind(low), kind(high), levels, middles, first)


@lru_cache(maxsize=16)
def _first_codes(middles: bytes) -> npt.NDArray[np.int16]:
    """Return `Table.first` for float32 midpoints."""
    bits = np.arange(1 << (32 - LEADING), dtype=np.uint32) << LEADING
    bits[len(bits) // 2 :] |= (1 << LEADING) - 1  # of negative numbers, the largest magnitude is the least
    least = bits.view(np.float32)
    infinite = 0xFF800000 >> LEADING  # the number of the bucket of minus infinity, whose other numbers are none
    least[infinite] = -np.inf
    return np.searchsorted(np.frombuffer(middles, np.float32), least).astype(np.int16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Values a weight may take: `value = scale[:, group] * (code - zero[:, group])` with `low <= code <= high`.

    With levels a code is the number of its level: `value = scale[:, group] * (levels[code] - zero[:, group])`.

    Args:
        scale: (out or 1, groups) positive steps.
        zero: (out or 1, groups) offsets in steps; 0 on symmetric grids.
        group: (in,) group of every column.
        low, high: Limits of the codes, inclusive; None where codes are unbounded.
        levels: (high + 1,) ascending positions of the codes 0 to `high`, in steps (FP4, NF4); None: a code is its own
            position.
    """

    scale: Tensor
    zero: Tensor
    group: Tensor
    low: int | None = None
    high: int | None = None
    levels: Tensor | None = None

    base: ClassVar[None] = None  # only a `ProductGrid` has a base step
    fit: ClassVar[str] = "plain"  # name in `fits.FITS` of the fit that makes such grids

    @property
    def codebook(self) -> Codebook:
        """Return the codes and their positions."""
        return Codebook(low=self.low, high=self.high, levels=self.levels)

    def columns(self, index: Tensor | slice | int) -> tuple[Tensor, Tensor]:
        """Return scale and zero of the columns at `index`, each (out or 1, columns)."""
        group = self.group[index]
        return self.scale[:, group], self.zero[:, group]

    def columns_first(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies (groups, out) of scale and zero in the dtype of weights (out, in)."""
        scale, zero = (
            part.to(like.dtype).expand(len(like), -1).T.clone(memory_format=torch.contiguous_format)
            for part in (self.scale, self.zero)
        )
        return scale, zero

    def round(self, x: Tensor, index: Tensor | slice | int = slice(None)) -> tuple[Tensor, Tensor]:
        """Round `x`, the columns at `index`, to the grid: (codes, values), both in the dtype of `x`."""
        scale, zero = self.columns(index)
        codes = self.codebook.nearest(x / scale + zero)
        return codes, scale * (self.codebook.position(codes) - zero)

    def decode(self, codes: Tensor) -> Tensor:
        """Turn (out, in) codes into (out, in) values, in the dtype of the scale."""
        scale, zero = self.columns(slice(None))
        return scale * (self.codebook.position(codes, scale.dtype) - zero)

    def steps(self) -> Tensor:
        """Return the step of every column, (out or 1, in): the largest distance of neighbouring values."""
        return self.scale[:, self.group] * self.codebook.widest

    @property
    def parts(self) -> dict[str, Tensor]:
        """Return the numbers that make up the grid, by name, rows first."""
        return {"scale": self.scale, "zero": self.zero}

    def with_parts(self, parts: dict[str, Tensor]) -> Self:
        """Return the grid with other numbers."""
        changes: dict[str, Any] = parts
        return replace(self, **changes)

    def of_rows(self, rows: Tensor | slice) -> Self:
        """Return the grid of some rows."""
        return self.with_parts({name: part[rows] if len(part) > 1 else part for name, part in self.parts.items()})

    def merged(self, chosen: Tensor, other: Grid) -> Self:
        """Take rows of this grid where `chosen` (out, 1) is True, else of `other`, of the same groups and limits."""
        theirs = other.parts
        return self.with_parts({name: torch.where(chosen, part, theirs[name]) for name, part in self.parts.items()})

    def row_weight(self) -> Tensor:
        """Return (out or 1,) float64 ones: errors have the same weight in every row."""
        return torch.ones(len(self.scale), dtype=torch.float64, device=self.scale.device)

    def differences_from(self, format: NumberFormat, codes: Tensor) -> Iterator[str]:
        """Yield the differences of codes (out, in) and grid from a number format."""
        low, high, groups = self.low, self.high, format.groups(codes.shape[1])
        if not format.bits or low is None or high is None:
            yield f"it is on a fixed grid; {format.name} is not"
            return
        if (low, high, self.scale.shape[1]) != (format.low, format.high, groups):
            yield (
                f"its codes are {low} to {high} in {self.scale.shape[1]} groups per row; {format.name} has "
                f"{format.low} to {format.high} in {groups}"
            )
        if not self.sound:
            yield "a step is not a positive number"
        for kind, values in (("code", codes), ("zero", self.zero)):
            smallest, largest = (float(x) for x in values.aminmax())
            if (kind == "code" and (smallest < low or largest > high)) or not math.isfinite(largest - smallest):
                yield f"its {kind}s range from {smallest:g} to {largest:g}; the grid is {low} to {high}"

    @property
    def sound(self) -> bool:
        """Whether all steps are positive numbers."""
        return bool((torch.isfinite(self.scale) & (self.scale > 0)).all())

    def same_as(self, other: AnyGrid) -> bool:
        """Return whether another grid has the same steps, zeros, groups, limits and levels."""
        return (
            isinstance(other, Grid)
            and (self.low, self.high) == (other.low, other.high)
            and torch.equal(self.group, other.group.to(torch.int64))
            and self.scale.shape[1] == other.scale.shape[1]
            and self.same_levels(other)
            and bool((self.scale == other.scale).all() and (self.zero == other.zero).all())
        )

    def same_levels(self, other: Grid) -> bool:
        """Return whether another grid has the same levels, or none as well."""
        if self.levels is None or other.levels is None:
            return self.levels is other.levels
        return torch.equal(self.levels, other.levels)

    def to(self, target: torch.dtype | torch.device | str) -> Self:
        """Return the grid with steps and offsets in another dtype, or the whole grid on another device."""
        if isinstance(target, torch.dtype):
            kept = ("sc", "m")  # integer factors of steps and offsets
            return self.with_parts({name: part.to(target) for name, part in self.parts.items() if name not in kept})
        moved = self.with_parts({name: part.to(target) for name, part in self.parts.items()})
        return replace(moved, group=self.group.to(target))


class Weights(NamedTuple):
    """Weights with a step and a zero for each entry, (rows, columns) each, for solvers that work row by row."""

    W: Tensor
    scale: Tensor
    zero: Tensor
    codebook: Codebook


class AnyGrid(Protocol):
    """What all grids can do: `Grid` and the classes below it, and `ProductGrid`."""

    @property
    def base(self) -> float | None: ...

    def decode(self, codes: Tensor) -> Tensor: ...

    def of_rows(self, rows: Tensor | slice) -> Grid: ...

    def row_weight(self) -> Tensor: ...

    def differences_from(self, format: NumberFormat, codes: Tensor) -> Iterator[str]: ...

    def same_as(self, other: AnyGrid) -> bool: ...

    def to(self, target: torch.device | str) -> AnyGrid: ...


G = TypeVar("G", bound=AnyGrid, covariant=True, default=AnyGrid)


def narrowed(codes: Tensor) -> Tensor:
    """Return integers in the narrowest dtype that holds them, for a way between devices or processes."""
    lowest, highest = torch.stack(codes.aminmax()).tolist()
    limits = ((dtype, torch.iinfo(dtype)) for dtype in NARROW)
    return codes.to(next((dtype for dtype, info in limits if info.min <= lowest and highest <= info.max), codes.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix(Generic[G]):
    """A matrix on a grid.

    Args:
        codes: (out, in) int32, in the column order of the weight.
        grid: Steps and limits; the steps are already rounded to what the format stores.
    """

    codes: Tensor
    grid: G

    def decode(self) -> Tensor:
        """Return the (out, in) values, in the dtype of the grid's scale."""
        return self.grid.decode(self.codes)

    def same_as(self, other: QuantizedMatrix) -> bool:
        """Return whether another matrix has the same integers on the same grid."""
        return torch.equal(self.codes, other.codes.to(torch.int32)) and self.grid.same_as(other.grid)

    def to(self, device: torch.device | str) -> QuantizedMatrix[G]:
        """Return the matrix on another device; to the CPU, codes go in the narrowest dtype that holds them."""
        codes = self.codes
        if torch.device(device).type == "cpu" and codes.device.type != "cpu":
            codes = narrowed(codes).to(device).to(codes.dtype)
        return QuantizedMatrix(codes=codes.to(device), grid=cast(G, self.grid.to(device)))


def stacked(matrices: Sequence[QuantizedMatrix[Grid]]) -> QuantizedMatrix[Grid]:
    """Return the matrix of all rows from matrices of some rows each, in order, on grids of the same groups and limits."""
    first, *others = matrices
    if not others:
        return first
    numbers = [{name: part.expand(len(m.codes), -1) for name, part in m.grid.parts.items()} for m in matrices]
    grid = first.grid.with_parts({name: torch.cat([each[name] for each in numbers]) for name in numbers[0]})
    return QuantizedMatrix(codes=torch.cat([m.codes for m in matrices]), grid=grid)

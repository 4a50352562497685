"""A matrix on a fixed grid in the form that files store: unsigned codes and zero points, scales in the storage dtype.

The solver makes symmetric codes around 0; every format here stores them `2^(bits-1)` higher. Nothing is rounded
again: a value that a file cannot store exactly is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from nearplane.errors import FormatError
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.number_formats import NumberFormat, integers

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """A matrix of `scale[:, group] * (codes - zeros[:, group])` with codes and zeros in 0 ... 2^bits - 1.

    Args:
        codes: (out, in) uint8 codes.
        zeros: (out, groups) uint8 zero points; 2^(bits-1) on symmetric grids.
        scale: (out, groups) steps in the storage dtype.
        group: (in,) int64 group of every column.
        format: The number format of the codes.
    """

    codes: Tensor
    zeros: Tensor
    scale: Tensor
    group: Tensor
    format: NumberFormat

    @classmethod
    def of(cls, name: str, matrix: QuantizedMatrix[Grid], dtype: torch.dtype) -> Integers:
        """Return the solver's integers unchanged, with scales in `dtype`.

        Raises:
            FormatError: The limits are not those of 2 to 8 bits, the codes index levels, a code or zero point is
                outside the limits, or a scale is not exact in `dtype`.
        """
        grid, out = matrix.grid, len(matrix.codes)
        format = _range(name, grid)
        if format.symmetric and bool((grid.zero != 0).any()):
            raise FormatError(
                f"{name}: a symmetric grid with zero points up to {float(grid.zero.abs().max())}, expected 0."
            )
        scale = grid.scale.to(dtype)
        if not bool((torch.isfinite(scale) & (scale == grid.scale)).all()):
            raise FormatError(
                f"{name}: a scale is not exact in {dtype}, the dtype in the file. Round the scales before the solve."
            )
        return cls(
            codes=_bytes(f"{name}: codes", matrix.codes, format),
            zeros=_bytes(f"{name}: zeros", grid.zero, format).expand(out, -1),
            scale=scale.expand(out, -1),
            group=grid.group.to(torch.int64),
            format=format,
        )

    def matrix(self) -> QuantizedMatrix[Grid]:
        """Return codes and grid in the solver's conventions, with scales and zero points in float32 or wider."""
        low, high = self.format.low, self.format.high
        dtype = torch.promote_types(self.scale.dtype, torch.float32)
        zero = self.zeros.to(dtype) + low
        grid = Grid(scale=self.scale.to(dtype), zero=zero, group=self.group, low=low, high=high)
        return QuantizedMatrix(codes=self.codes.to(torch.int32, copy=True).add_(low), grid=grid)


def consecutive(columns: int, group_size: int | None, device: torch.device | None = None) -> Tensor:
    """Return the (in,) group of every column for groups of neighbours; without a size all columns are one group."""
    return torch.arange(columns, device=device) // (group_size or max(columns, 1))


def group_size_of(field: str, value: Any, no_group: Collection[int | None]) -> int | None:
    """Return the group size of a config; None for one step per row, whose spellings are in `no_group`.

    Raises:
        FormatError: The value is no group size.
    """
    if (value is None or type(value) is int) and value in no_group:
        return None
    if type(value) is not int or not 1 <= value < 2**31:
        raise FormatError(f"{field} is {value!r}, expected a positive whole number. Fetch config.json again.")
    return value


def of_kind(field: str, value: Any, kind: type[T], expected: str) -> T:
    """Return a value of a config, checked for its type.

    Raises:
        FormatError: The value is of another type.
    """
    if not isinstance(value, kind):
        raise FormatError(f"{field} is {value!r}, expected {expected}. Fetch config.json again.")
    return value


def object_of(field: str, value: Any) -> dict[str, Any]:
    """Return an object of a config; null counts as an empty object."""
    return of_kind(field, {} if value is None else value, dict, "an object")


def expect(
    name: str, tensors: Mapping[str, Tensor], suffix: str, shape: tuple[int | None, ...], dtypes: set[torch.dtype]
) -> Tensor:
    """Return the tensor `name.suffix`; None in `shape` stands for any size.

    Raises:
        FormatError: The tensor is missing, or has another shape or dtype.
    """
    tensor = tensors.get(f"{name}.{suffix}")
    if tensor is None:
        raise FormatError(f"{name}.{suffix} is missing; the layer has {', '.join(sorted(tensors)) or 'no tensors'}.")
    fits = tensor.ndim == len(shape) and all(size in (None, n) for size, n in zip(shape, tensor.shape, strict=True))
    if not fits or tensor.dtype not in dtypes:
        actual = f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.")
        expected = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise FormatError(
            f"{name}.{suffix} is {actual}, expected {expected} ({sizes}): "
            f"the file is damaged, or packed in a way that this version of nearplane does not read."
        )
    return tensor


def _range(name: str, grid: Grid) -> NumberFormat:
    """Return the integer format with the limits of a grid."""
    if grid.levels is not None:
        raise FormatError(
            f"{name}: codes index {len(grid.levels)} levels; this format stores evenly spaced values only. Use --bits instead of "
            f"--grid, or leave the layer unquantized with --ignore."
        )
    for bits in range(2, 9):
        for format in (integers(bits, None), integers(bits, None, symmetric=False)):
            if (grid.low, grid.high) == (format.low, format.high):
                return format
    raise FormatError(f"{name}: the codes range from {grid.low} to {grid.high}, expected a range of 2 to 8 bits.")


def _bytes(what: str, numbers: Tensor, format: NumberFormat) -> Tensor:
    """Subtract the smallest code from whole numbers and return them as uint8, all in 0 ... 2^bits - 1."""
    low, high = torch.stack(numbers.aminmax()).tolist()  # a device is waited for once
    if not (low >= format.low and high <= format.high):  # refuses NaN, too
        raise FormatError(f"{what} range from {low:g} to {high:g}, expected {format.low} to {format.high}.")
    if numbers.is_floating_point() and bool((numbers != numbers.round()).any()):
        raise FormatError(f"{what} are not whole numbers.")
    return (numbers - format.low).to(torch.uint8)

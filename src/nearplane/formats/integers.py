"""A matrix on a fixed grid as files hold it: unsigned codes and zeros, and scales in their storage dtype.

The solver writes symmetric codes around 0; every format here stores them `2^(bits-1)` higher. Nothing is ever
re-rounded: what a file cannot hold exactly is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from nearplane.errors import FormatError
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.number_formats import NumberFormat, integers

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """`value = scale[:, group] * (codes - zeros[:, group])` with everything in 0 ... 2^bits - 1.

    Args:
        codes: (out, in) uint8.
        zeros: (out, groups) uint8; 2^(bits-1) on symmetric grids.
        scale: (out, groups) in the storage dtype.
        group: (in,) int64 group of every column.
    """

    codes: Tensor
    zeros: Tensor
    scale: Tensor
    group: Tensor
    format: NumberFormat

    @classmethod
    def of(cls, name: str, matrix: QuantizedMatrix[Grid], dtype: torch.dtype) -> Integers:
        """Take the solver's integers as they are, scales in `dtype`.

        Raises:
            FormatError: the limits are not those of 2 to 8 bits, codes are numbers of levels, a code or zero is outside
                the limits, or a scale is not exact in `dtype`.
        """
        grid, out = matrix.grid, len(matrix.codes)
        format = _range(name, grid)
        if format.symmetric and bool((grid.zero != 0).any()):
            raise FormatError(f"{name}: a symmetric grid has zeros of 0, found up to {float(grid.zero.abs().max())}.")
        scale = grid.scale.to(dtype)
        if not bool((torch.isfinite(scale) & (scale == grid.scale)).all()):
            raise FormatError(
                f"{name}: a scale is not exact in {dtype}, which the file stores. Round scales to it before the solve."
            )
        return cls(
            codes=_bytes(f"{name}: codes", matrix.codes, format),
            zeros=_bytes(f"{name}: zeros", grid.zero, format).expand(out, -1),
            scale=scale.expand(out, -1),
            group=grid.group.to(torch.int64),
            format=format,
        )

    def matrix(self) -> QuantizedMatrix[Grid]:
        """Return codes and grid in the solver's conventions, scales and zeros in float32 or wider."""
        low, high = self.format.low, self.format.high
        dtype = torch.promote_types(self.scale.dtype, torch.float32)
        zero = self.zeros.to(dtype) + low
        grid = Grid(scale=self.scale.to(dtype), zero=zero, group=self.group, low=low, high=high)
        return QuantizedMatrix(codes=self.codes.to(torch.int32) + low, grid=grid)


def consecutive(columns: int, group_size: int | None) -> Tensor:
    """Return (in,) the group of every column where groups are runs of neighbours; one group without a size."""
    return torch.arange(columns) // (group_size or max(columns, 1))


def group_size_of(called: str, value: Any, none: Collection[int | None]) -> int | None:
    """Return the group size that a config says; None for one step a row, which `none` lists the words of.

    Raises:
        FormatError: it is no size.
    """
    if (value is None or type(value) is int) and value in none:
        return None
    if type(value) is not int or not 1 <= value < 2**31:
        raise FormatError(f"{called} is {value!r}, expected a positive whole number. Fetch config.json again.")
    return value


def of_kind(called: str, value: Any, kind: type[T], expected: str) -> T:
    """Return a value of a config.

    Raises:
        FormatError: it is of another kind.
    """
    if not isinstance(value, kind):
        raise FormatError(f"{called} is {value!r}, expected {expected}. Fetch config.json again.")
    return value


def object_of(called: str, value: Any) -> dict[str, Any]:
    """Return an object of a config; null is an empty one."""
    return of_kind(called, {} if value is None else value, dict, "an object")


def expect(
    name: str, tensors: Mapping[str, Tensor], suffix: str, shape: tuple[int | None, ...], dtypes: set[torch.dtype]
) -> Tensor:
    """Return the tensor `name.suffix`; None in `shape` stands for any size.

    Raises:
        FormatError: it is missing, or its shape or dtype is another one.
    """
    tensor = tensors.get(f"{name}.{suffix}")
    if tensor is None:
        raise FormatError(f"{name}.{suffix} is missing; the layer has {', '.join(sorted(tensors)) or 'no tensors'}.")
    fits = tensor.ndim == len(shape) and all(size in (None, n) for size, n in zip(shape, tensor.shape, strict=True))
    if not fits or tensor.dtype not in dtypes:
        found = f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.")
        expected = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise FormatError(
            f"{name}.{suffix} is {found}, expected {expected} ({sizes}): "
            f"the file is damaged, or packed in a way that this version does not read."
        )
    return tensor


def _range(name: str, grid: Grid) -> NumberFormat:
    """Return the integers whose limits a grid has."""
    if grid.levels is not None:
        raise FormatError(
            f"{name}: codes are numbers of {len(grid.levels)} levels; this format stores evenly spaced values only. "
            f"Quantize it on a grid without levels, or leave the layer out."
        )
    for bits in range(2, 9):
        for format in (integers(bits, None), integers(bits, None, symmetric=False)):
            if (grid.low, grid.high) == (format.low, format.high):
                return format
    raise FormatError(
        f"{name}: codes from {grid.low} to {grid.high} are not a range of 2 to 8 bits, which files store."
    )


def _bytes(what: str, numbers: Tensor, format: NumberFormat) -> Tensor:
    """Return whole numbers less the smallest code as uint8, all in 0 ... 2^bits - 1."""
    low, high = (float(limit) for limit in numbers.aminmax())
    if not (low >= format.low and high <= format.high):  # so that NaN is refused, too
        raise FormatError(f"{what} from {low:g} to {high:g} found, {format.low} to {format.high} expected.")
    if numbers.is_floating_point() and bool((numbers != numbers.round()).any()):
        raise FormatError(f"{what} must be whole numbers.")
    return (numbers - format.low).to(torch.uint8)

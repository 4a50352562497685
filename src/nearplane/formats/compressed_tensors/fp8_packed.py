"""Packings of 8-bit floats (E4M3) in compressed-tensors: one step for a row, for a tile, or for 32 weights of a row.

    NAME.weight        (out, in)          float8_e4m3fn  levels
    NAME.weight_scale  (out, 1)           model's        FP8: steps of rows
    NAME.weight_scale  (out/128, in/128)  model's        FP8 in blocks: steps of tiles
    NAME.weight_scale  (out, in/32)       uint8          MXFP8: exponent b of the step 2^(b - 127)

transformers multiplies both in the dtype of the steps; those of MXFP8 it decodes to bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from nearplane.errors import FormatError
from nearplane.formats.compressed_tensors.fp4_packed import exponents, powers
from nearplane.formats.compressed_tensors.packing import SCALES, Packing
from nearplane.formats.integers import consecutive, expect
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.octaves import OctaveGrid
from nearplane.lattice.tiles import TileGrid
from nearplane.number_formats import E4M3, FP8, FP8_BLOCK, MXFP8, NumberFormat


class BytesPacked(Packing):
    """Numbers of 8 bits as they are, and steps."""

    WORDS_IN = "weight"
    SUFFIXES = (WORDS_IN, Packing.KEY)

    def scale_types(self, dtype: torch.dtype | None) -> set[torch.dtype]:
        """Return the dtypes that `weight_scale` may have; of a new file in a model of `dtype`, one."""
        return SCALES if dtype is None else {self.scale_dtype(dtype)}

    def empty(self, name: str, shape: tuple[int, int], format: NumberFormat, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer without contents."""
        steps = shape[0] // format.rows, format.groups(shape[1])
        return {
            f"{name}.weight": torch.empty(shape, dtype=self.WORDS, device="meta"),
            f"{name}.weight_scale": torch.empty(steps, dtype=self.scale_types(dtype).pop(), device="meta"),
        }

    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) from the shape of the numbers."""
        out, columns = expect(name, tensors, "weight", (None, None), {self.WORDS}).shape
        return out, columns


class FP8Packed(BytesPacked):
    """8-bit floats as they are, and steps of rows.

    Attributes:
        GRID: Class of grids with such steps.
    """

    FORMAT = "float-quantized"
    TYPE = "float"
    HOLDS: ClassVar[NumberFormat] = FP8
    WORDS = torch.float8_e4m3fn
    GRID: ClassVar[type[Grid]] = Grid

    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer."""
        levels = torch.tensor(E4M3, dtype=torch.float32)[matrix.codes.long()]
        step = matrix.grid.scale.expand(len(matrix.codes), -1)
        kept = step[:: self.HOLDS.rows]
        if not torch.equal(kept.repeat_interleave(self.HOLDS.rows, 0)[: len(step)], step):
            raise FormatError(f"{name}: steps differ within {self.HOLDS.rows} rows, which share them in the file.")
        return {f"{name}.weight": levels.to(self.WORDS), f"{name}.weight_scale": self.scales(name, kept, dtype)}

    def scales(self, name: str, step: Tensor, dtype: torch.dtype) -> Tensor:
        """Return steps as they are stored.

        Raises:
            FormatError: A step cannot be stored exactly.
        """
        scale = step.to(dtype)
        if not torch.equal(scale.to(step.dtype), step):
            raise FormatError(f"{name}: a step is not exact in {dtype}.")
        return scale.contiguous()

    def steps(self, scale: Tensor) -> Tensor:
        """Return the float32 steps that `scales` stored."""
        return scale.float()

    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix of one layer."""
        out, columns = self.shape_of(name, tensors)
        words = tensors[f"{name}.weight"].float()
        if not bool(words.isfinite().all()):
            raise FormatError(f"{name}: a weight is not a number.")
        if out % format.rows or columns % format.run:
            raise FormatError(f"{name} is {out} x {columns}, expected multiples of {format.rows} and {format.run}.")
        shape = out // format.rows, format.groups(columns)
        scale = self.steps(expect(name, tensors, "weight_scale", shape, self.scale_types(None)))
        scale, levels = scale.repeat_interleave(format.rows, 0), torch.tensor(E4M3, dtype=torch.float64)
        return QuantizedMatrix(
            codes=torch.searchsorted(levels.float(), words).int(),
            grid=self.GRID(
                scale=scale,
                zero=torch.zeros_like(scale),
                group=consecutive(columns, format.group),
                low=format.low,
                high=format.high,
                levels=levels,
            ),
        )


class FP8BlockPacked(FP8Packed):
    """8-bit floats with steps of tiles."""

    HOLDS = FP8_BLOCK
    STRATEGY = "block"
    GRID = TileGrid

    def weights(self, format: NumberFormat, order: str) -> dict[str, Any]:
        """Return the `weights` object of the config."""
        return super().weights(format, order) | {"group_size": None, "block_structure": [format.rows, format.group]}


class MXFP8Packed(FP8Packed):
    """8-bit floats with steps of 32 weights that are powers of two."""

    FORMAT = "mxfp8-quantized"
    HOLDS = MXFP8
    GRID = OctaveGrid

    def weights(self, format: NumberFormat, order: str) -> dict[str, Any]:
        """Return the `weights` object of the config."""
        return super().weights(format, order) | {"scale_dtype": str(torch.uint8)}

    def scales(self, name: str, step: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the exponents."""
        return exponents(name, step)

    def steps(self, scale: Tensor) -> Tensor:
        """Return the powers of two."""
        return powers(scale)

    def scale_types(self, dtype: torch.dtype | None) -> set[torch.dtype]:
        """Return the dtype of exponents."""
        return {torch.uint8}

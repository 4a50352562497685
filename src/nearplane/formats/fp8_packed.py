"""Packing `float-quantized` of compressed-tensors: 8-bit floats (E4M3) with one step for a row.

    NAME.weight        (out, in)  float8_e4m3fn  levels
    NAME.weight_scale  (out, 1)   model's        steps

transformers multiplies both in the dtype of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nearplane.errors import FormatError
from nearplane.formats.integers import expect
from nearplane.formats.packing import SCALES, Packing, refuse_unknown
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.number_formats import E4M3, FP8, NumberFormat

ZERO_CODE = len(E4M3) // 2  # index of the level 0


class FP8Packed(Packing):
    """8-bit floats as they are."""

    WORDS_IN = "weight"
    SUFFIXES = (WORDS_IN, Packing.KEY)
    FORMAT = "float-quantized"
    TYPE = "float"
    HOLDS = FP8
    WORDS = torch.float8_e4m3fn

    def number_format(self, weights: Mapping[str, Any]) -> NumberFormat:
        """Return the one number format, after checking that a `weights` object describes it."""
        expected = {name: value for name, value in self.weights(FP8, "natural").items() if name != "actorder"}
        refuse_unknown({f"weights.{name}": (weights.get(name), {value}) for name, value in expected.items()})
        return FP8

    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer."""
        levels = torch.tensor(E4M3, dtype=torch.float32)[matrix.codes.long()]
        scale = matrix.grid.scale.expand(len(matrix.codes), -1).to(dtype)
        if not torch.equal(scale.to(matrix.grid.scale.dtype), matrix.grid.scale.expand(len(matrix.codes), -1)):
            raise FormatError(f"{name}: a step is not exact in {dtype}.")
        return {f"{name}.weight": levels.to(self.WORDS), f"{name}.weight_scale": scale.contiguous()}

    def empty(self, name: str, shape: tuple[int, int], format: NumberFormat, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer without contents."""
        return {
            f"{name}.weight": torch.empty(shape, dtype=self.WORDS, device="meta"),
            f"{name}.weight_scale": torch.empty(shape[0], 1, dtype=self.scale_dtype(dtype), device="meta"),
        }

    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) from the shape of the levels."""
        out, columns = expect(name, tensors, "weight", (None, None), {self.WORDS}).shape
        return out, columns

    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix of one layer."""
        out, columns = self.shape_of(name, tensors)
        words = expect(name, tensors, "weight", (out, columns), {self.WORDS}).float()
        if not bool(words.isfinite().all()):
            raise FormatError(f"{name}: a weight is not a number.")
        scale = expect(name, tensors, "weight_scale", (out, 1), SCALES).float()
        levels = torch.tensor(E4M3, dtype=torch.float64)
        return QuantizedMatrix(
            codes=torch.searchsorted(levels.float(), words).int(),
            grid=Grid(
                scale=scale,
                zero=torch.zeros_like(scale),
                group=torch.zeros(columns, dtype=torch.int64),
                low=format.low,
                high=format.high,
                levels=levels,
            ),
        )

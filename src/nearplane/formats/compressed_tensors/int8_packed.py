"""Packing `int-quantized` of compressed-tensors: 8-bit integers with one step for a row, for inputs in 8-bit integers.

    NAME.weight        (out, in)  int8     codes
    NAME.weight_scale  (out, 1)   model's  steps

Runtimes take this packing for a product of integers. Where inputs are not rounded they read 8 bits as `pack-quantized`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nearplane.errors import FormatError
from nearplane.formats.compressed_tensors.packing import SCALES, Packing, refuse_unknown
from nearplane.formats.integers import Integers, consecutive, expect
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.number_formats import NumberFormat, integers

FORMAT = integers(8, None)


class Int8Packed(Packing):
    """8-bit integers as they are."""

    WORDS_IN = "weight"
    SUFFIXES = (WORDS_IN, Packing.KEY)
    FORMAT = "int-quantized"
    TYPE = "int"
    WORDS = torch.int8
    ON_DEVICE = True

    def number_format(self, weights: Mapping[str, Any]) -> NumberFormat:
        """Return the one number format, after checking that a `weights` object describes it."""
        expected = {name: value for name, value in self.weights(FORMAT, "natural").items() if name != "actorder"}
        refuse_unknown({f"weights.{name}": (weights.get(name), {value}) for name, value in expected.items()})
        return FORMAT

    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer."""
        stored = Integers.of(name, matrix, dtype)
        if stored.format != FORMAT or stored.scale.shape[1] != 1:
            raise FormatError(f"{name}: symmetric codes of 8 bits with one step for a row expected.")
        return {
            f"{name}.weight": (stored.codes.int() + FORMAT.low).to(self.WORDS),
            f"{name}.weight_scale": stored.scale.contiguous(),
        }

    def empty(self, name: str, shape: tuple[int, int], format: NumberFormat, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer without contents."""
        return {
            f"{name}.weight": torch.empty(shape, dtype=self.WORDS, device="meta"),
            f"{name}.weight_scale": torch.empty(shape[0], 1, dtype=self.scale_dtype(dtype), device="meta"),
        }

    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) from the shape of the codes."""
        out, columns = expect(name, tensors, "weight", (None, None), {self.WORDS}).shape
        return out, columns

    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix of one layer."""
        out, columns = self.shape_of(name, tensors)
        words = expect(name, tensors, "weight", (out, columns), {self.WORDS})
        return Integers(
            codes=(words.int() - FORMAT.low).to(torch.uint8),
            zeros=torch.full((out, 1), -FORMAT.low, dtype=torch.uint8, device=words.device),
            scale=expect(name, tensors, "weight_scale", (out, 1), SCALES),
            group=consecutive(columns, None, words.device),
            format=FORMAT,
        ).matrix()

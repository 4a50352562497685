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
from nearplane.formats.compressed_tensors.fp8_packed import BytesPacked
from nearplane.formats.compressed_tensors.packing import SCALES
from nearplane.formats.integers import Integers, consecutive, expect
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.number_formats import NumberFormat, integers

INT8 = integers(8, None)


class Int8Packed(BytesPacked):
    """8-bit integers as they are."""

    FORMAT = "int-quantized"
    TYPE = "int"
    HOLDS = INT8
    WORDS = torch.int8
    ON_DEVICE = True

    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer."""
        stored = Integers.of(name, matrix, dtype)
        if stored.format != INT8 or stored.scale.shape[1] != 1:
            raise FormatError(f"{name}: symmetric codes of 8 bits with one step for a row expected.")
        return {
            f"{name}.weight": (stored.codes.int() + INT8.low).to(self.WORDS),
            f"{name}.weight_scale": stored.scale.contiguous(),
        }

    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix of one layer."""
        out, columns = self.shape_of(name, tensors)
        words = tensors[f"{name}.weight"]
        return Integers(
            codes=(words.int() - INT8.low).to(torch.uint8),
            zeros=torch.full((out, 1), -INT8.low, dtype=torch.uint8, device=words.device),
            scale=expect(name, tensors, "weight_scale", (out, 1), SCALES),
            group=consecutive(columns, None, words.device),
            format=INT8,
        ).matrix()

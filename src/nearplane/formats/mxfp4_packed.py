"""Packing `mxfp4-pack-quantized` of compressed-tensors: 4-bit floats in groups of 32 with steps 2^n.

    NAME.weight_packed  (out, in/2)   uint8  two codes per byte, the first in the lower half: sign << 3 | magnitude
    NAME.weight_scale   (out, in/32)  uint8  exponent b of the step 2^(b - 127)

Magnitudes are indices into {0, .5, 1, 1.5, 2, 3, 4, 6}. transformers 5.23.0 with compressed-tensors 0.20.0 loads these
tensors and decodes them to bfloat16; a model in float32 runs only with `CompressedTensorsConfig(dequantize=True)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nearplane.errors import FormatError
from nearplane.formats.integers import consecutive, expect
from nearplane.formats.packing import Packing, refuse_unknown
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.number_formats import MXFP4, NumberFormat

ZERO_CODE = len(MXFP4.levels or ()) // 2  # index of the level 0
BIAS = 127  # of the exponents


class MXFP4Packed(Packing):
    """4-bit floats with steps that are powers of two."""

    SUFFIXES = (Packing.KEY, "weight_scale")
    FORMAT = "mxfp4-pack-quantized"
    TYPE = "float"
    HOLDS = MXFP4
    WORDS = torch.uint8
    DECODED = torch.bfloat16

    def weights(self, format: NumberFormat, order: str) -> dict[str, Any]:
        """Return the `weights` object of the config."""
        return super().weights(format, order) | {"scale_dtype": "torch.uint8"}

    def number_format(self, weights: Mapping[str, Any]) -> NumberFormat:
        """Return MXFP4, after checking that a `weights` object describes it."""
        expected = {name: value for name, value in self.weights(MXFP4, "natural").items() if name != "actorder"}
        refuse_unknown({f"weights.{name}": (weights.get(name), {value}) for name, value in expected.items()})
        return MXFP4

    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer; `dtype` has no effect."""
        grid, (out, columns) = matrix.grid, matrix.codes.shape
        step = grid.scale.expand(out, -1)
        exponent = step.log2() + BIAS
        if not bool(((2.0 ** (exponent - BIAS) == step) & (exponent >= 0) & (exponent < 255)).all()) or columns % 32:
            raise FormatError(
                f"{name}: a step is not a power of two from 2^-127 to 2^127, or {columns} inputs are not a multiple of 32."
            )
        signed = matrix.codes - ZERO_CODE
        code = signed.abs() | (signed < 0).int() << 3
        return {
            f"{name}.weight_packed": (code[:, ::2] | code[:, 1::2] << 4).to(torch.uint8),
            f"{name}.weight_scale": exponent.to(torch.uint8),
        }

    def empty(self, name: str, shape: tuple[int, int], format: NumberFormat, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer without contents."""
        (out, columns), groups = shape, format.groups(shape[1])
        return {
            f"{name}.weight_packed": torch.empty(out, columns // 2, dtype=torch.uint8, device="meta"),
            f"{name}.weight_scale": torch.empty(out, groups, dtype=torch.uint8, device="meta"),
        }

    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) from the shape of the packed codes."""
        out, half = expect(name, tensors, "weight_packed", (None, None), {torch.uint8}).shape
        return out, 2 * half

    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix of one layer."""
        out, columns = self.shape_of(name, tensors)
        pairs = expect(name, tensors, "weight_packed", (out, columns // 2), {torch.uint8}).int()
        exponent = expect(name, tensors, "weight_scale", (out, format.groups(columns)), {torch.uint8})
        code = torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1)
        scale = 2.0 ** (exponent.to(torch.float32) - BIAS)
        grid = Grid(
            scale=scale,
            zero=torch.zeros_like(scale),
            group=consecutive(columns, format.group),
            low=format.low,
            high=format.high,
            levels=torch.tensor(format.levels, dtype=torch.float64),
        )
        return QuantizedMatrix(codes=ZERO_CODE + torch.where(code > 7, 8 - code, code), grid=grid)

"""Packings of 4-bit floats in compressed-tensors: MXFP4 and NVFP4, which differ in how steps are stored.

    NAME.weight_packed        (out, in/2)   uint8  two codes per byte, the first in the lower half: sign << 3 | magnitude
    NAME.weight_scale         (out, in/32)  uint8  MXFP4: exponent b of the step 2^(b - 127)
    NAME.weight_scale         (out, in/16)  float8_e4m3fn  NVFP4: step times the global scale
    NAME.weight_global_scale  (1,)          float32        NVFP4: a divisor
    NAME.input_global_scale   (1,)          float32        NVFP4, if runtimes round inputs: a divisor of their steps

Magnitudes are indices into {0, .5, 1, 1.5, 2, 3, 4, 6}. transformers 5.23.0 with compressed-tensors 0.20.0 loads these
tensors and decodes them to bfloat16; a model in float32 runs only with `CompressedTensorsConfig(dequantize=True)`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from nearplane.errors import FormatError
from nearplane.formats.compressed_tensors.packing import Packing
from nearplane.formats.integers import consecutive, expect
from nearplane.formats.layer_format import INPUT_SCALE
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.octaves import OctaveGrid
from nearplane.lattice.shared_grid import SharedGrid
from nearplane.number_formats import E2M1, MXFP4, NVFP4, NumberFormat

JOINED = (  # last parts of the names of layers that vLLM joins to one product
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
ZERO_CODE = len(E2M1) // 2  # index of the level 0
BIAS = 127  # of the exponents in E8M0


def apart(divisors: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield the name of every layer whose global scale is not that of a layer with which it is joined, and that layer's.

    Args:
        divisors: Global scales by the name of the layer.
    """
    for name, divisor in divisors.items():
        module, _, last = name.rpartition(".")
        for parts in (parts for parts in JOINED if last in parts):
            first = next(each for part in parts if (each := f"{module}.{part}") in divisors)
            if divisors[first] != divisor:
                yield name, first


def nibbles(codes: Tensor) -> Tensor:
    """Return the four bits of codes as files have them: sign << 3 | magnitude."""
    signed = codes - ZERO_CODE
    return signed.abs() | (signed < 0).int() << 3


def codes_of(nibble: Tensor) -> Tensor:
    """Return the codes of four bits (int32) that `nibbles` made; a negative zero is a zero."""
    return ZERO_CODE + torch.where(nibble > 7, 8 - nibble, nibble)


def exponents(name: str, step: Tensor) -> Tensor:
    """Return steps that are powers of two as bytes.

    Raises:
        FormatError: A step is no power of two, or out of range.
    """
    exponent = step.log2() + BIAS
    if not bool(((2.0 ** (exponent - BIAS) == step) & (exponent >= 0) & (exponent < 255)).all()):
        raise FormatError(f"{name}: a step is not a power of two from 2^-127 to 2^127.")
    return exponent.to(torch.uint8)


def powers(scale: Tensor) -> Tensor:
    """Return the float32 steps of bytes that `exponents` made."""
    return torch.exp2(scale.to(torch.float32) - BIAS)


class FP4Packed(Packing):
    """4-bit floats, two in a byte.

    Attributes:
        SCALE: The dtype of `weight_scale`.
    """

    TYPE = "float"
    WORDS = torch.uint8
    HOLDS: ClassVar[NumberFormat]
    SCALE: ClassVar[torch.dtype]

    def weights(self, format: NumberFormat, order: str) -> dict[str, Any]:
        """Return the `weights` object of the config."""
        return super().weights(format, order) | {"scale_dtype": str(self.SCALE)}

    @abstractmethod
    def scales(self, name: str, grid: Grid, out: int) -> dict[str, Tensor]:
        """Return the tensors of the steps of a layer with `out` rows by full name.

        Raises:
            FormatError: A step cannot be stored exactly.
        """

    @abstractmethod
    def grid(self, name: str, tensors: Mapping[str, Tensor], scale: Tensor, codes: dict[str, Any]) -> Grid:
        """Return the grid of a layer.

        Args:
            name: Name of the layer.
            tensors: The tensors of the layer by full name.
            scale: (out, groups) `weight_scale`.
            codes: Groups and levels of the grid, as arguments of `Grid`.
        """

    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer; `dtype` has no effect."""
        out, columns = matrix.codes.shape
        if columns % self.HOLDS.run:
            raise FormatError(f"{name} has {columns} inputs, expected a multiple of {self.HOLDS.run}.")
        code = nibbles(matrix.codes)
        packed = {f"{name}.weight_packed": (code[:, ::2] | code[:, 1::2] << 4).to(torch.uint8)}
        return packed | self.scales(name, matrix.grid, out)

    def empty(self, name: str, shape: tuple[int, int], format: NumberFormat, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer without contents."""
        (out, columns), groups = shape, format.groups(shape[1])
        return {
            f"{name}.weight_packed": torch.empty(out, columns // 2, dtype=torch.uint8, device="meta"),
            f"{name}.weight_scale": torch.empty(out, groups, dtype=self.SCALE, device="meta"),
        }

    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) from the shape of the packed codes."""
        out, half = expect(name, tensors, "weight_packed", (None, None), {torch.uint8}).shape
        return out, 2 * half

    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix of one layer."""
        out, columns = self.shape_of(name, tensors)
        pairs = expect(name, tensors, "weight_packed", (out, columns // 2), {torch.uint8}).int()
        scale = expect(name, tensors, "weight_scale", (out, format.groups(columns)), {self.SCALE})
        code = torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1)
        codes = {
            "group": consecutive(columns, format.group, pairs.device),
            "low": format.low,
            "high": format.high,
            "levels": torch.tensor(format.levels, dtype=torch.float64),
        }
        return QuantizedMatrix(codes=codes_of(code), grid=self.grid(name, tensors, scale, codes))


class MXFP4Packed(FP4Packed):
    """Groups of 32 with steps that are powers of two."""

    SUFFIXES = (Packing.WORDS_IN, Packing.KEY)
    FORMAT = "mxfp4-pack-quantized"
    HOLDS = MXFP4
    SCALE = torch.uint8

    def scales(self, name: str, grid: Grid, out: int) -> dict[str, Tensor]:
        """Return the exponents."""
        return {f"{name}.weight_scale": exponents(name, grid.scale.expand(out, -1))}

    def grid(self, name: str, tensors: Mapping[str, Tensor], scale: Tensor, codes: dict[str, Any]) -> Grid:
        """Return the grid with these exponents."""
        step = powers(scale)
        return OctaveGrid(scale=step, zero=torch.zeros_like(step), **codes)


class NVFP4Packed(FP4Packed):
    """Groups of 16 with steps that are 8-bit floats divided by a global scale."""

    SUFFIXES = (Packing.WORDS_IN, Packing.KEY, "weight_global_scale", INPUT_SCALE)
    FORMAT = "nvfp4-pack-quantized"
    HOLDS = NVFP4
    SCALE = torch.float8_e4m3fn
    ON_DEVICE = True
    STRATEGY = "tensor_group"

    def scales(self, name: str, grid: Grid, out: int) -> dict[str, Tensor]:
        """Return the 8-bit floats and the global scale."""
        if not isinstance(grid, SharedGrid):
            raise FormatError(f"{name}: its steps have no global scale, which NVFP4 needs.")
        blocks = grid.block.expand(out, -1).to(self.SCALE)
        if not bool((blocks.float() == grid.block).all() & (blocks.float() > 0).all()):
            raise FormatError(f"{name}: a step is not a positive 8-bit float (E4M3) divided by the global scale.")
        return {
            f"{name}.weight_scale": blocks,
            f"{name}.weight_global_scale": torch.tensor([grid.divisor], dtype=torch.float32),
        }

    def empty(self, name: str, shape: tuple[int, int], format: NumberFormat, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer without contents."""
        divisor = {f"{name}.weight_global_scale": torch.empty(1, dtype=torch.float32, device="meta")}
        return super().empty(name, shape, format, dtype) | divisor

    def grid(self, name: str, tensors: Mapping[str, Tensor], scale: Tensor, codes: dict[str, Any]) -> Grid:
        """Return the grid with these 8-bit floats and the global scale beside them."""
        divisor = float(expect(name, tensors, "weight_global_scale", (1,), {torch.float32}))
        if not 0 < divisor < float("inf"):
            raise FormatError(f"{name}: the global scale is {divisor:g}, expected a positive number.")
        return SharedGrid(block=scale.float(), divisor=divisor, **codes)

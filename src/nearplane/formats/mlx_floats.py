"""Floats in MLX, its modes mxfp4, nvfp4 and mxfp8: the bytes of compressed-tensors under the names of MLX.

    NAME.weight  (out, in*bits/32)  uint32  codes in bytes, the first in the lowest bits
    NAME.scales  (out, groups)      uint8   mxfp4, mxfp8: exponent b of the step 2^(b - 127); nvfp4: the step, as E4M3

A mode has the name of its number format. There is no global scale: mlx_lm 0.32.2 reads one for stacks of experts alone, and
mlx 0.32.4 computes with it on GPUs alone. So steps of nvfp4 are E4M3 values as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nearplane.errors import FormatError
from nearplane.formats.compressed_tensors.compressed_tensors_format import packing_of
from nearplane.formats.integers import expect
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.shared_grid import SharedGrid
from nearplane.number_formats import NumberFormat, number_format
from nearplane.recipe.runtimes import MLX_FLOATS

MODES = {name: number_format(name) for name in MLX_FLOATS}


def pack_floats(name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of one layer; see `LayerFormat.pack`."""
    grid, packing = matrix.grid, packing_of(matrix.grid)
    if packing.HOLDS not in MODES.values():
        raise FormatError(f"{name}: codes {grid.low} to {grid.high} found, expected those of {', '.join(MODES)}.")
    if isinstance(grid, SharedGrid) and grid.divisor != 1:
        raise FormatError(f"{name}: its steps have the global scale {grid.divisor:g}, which MLX does not store.")
    tensors = packing.pack(name, matrix, dtype)
    words, scale = (tensors[f"{name}.{part}"] for part in (packing.WORDS_IN, packing.KEY))
    return {f"{name}.weight": words.view(torch.uint8).view(torch.uint32), f"{name}.scales": scale.view(torch.uint8)}


def empty_floats(name: str, shape: tuple[int, int], format: NumberFormat) -> dict[str, Tensor]:
    """Return the tensors of one layer without contents; see `GridFormat.empty`."""
    out, columns = shape
    return {
        f"{name}.weight": torch.empty(out, columns * format.bits // 32, dtype=torch.uint32, device="meta"),
        f"{name}.scales": torch.empty(out, format.groups(columns), dtype=torch.uint8, device="meta"),
    }


def unpack_floats(name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
    """Return the matrix of one layer; see `LayerFormat.unpack`."""
    scales = expect(name, tensors, "scales", (None, None), {torch.uint8})
    columns = scales.shape[1] * (format.group or 1)
    words = expect(name, tensors, "weight", (len(scales), columns * format.bits // 32), {torch.uint32})
    packing, shared = packing_of(format), format.global_scale
    parts = {
        packing.WORDS_IN: words.contiguous().view(torch.uint8).view(packing.WORDS),
        packing.KEY: scales.view(torch.float8_e4m3fn) if shared else scales,
    } | ({"weight_global_scale": torch.ones(1)} if shared else {})
    return packing.unpack(name, {f"{name}.{part}": each for part, each in parts.items()}, format)

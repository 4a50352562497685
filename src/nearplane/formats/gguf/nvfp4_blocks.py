"""Blocks of NVFP4 in a GGUF: 64 neighbours of a row with the four steps of their groups, all divided by one number.

    36 bytes: four 8-bit floats (E4M3), then eight bytes of every group, whose first eight codes lie in the lower halves

The global scale is a tensor of its own, NAME.scale beside NAME.weight: its reciprocal, with which llama.cpp multiplies
products. Of a float32 its reciprocal may not bring back every bit, so that the key `DIVISORS` lists the global scales.

`block_nvfp4` in `ggml/src/ggml-common.h` of llama.cpp, pull request 19769.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nearplane.errors import FormatError, RecipeError
from nearplane.formats.compressed_tensors.fp4_packed import NVFP4Packed, codes_of, nibbles
from nearplane.formats.gguf.architecture import Config, architecture_of
from nearplane.formats.gguf.gguf_header import GLOBAL_SCALE
from nearplane.formats.integers import consecutive
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.number_formats import GGUF_TYPES, NVFP4

KIND = GGUF_TYPES[NVFP4.name]
PACKING = NVFP4Packed()
GROUPS = KIND.columns // KIND.group  # of a block
HIGHEST = 126  # bytes of positive E4M3 numbers end here; llama.cpp reads the next one as 0
INSTEAD = "Use --grid mxfp4 or iq4_nl, or leave the layer unquantized with --ignore."


def pack(name: str, matrix: QuantizedMatrix[Any]) -> dict[str, Tensor]:
    """Return the blocks of one layer, (out, bytes of a row) uint8, and its global scale.

    Raises:
        FormatError: The type cannot store the matrix exactly.
    """
    out, columns = matrix.codes.shape
    if columns % KIND.columns or not torch.equal(matrix.grid.group, consecutive(columns, KIND.group)):
        raise FormatError(
            f"{name} has {columns} inputs, expected a multiple of {KIND.columns} in groups of {KIND.group} neighbours."
        )
    scales = PACKING.scales(name, matrix.grid, out)
    steps = scales.pop(f"{name}.weight_scale").view(torch.uint8).view(out, -1, GROUPS)
    first, second = nibbles(matrix.codes).to(torch.uint8).view(out, -1, GROUPS, 2, KIND.group // 2).unbind(3)
    blocks = torch.cat([steps, (first | second << 4).flatten(2)], 2)  # (out, blocks, bytes)
    return {f"{name}.weight_{KIND.name}": blocks.view(out, -1)} | scales


def unpack(name: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedMatrix[Any]:
    """Return the matrix of one layer; without a global scale it is 1, as in llama.cpp.

    Args:
        name: Name of the layer.
        tensors: Its blocks and its global scale by full name.
        shape: (out, in) of the layer.

    Raises:
        FormatError: A step or the global scale is no positive number.
    """
    out, columns = shape
    blocks = tensors[f"{name}.weight_{KIND.name}"].view(out, -1, KIND.bytes)
    steps, pairs = blocks.split([GROUPS, KIND.bytes - GROUPS], 2)
    if bool((steps > HIGHEST).any()):
        raise FormatError(f"{name}: a step is {int(steps.max())}, expected 0 to {HIGHEST}. Fetch the folder again.")
    pairs = pairs.view(out, -1, GROUPS, KIND.group // 2).int()
    code = torch.stack([pairs & 15, pairs >> 4], 3).view(out, columns)
    codes = {
        "group": consecutive(columns, KIND.group, pairs.device),
        "low": KIND.low,
        "high": KIND.high,
        "levels": torch.tensor(KIND.levels, dtype=torch.float64),
    }
    scale = steps.reshape(out, -1).contiguous().view(PACKING.SCALE)
    divisor = tensors.get(f"{name}.{GLOBAL_SCALE}", torch.ones(1)).view(1)
    grid = PACKING.grid(name, {f"{name}.{GLOBAL_SCALE}": divisor}, scale, codes)
    return QuantizedMatrix(codes=codes_of(code), grid=grid)


def check_scaled(name: str, stored: str, biased: bool, config: Config) -> None:
    """Refuse a layer whose global scale llama.cpp does not multiply its product with.

    Args:
        name: Name of the layer's weight in the checkpoint.
        stored: Its name in the file.
        biased: Whether the layer has a bias.
        config: config.json of the network.

    Raises:
        RecipeError: It does not.
    """
    architecture, why = architecture_of(config), ""
    if stored.startswith("token_embd."):
        why = "looks up rows of embeddings without their global scale"
    elif ".ffn_" in stored and not architecture.scaled:
        why = f"computes the MLPs of the architecture {architecture.name} without their global scales"
    elif ".ffn_" in stored and biased:
        why = "does not run MLPs with both a global scale and a bias"
    if why:
        raise RecipeError(f"{name}: llama.cpp {why}, which {KIND.name} needs. {INSTEAD}")

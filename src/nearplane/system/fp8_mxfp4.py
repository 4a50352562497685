"""Reader of original models that are published in 8 or 4 bits; their weights are decoded to bfloat16.

    fp8      DeepSeek-V3 and others: `X.weight` in float8_e4m3fn, and `X.weight_scale_inv`, one factor per 2-D block
    mxfp4    gpt-oss: `X_blocks`, two 4-bit floats per byte (sign, 2 bits of exponent, 1 of fraction; low half first), and
             `X_scales`, one power of two per 32 inputs; the parameter of the network is the transpose

Such weights were trained or tuned in this format, so losses are measured against their decoded values. bfloat16 holds
the 4-bit floats exactly. It rounds the products of 8-bit floats and factors, as the models' own conversions do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearplane.errors import ModelError
from nearplane.system.safetensors_files import ShardReader, TensorInfo, TensorReader

SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
EXTRAS = (SCALE, ".activation_scale", ".input_scale")  # tensors of a float8 layer that are not weights
BLOCK_SIZE = 128  # rows and columns of a float8 block if config.json does not name them
FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
METHODS = ("fp8", "mxfp4")


def method_of(config: Mapping[str, Any]) -> str | None:
    """Return the entry of `METHODS` that a model's config.json names as its storage, or None."""
    section = config.get("quantization_config")
    method = section.get("quant_method") if isinstance(section, dict) else None
    return method if method in METHODS else None


def source_reader(folder: Path, config: Mapping[str, Any]) -> TensorReader:
    """Return a reader of the tensors of an original model, which decodes weights in 8 or 4 bits.

    Args:
        folder: Folder of safetensors files.
        config: Contents of its config.json.

    Raises:
        ModelError: The folder cannot be read, or a weight and its factors do not match.
    """
    return ShardReader(folder) if method_of(config) is None else WidenedReader(folder, config)


class WidenedReader(TensorReader):
    """Reader that decodes weights in 8 or 4 bits to bfloat16 and reads all others unchanged.

    Args:
        folder: Folder of safetensors files.
        config: Contents of its config.json.

    Raises:
        ModelError: The factors of a weight are missing or have another shape.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        self._reader = ShardReader(folder)
        self.method = method_of(config) or ""
        size = config["quantization_config"].get("weight_block_size") or (BLOCK_SIZE, BLOCK_SIZE)
        self._size = (int(size[0]), int(size[1]))
        fp8, stored = self.method == "fp8", self._reader.infos
        self._widen: Callable[..., Tensor] = partial(eight_bits, size=self._size) if fp8 else four_bits
        suffix, factor, extras = ("", SCALE, EXTRAS) if fp8 else (BLOCKS, SCALES, (SCALES,))
        self.infos = {}
        self._parts: dict[str, tuple[str, str]] = {}  # decoded weight: tensors of its codes and its factors
        for name, info in stored.items():
            if info.dtype == "F8_E4M3" if fp8 else name.endswith(BLOCKS):
                stem = name.removesuffix(suffix)
                self._parts[stem] = (name, stem + factor)
                self.infos[stem] = info
            elif fp8 and name + factor in stored:
                raise ModelError(
                    f"{folder}: {name} has factors, but is stored as {info.dtype}; nearplane reads F8_E4M3."
                )
            elif not name.endswith(extras):
                self.infos[name] = info
        for name, (_, factors) in self._parts.items():
            if factors not in stored:
                raise ModelError(f"{folder}: {name} has no factors: {factors} is missing. Fetch the model again.")
            self._check(name)
            shape = self.shape(name)
            if not fp8:
                *outer, out, groups, half = shape
                shape = (*outer, groups * half * 2, out)
            self.infos[name] = TensorInfo("BF16", shape, 2 * math.prod(shape), self.file(name))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors, decoded, into memory of their own."""
        widened = {}
        for name in names:
            parts = self._parts.get(name, (name,))
            tensors = self._reader.read(parts)
            widened[name] = tensors[name] if len(parts) == 1 else self._widen(*(tensors[part] for part in parts))
        return widened

    def _check(self, name: str) -> None:
        codes, factors = (self._reader.shape(part) for part in self._parts[name])
        kinds = [self._reader.dtype(part) for part in self._parts[name]]
        if self.method == "mxfp4" and kinds != ["U8", "U8"]:
            raise ModelError(f"{self.folder}: {name} and its factors are {kinds}, expected U8. Fetch the model again.")
        if self.method == "mxfp4":
            fits = len(codes) >= 3 and codes[:-1] == factors
        else:
            blocks = tuple(-(-side // size) for side, size in zip(codes, self._size, strict=False))
            fits = math.prod(factors) == 1 or (len(codes) == 2 and factors == blocks)
        if not fits:
            raise ModelError(
                f"{self.folder}: {name} has the shape {codes} and factors of shape {factors}; expected one factor for every block "
                f"of the size in config.json. Fetch the model again."
            )


def eight_bits(codes: Tensor, factors: Tensor, size: tuple[int, int]) -> Tensor:
    """Return (out, in) bfloat16 `code * factor`.

    Args:
        codes: (out, in) codes, float8.
        factors: (blocks of rows, blocks of columns) factors, or a single one; uint8 and float8_e8m0fnu are exponents.
        size: Rows and columns of a block; the last blocks may be smaller.
    """
    factors = torch.exp2(factors.float() - 127) if factors.dtype == torch.uint8 else factors.float()
    if factors.numel() > 1:
        factors = factors.repeat_interleave(size[0], 0)[: codes.shape[0]]
        factors = factors.repeat_interleave(size[1], 1)[:, : codes.shape[1]]
    return (codes.float() * factors).bfloat16()


def four_bits(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return (.., in, out) bfloat16 `value * 2^(exponent - 127)`.

    Args:
        codes: (.., out, groups, bytes) codes, two 4-bit floats per byte, the lower half first.
        exponents: (.., out, groups) biased exponents.
    """
    table = torch.tensor(FOUR_BITS, dtype=torch.float32, device=codes.device)
    values = table[torch.stack([codes & 15, codes >> 4], -1).long()].flatten(-2)  # (.., out, groups, inputs of a group)
    values = torch.ldexp(values, (exponents.int() - 127)[..., None]).flatten(-2).bfloat16()
    return values.transpose(-1, -2).contiguous()

"""Checkpoints whose makers store weights in 8 or 4 bits, read as what they mean, in bfloat16.

    fp8      DeepSeek-V3 and others: `X.weight` in float8_e4m3fn, `X.weight_scale_inv` a factor for every block of rows and columns
    mxfp4    gpt-oss: `X_blocks`, two 4-bit floats (sign, 2 bits of exponent, 1 of fraction) a byte, low half first, and `X_scales`,
             a power of two for every 32 of them along the inputs; the network has such a parameter transposed

Such weights were trained or tuned as they are stored: they are the original, and what is lost is measured against them. bfloat16
holds 4-bit floats exactly; of 8-bit ones it rounds the product with their factor, as the makers' own conversion does.
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
BESIDE = (SCALE, ".activation_scale", ".input_scale")  # what belongs to a weight in 8 bits and is none
SIZE = 128  # rows and columns of a block where config.json does not say
FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
METHODS = ("fp8", "mxfp4")


def method_of(config: Mapping[str, Any]) -> str | None:
    """Return how a model's config.json says that its makers stored it; None: as it is, or quantized by somebody else."""
    said = config.get("quantization_config")
    method = said.get("quant_method") if isinstance(said, dict) else None
    return method if method in METHODS else None


def source_reader(folder: Path, config: Mapping[str, Any]) -> TensorReader:
    """Return what reads the tensors of a model's folder as what they mean.

    Args:
        folder: of safetensors.
        config: what its config.json holds.

    Raises:
        ModelError: the folder cannot be read, or tensors do not belong together.
    """
    return ShardReader(folder) if method_of(config) is None else WidenedReader(folder, config)


class WidenedReader(TensorReader):
    """Reads weights in 8 or 4 bits as bfloat16, and all others as they are.

    Args:
        folder: of safetensors.
        config: what its config.json holds.

    Raises:
        ModelError: a weight has no factors, or such as do not fit it.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        self._reader = ShardReader(folder)
        self.method = method_of(config) or ""
        size = config["quantization_config"].get("weight_block_size") or (SIZE, SIZE)
        self._size = (int(size[0]), int(size[1]))
        fp8, there = self.method == "fp8", self._reader.infos
        self._widen: Callable[..., Tensor] = partial(eight_bits, size=self._size) if fp8 else four_bits
        suffix, factor, beside = ("", SCALE, BESIDE) if fp8 else (BLOCKS, SCALES, (SCALES,))
        self.infos = {}
        self._parts: dict[str, tuple[str, str]] = {}  # of what is widened: codes and factors
        for name, info in there.items():
            if info.dtype == "F8_E4M3" if fp8 else name.endswith(BLOCKS):
                stem = name.removesuffix(suffix)
                self._parts[stem] = (name, stem + factor)
                self.infos[stem] = info
            elif not name.endswith(beside):
                self.infos[name] = info
        for name, (_, factors) in self._parts.items():
            if factors not in there:
                raise ModelError(f"{folder}: {name} is stored in few bits, and {factors} is missing. Fetch it again.")
            self._check(name)
            shape = self.shape(name)
            if not fp8:
                *outer, out, groups, half = shape
                shape = (*outer, groups * half * 2, out)
            self.infos[name] = TensorInfo("BF16", shape, 2 * math.prod(shape), self.file(name))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors into memory of their own."""
        found = {}
        for name in names:
            parts = self._parts.get(name, (name,))
            tensors = self._reader.read(parts)
            found[name] = tensors[name] if len(parts) == 1 else self._widen(*(tensors[part] for part in parts))
        return found

    def _check(self, name: str) -> None:
        codes, factors = (self._reader.shape(part) for part in self._parts[name])
        if self.method == "mxfp4":
            fits = len(codes) >= 3 and codes[:-1] == factors
        else:
            blocks = tuple(-(-side // size) for side, size in zip(codes, self._size, strict=False))
            fits = math.prod(factors) == 1 or (len(codes) == 2 and factors == blocks)
        if not fits:
            raise ModelError(
                f"{self.folder}: {name} has the shape {codes} and factors {factors}: expected one for every block that config.json "
                f"tells of. Fetch it again."
            )


def eight_bits(codes: Tensor, factors: Tensor, size: tuple[int, int]) -> Tensor:
    """Return (out, in) bfloat16 `code * factor`.

    Args:
        codes: (out, in) float8.
        factors: (blocks of rows, blocks of columns), or one number; uint8 and float8_e8m0fnu are exponents.
        size: rows and columns of a block; the last ones may be cut off.
    """
    factors = torch.exp2(factors.float() - 127) if factors.dtype == torch.uint8 else factors.float()
    if factors.numel() > 1:
        factors = factors.repeat_interleave(size[0], 0)[: codes.shape[0]]
        factors = factors.repeat_interleave(size[1], 1)[:, : codes.shape[1]]
    return (codes.float() * factors).bfloat16()


def four_bits(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return (.., in, out) bfloat16 `value * 2^(exponent - 127)`.

    Args:
        codes: (.., out, groups, bytes) two 4-bit floats a byte, the lower half first.
        exponents: (.., out, groups).
    """
    table = torch.tensor(FOUR_BITS, dtype=torch.float32, device=codes.device)
    values = table[torch.stack([codes & 15, codes >> 4], -1).long()].flatten(-2)  # (.., out, groups, inputs of a group)
    values = torch.ldexp(values, (exponents.int() - 127)[..., None]).flatten(-2).bfloat16()
    return values.transpose(-1, -2).contiguous()

"""Reader of original models that are published in 8 or 4 bits; their weights are decoded to bfloat16.

    fp8      `X.weight` in float8_e4m3fn or float8_e5m2 and its factors: one number, one a row, or one per 2-D block
               fp8 (DeepSeek-V3, Mistral)     `X.weight_scale_inv`
               fp8 (AutoFP8), fbgemm_fp8, compressed-tensors (llm-compressor), modelopt   `X.weight_scale`
    mxfp4    gpt-oss: `X_blocks`, two 4-bit floats per byte (sign, 2 bits of exponent, 1 of fraction; low half first), and
             `X_scales`, one power of two per 32 inputs; the parameter of the network is the transpose

A weight is its code times its factor, whatever the factor is called. Numbers by which runtimes round inputs, keys and values
are left out. Such weights were trained or tuned in this format, so losses are measured against their decoded values. bfloat16
holds the 4-bit floats exactly. It rounds the products of 8-bit floats and factors, as the models' own conversions do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nearplane.errors import ModelError
from nearplane.system.safetensors_files import ShardReader, TensorInfo, TensorReader

OWN_SCALE, SCALE, BLOCKS, SCALES = "_scale_inv", "_scale", "_blocks", "_scales"
ROUNDED = ("input", "activation", "output", "q", "k", "v", "prob")  # what runtimes round by a scale of its own
EXTRAS = (  # ends of tensors beside float8 weights that are not weights
    OWN_SCALE, ".weight_scale", *(f".{each}_scale" for each in ROUNDED), ".input_scale_ub", ".weight_zero_point",
    ".input_zero_point",
)  # fmt: skip
INPUT_FACTORS = ".pre_quant_scale"  # by which a runtime multiplies inputs: the weights alone are not the model's
CODES = ("F8_E4M3", "F8_E5M2")
BLOCK_SIZE = 128  # rows and columns of a float8 block if config.json does not name them
FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class WidenedReader(TensorReader):
    """Reader that decodes weights in 8 or 4 bits to bfloat16 and reads all others unchanged.

    Args:
        reader: Reader of the files.
        method: Entry of `source_storage.METHODS` that stores the weights.
        section: What the folder says about them.

    Raises:
        ModelError: The factors of a weight are missing or have another shape, or no weight is in 8 or 4 bits.
    """

    def __init__(self, reader: ShardReader, method: str, section: Any) -> None:
        self.folder, self.method, self._reader, self._size = reader.folder, method, reader, _block_size(section)
        self.infos = {}
        self._parts: dict[str, tuple[str, str]] = {}  # decoded weight: tensors of its codes and its factors
        folder, fp8, stored = self.folder, method == "fp8", reader.infos
        for name, info in stored.items():
            factors, *others = [name + end for end in (OWN_SCALE, SCALE) if name + end in stored] or [""]
            if fp8 and others:
                raise ModelError(
                    f"{folder}: {name} has two tensors of factors, {factors} and {others[0]}, of which programs may take either. "
                    f"Pass the original model."
                )
            if fp8 and name.endswith(INPUT_FACTORS):
                raise ModelError(
                    f"{folder} is stored as {form_of(section)} with {name}, by which runtimes multiply inputs; nearplane does not "
                    f"read this form. Pass the original model."
                )
            if info.dtype in CODES if fp8 else name.endswith(BLOCKS):
                stem = name if fp8 else name.removesuffix(BLOCKS)
                self._parts[stem] = (name, factors or stem + (OWN_SCALE if fp8 else SCALES))
                self.infos[stem] = info
            elif fp8 and factors:
                raise ModelError(
                    f"{folder}: {name} has factors, but is stored as {info.dtype}; nearplane reads {' and '.join(CODES)}."
                )
            elif not name.endswith(EXTRAS if fp8 else SCALES):
                self.infos[name] = info
        for name, (_, factors) in self._parts.items():
            if factors not in stored:
                either = f" or {name}{SCALE}" * fp8
                raise ModelError(
                    f"{folder}: {name} has no factors: {factors}{either} is missing. Fetch the model again."
                )
            self._check(name)
            shape = self.shape(name)
            if not fp8:
                *outer, out, groups, half = shape
                shape = (*outer, groups * half * 2, out)
            self.infos[name] = TensorInfo("BF16", shape, 2 * math.prod(shape), self.file(name))

    @property
    def by_transformers(self) -> bool:
        """Whether transformers reads all factors of the files by their names."""
        return all(factors.endswith((OWN_SCALE, SCALES)) for _, factors in self._parts.values())

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors, decoded, into memory of their own."""
        widen = partial(eight_bits, size=self._size) if self.method == "fp8" else four_bits
        widened = {}
        for name in names:
            parts = self._parts.get(name, (name,))
            tensors = self._reader.read(parts)
            widened[name] = tensors[name] if len(parts) == 1 else widen(*(tensors[part] for part in parts))
        return widened

    def _check(self, name: str) -> None:
        codes, factors = (self._reader.shape(part) for part in self._parts[name])
        if self.method == "mxfp4":
            kinds = [self._reader.dtype(part) for part in self._parts[name]]
            if kinds != ["U8", "U8"]:
                raise ModelError(
                    f"{self.folder}: {name} and its factors are {kinds}, expected U8. Fetch the model again."
                )
            fits = len(codes) >= 3 and codes[:-1] == factors
        else:
            fits = spread(codes, factors, self._size) is not None
        if not fits:
            raise ModelError(
                f"{self.folder}: {name} has the shape {codes} and factors of shape {factors}; expected one factor, one for every "
                f"row, or one for every block of the size in config.json. Fetch the model again."
            )


def form_of(section: Any) -> str:
    """Return the name of a storage of weights: the method, and its algorithm or format."""
    if not isinstance(section, Mapping):
        return str(section)[:40]
    parts = [section.get(key) for key in ("quant_method", "quant_algo", "format")]
    return " ".join(str(part)[:40] for part in parts if part) or "an unnamed method"


def weights_of(group: Any) -> Mapping[str, Any]:
    """Return how a group of compressed-tensors stores weights."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    return weights if isinstance(weights, Mapping) else {}


def _block_size(section: Any) -> tuple[int, int]:
    """Return rows and columns of a block of weights with one factor, as far as a config names them."""
    section = section if isinstance(section, Mapping) else {}
    groups = section.get("config_groups")
    for weights in map(weights_of, groups.values() if isinstance(groups, Mapping) else ()):
        if size := weights.get("group_size"):
            return _sides((1, size))
        if size := weights.get("block_structure"):
            return _sides(size.split("x") if isinstance(size, str) else size)  # older versions write "128x128"
    return _sides(section.get("weight_block_size") or (BLOCK_SIZE, BLOCK_SIZE))


def _sides(size: Any) -> tuple[int, int]:
    """Return rows and columns of a block from a config."""
    try:
        rows, columns = map(int, size)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"The quantization of the model has blocks of {str(size)[:40]}; expected two whole numbers. Fetch the model again."
        ) from error
    return rows, columns


def spread(codes: tuple[int, ...], factors: tuple[int, ...], size: tuple[int, int]) -> tuple[int, ...] | None:
    """Return the shape in which factors are multiplied by codes of another shape, or None if they do not fit.

    >>> spread((256, 96), (256,), (128, 128))  # one for every row
    (256, 1)
    >>> spread((256, 96), (2, 1), (128, 128))  # one for every block
    (2, 1)
    """
    if math.prod(factors) == 1:
        return (1,)
    if len(codes) == 2 and factors == codes[:1]:
        return (*factors, 1)
    if len(factors) == len(codes) and all(each in (1, side) for each, side in zip(factors, codes, strict=True)):
        return factors
    blocks = tuple(-(-side // each) for side, each in zip(codes, size, strict=False))
    return factors if len(codes) == 2 and factors == blocks else None


def eight_bits(codes: Tensor, factors: Tensor, size: tuple[int, int]) -> Tensor:
    """Return (.., out, in) bfloat16 `code * factor`.

    Args:
        codes: (.., out, in) codes, float8.
        factors: Factors as `spread` takes them; uint8 and float8_e8m0fnu are exponents.
        size: Rows and columns of a block; the last blocks may be smaller.
    """
    shape = spread(tuple(codes.shape), tuple(factors.shape), size)
    assert shape is not None, "the reader has checked the factors of every weight"
    factors = torch.exp2(factors.float() - 127) if factors.dtype == torch.uint8 else factors.float()
    factors = factors.reshape(shape)
    if not all(each in (1, side) for each, side in zip(shape, codes.shape[-len(shape) :], strict=True)):
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

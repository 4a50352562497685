"""Packing `pack-quantized` of compressed-tensors: integers of 2 to 8 bits.

    NAME.weight_packed  (out, ceil(in*bits/32)) int32    codes + 2^(bits-1), a dense bit stream along the inputs
    NAME.weight_scale   (out, groups)           model's  groups of neighbours; 1 group if group_size is None
    NAME.weight_shape   (2,)                    int64    out, in

Asymmetric layers, which transformers does not load, have `NAME.weight_zero_point` (ceil(out*bits/32), groups) int32, a dense
bit stream along the outputs. `NAME.weight_g_idx` (in,) is read but never written. So are words that hold 32 // bits whole
codes, which compressed-tensors wrote before 0.18: their number tells them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

import torch
from torch import Tensor

from nearplane.coding.packed_words import pack, unpack, unpack_whole, whole_words_of, words_of
from nearplane.errors import FormatError, RecipeError
from nearplane.formats.compressed_tensors.packing import SCALES, Packing, refuse_unknown
from nearplane.formats.integers import Integers, consecutive, expect, group_size_of, of_kind
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.number_formats import NumberFormat, integers
from nearplane.recipe.runtimes import COMPRESSED_TENSORS_BITS

WORD = 32  # bits


class PackQuantized(Packing):
    """Integers as a dense bit stream."""

    SUFFIXES = (Packing.WORDS_IN, "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    FORMAT = "pack-quantized"
    TYPE = "int"
    WORDS = torch.int32
    ON_DEVICE = True

    def number_format(self, weights: Mapping[str, Any]) -> NumberFormat:
        """Return the integer format that a `weights` object describes."""
        refuse_unknown(
            {
                "weights.type": (weights.get("type"), {"int"}),
                "weights.strategy": (weights.get("strategy"), {"group", "channel"}),
                "weights.num_bits": (weights.get("num_bits"), set(COMPRESSED_TENSORS_BITS)),
            }
        )
        group_size = None
        if weights["strategy"] == "group":
            group_size = group_size_of("compressed-tensors: weights.group_size", weights.get("group_size"), ())
        value = weights.get("symmetric", True)
        symmetric = of_kind("compressed-tensors: weights.symmetric", value, bool, "true or false")
        return integers(int(weights["num_bits"]), group_size, symmetric=symmetric)

    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer."""
        stored = Integers.of(name, matrix, dtype)
        bits = stored.format.bits
        tensors = {
            f"{name}.weight_packed": pack(stored.codes, bits),
            f"{name}.weight_scale": stored.scale.contiguous(),
            f"{name}.weight_shape": torch.tensor(matrix.codes.shape, dtype=torch.int64),
        }
        if not stored.format.symmetric:
            tensors[f"{name}.weight_zero_point"] = pack(stored.zeros.T.contiguous(), bits).T.contiguous()
        return tensors

    def check(self, name: str, shape: tuple[int, int], kind: str, format: NumberFormat) -> None:
        """Refuse also outputs of which whole words hold no zero points, as vLLM joins those of several layers."""
        super().check(name, shape, kind, format)
        rows = WORD // gcd(WORD, format.bits)
        if not format.symmetric and shape[0] % rows:
            raise RecipeError(
                f"{name} has {shape[0]} outputs, but zero points of {format.bits} bits are packed for multiples of {rows}. Use "
                f"symmetric weights, or leave the layer unquantized with --ignore."
            )

    def empty(self, name: str, shape: tuple[int, int], format: NumberFormat, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer without contents."""
        out, columns = shape
        groups = format.groups(columns)
        tensors = {
            f"{name}.weight_packed": torch.empty(out, words_of(columns, format.bits), dtype=torch.int32, device="meta"),
            f"{name}.weight_scale": torch.empty(out, groups, dtype=self.scale_dtype(dtype), device="meta"),
            f"{name}.weight_shape": torch.empty(2, dtype=torch.int64, device="meta"),
        }
        if not format.symmetric:
            packed = torch.empty(words_of(out, format.bits), groups, dtype=torch.int32, device="meta")
            tensors[f"{name}.weight_zero_point"] = packed
        return tensors

    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) from `weight_shape`."""
        out, columns = (int(n) for n in expect(name, tensors, "weight_shape", (2,), {torch.int64, torch.int32}))
        return out, columns

    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix of one layer; other programs write asymmetric ones, permuted groups and padded words, too."""
        bits = format.bits
        out, columns = self.shape_of(name, tensors)
        groups = format.groups(columns)
        loaded = tensors.get(f"{name}.weight_packed")
        padded = loaded is not None and loaded.shape[-1] == whole_words_of(columns, bits) != words_of(columns, bits)
        count, read = (whole_words_of, unpack_whole) if padded else (words_of, unpack)  # before 0.18, and since
        words = expect(name, tensors, "weight_packed", (out, count(columns, bits)), {torch.int32})
        scale = expect(name, tensors, "weight_scale", (out, groups), SCALES)
        zeros = torch.full((out, groups), 2 ** (bits - 1), dtype=torch.uint8, device=words.device)
        if not format.symmetric:
            packed = expect(name, tensors, "weight_zero_point", (count(out, bits), groups), {torch.int32})
            zeros = read(packed.T.contiguous(), bits, out).T
        group = consecutive(columns, format.group, words.device)
        if f"{name}.weight_g_idx" in tensors:
            group = expect(name, tensors, "weight_g_idx", (columns,), {torch.int32, torch.int64}).to(torch.int64)
            if bool(((group < 0) | (group >= groups)).any()):
                raise FormatError(f"{name}.weight_g_idx refers to groups outside 0 to {groups - 1}.")
        codes = read(words, bits, columns)
        return Integers(codes=codes, zeros=zeros, scale=scale, group=group, format=format).matrix()

"""The AWQ format (version "gemm"), which vLLM, SGLang, gptqmodel and transformers with gptqmodel load: 4 bits, zero points.

    NAME.qweight  (in, out/8)      int32  codes 0 to 15, eight outputs to a word in the order 0 2 4 6 1 3 5 7, low bits first
    NAME.qzeros   (groups, out/8)  int32  zero points, likewise
    NAME.scales   (groups, out)    fp16

Groups are runs of neighbouring inputs. Every layer has the same group size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nearplane.coding.packed_words import pack, unpack
from nearplane.errors import FormatError, RecipeError
from nearplane.formats.container import Format
from nearplane.formats.integers import Integers, consecutive, expect, group_size_of
from nearplane.formats.layer_format import GridFormat, Held, Quantized, check_groups, check_kind
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.number_formats import NumberFormat, integers
from nearplane.recipe.readers import Weights, readers_of
from nearplane.recipe.runtimes import AWQ_BITS

ORDER = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # of the outputs in a word


class AWQ(GridFormat):
    """The tensors of a layer."""

    KEY = "qweight"
    SUFFIXES = ("qweight", "qzeros", "scales")

    def check(self, name: str, shape: tuple[int, int], kind: str, format: NumberFormat) -> None:
        """Refuse layers that readers of AWQ do not load."""
        check_kind(name, kind, ("Linear",), "AWQ stores Linear layers only")
        readers_of("awq", "nearplane").check(name, Weights(format))
        check_groups(name, shape[1], format)
        if shape[0] % len(ORDER):
            raise RecipeError(
                f"{name} has {shape[0]} outputs; AWQ stores multiples of {len(ORDER)}. Leave it unquantized with --ignore."
            )

    def held(self, matrix: QuantizedMatrix[Any], format: NumberFormat) -> Held:
        """Return symmetric codes of 4 bits as codes from 0 with the zero point 8."""
        matrix, format = GridFormat.held(self, matrix, format)
        if format == integers(AWQ_BITS, format.group):
            half, grid = -format.low, matrix.grid
            shifted = replace(grid, zero=grid.zero + half, low=0, high=2**AWQ_BITS - 1)
            matrix = QuantizedMatrix(codes=matrix.codes + half, grid=shifted)
            format = integers(AWQ_BITS, format.group, symmetric=False)
        return Held(matrix, format)

    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer."""
        stored = Integers.of(name, matrix, dtype)
        if stored.format.symmetric or stored.format.bits != AWQ_BITS or dtype != torch.float16:
            raise FormatError(f"{name}: {stored.format.name}, {dtype} scales; AWQ stores int4-asym and float16 scales.")
        if not torch.equal(stored.group, consecutive(len(stored.group), len(stored.group) // stored.scale.shape[1])):
            raise FormatError(f"{name}: its groups are not runs of neighbouring inputs, as AWQ stores them.")
        return {
            f"{name}.qweight": _words(stored.codes.T),
            f"{name}.qzeros": _words(stored.zeros.T),
            f"{name}.scales": stored.scale.T.contiguous(),
        }

    def empty(self, name: str, shape: tuple[int, int], format: NumberFormat, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer without contents."""
        (out, columns), groups = shape, format.groups(shape[1])
        return {
            f"{name}.qweight": torch.empty(columns, out // len(ORDER), dtype=torch.int32, device="meta"),
            f"{name}.qzeros": torch.empty(groups, out // len(ORDER), dtype=torch.int32, device="meta"),
            f"{name}.scales": torch.empty(groups, out, dtype=torch.float16, device="meta"),
        }

    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) from the shape of qweight."""
        columns, words = expect(name, tensors, "qweight", (None, None), {torch.int32}).shape
        return words * len(ORDER), columns

    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix of one layer."""
        out, columns = self.shape_of(name, tensors)
        groups = format.groups(columns)
        zeros = expect(name, tensors, "qzeros", (groups, out // len(ORDER)), {torch.int32})
        scale = expect(name, tensors, "scales", (groups, out), {torch.float16, torch.bfloat16, torch.float32})
        return Integers(
            codes=_numbers(tensors[f"{name}.qweight"], out).T,
            zeros=_numbers(zeros, out).T,
            scale=scale.T,
            group=consecutive(columns, format.group),
            format=format,
        ).matrix()

    def describe(self, network: Quantized) -> dict[str, Any]:
        """Return a config that names all unquantized modules.

        Raises:
            RecipeError: Layers have different group sizes.
        """
        format, *others = dict.fromkeys(network.grids.values()) or [network.scheme.number_format]
        if others:
            raise RecipeError(
                f"AWQ has one group size for all layers; found {format.name} and {others[0].name}. Use one, or --format gptq_v2."
            )
        patterns = [f".*{name.removeprefix('re:')}" for name in network.ignore if name.startswith("re:")]
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": AWQ_BITS,
            "group_size": format.group or -1,
            "zero_point": True,
            "modules_to_not_convert": [name for name in network.ignore if not name.startswith("re:")] + patterns,
        }

    def grid_of(self, config: Mapping[str, Any], name: str) -> NumberFormat:
        """Return the number format of all layers."""
        for field, expected in (("bits", AWQ_BITS), ("zero_point", True)):
            if config.get(field) is not expected and config.get(field) != expected:
                raise FormatError(f"AWQ: {field} is {config.get(field)!r}, expected {expected}.")
        if str(config.get("version", "gemm")).lower() != "gemm":
            raise FormatError(f"AWQ: version is {config['version']!r}, expected gemm.")
        size = group_size_of("AWQ: group_size", config.get("group_size", 128), (-1, None))
        return integers(AWQ_BITS, size, symmetric=False)


FORMAT = Format(AWQ())


def _words(numbers: Tensor) -> Tensor:
    """Return (rows, n/8) int32 words of (rows, n) numbers 0 to 15."""
    return pack(numbers.unflatten(1, (-1, len(ORDER)))[..., ORDER].flatten(1).contiguous(), AWQ_BITS)


def _numbers(words: Tensor, count: int) -> Tensor:
    """Return (rows, count) numbers of (rows, count/8) words."""
    numbers: Tensor = unpack(words, AWQ_BITS, count).unflatten(1, (-1, len(ORDER)))[..., ORDER.argsort()]
    return numbers.flatten(1)

"""The MLX format, which mlx_lm loads: integers of every group times a step, plus a real-valued minimum ("affine").

    NAME.weight  (out, in*bits/32)  uint32   codes from 0, a dense bit stream along the inputs
    NAME.scales  (out, groups)      model's  steps
    NAME.biases  (out, groups)      model's  minima: value = step * code + minimum

In float32, MLX decodes exactly these values. In 16 bits it rounds the product and then the sum to the dtype of the steps.
Its other modes are in `mlx_floats.py`. The config stands in config.json twice; MLX reads `quantization`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from nearplane.coding.packed_words import pack, unpack, words_of
from nearplane.errors import FormatError
from nearplane.formats.compressed_tensors.packing import SCALES
from nearplane.formats.container import Format
from nearplane.formats.integers import consecutive, expect, group_size_of, object_of
from nearplane.formats.layer_format import MLX as METHOD
from nearplane.formats.layer_format import GridFormat, Held, Quantized, check_groups, check_kind
from nearplane.formats.mlx_experts import MLXFolder, MLXReader, stack_of, stacked
from nearplane.formats.mlx_floats import MODES, empty_floats, pack_floats, unpack_floats
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.superblock import SuperGrid
from nearplane.number_formats import NumberFormat, integers
from nearplane.recipe.readers import Weights, readers_of
from nearplane.recipe.runtimes import MLX_BITS

AFFINE = "affine"  # mode of integers with a minimum
DEFAULTS: dict[str, dict[str, Any]] = {  # of MLX, for fields that the entry of a layer leaves out
    AFFINE: {"group_size": 64, "bits": 4},
    **{mode: {"group_size": format.group, "bits": format.bits} for mode, format in MODES.items()},
}


@dataclass(frozen=True, slots=True)
class MLX(GridFormat):
    """The tensors of a layer.

    Args:
        config: The quantization_config of the folder, with the group size of every layer; not compared.
    """

    config: Mapping[str, Any] = field(default_factory=dict, compare=False)

    KEY = "scales"
    SUFFIXES = ("weight", "scales", "biases")
    METADATA = "mlx"
    GLOBAL_SCALES = False

    def configured(self, config: Mapping[str, Any]) -> Self:
        """Return the format with the config, without which group sizes are unknown."""
        return type(self)(config)

    def check(self, name: str, shape: tuple[int, int], kind: str, format: NumberFormat) -> None:
        """Refuse layers that MLX does not load."""
        check_kind(name, kind, ("Linear", "Embedding", "Expert"), "MLX stores Linear layers only")
        readers_of("mlx", "nearplane").check(name, Weights(format))
        check_groups(name, shape[1], format)

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the model's dtype, in which MLX multiplies; float32 for dtypes that MLX does not have."""
        return model_dtype if model_dtype in SCALES else torch.float32

    def held(self, matrix: QuantizedMatrix[Any], format: NumberFormat) -> Held:
        """Return integers with whole zero points as integers with a minimum: the step times the distance to the zero point."""
        matrix, format = GridFormat.held(self, matrix, format)
        if format.levels is not None:
            return Held(matrix, format)
        grid, out = matrix.grid, len(matrix.codes)
        d, one = grid.scale.expand(out, -1), torch.ones(out, grid.scale.shape[1], dtype=torch.int32)
        ends = {"low": 0, "high": grid.high - grid.low}
        moved = SuperGrid(d=d, sc=one, dmin=d * (grid.zero - grid.low), m=one, group=grid.group, **ends)
        codes = QuantizedMatrix(codes=matrix.codes - grid.low, grid=moved)
        return Held(codes, integers(format.bits, format.group, minimum=True))

    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer."""
        grid, columns = matrix.grid, matrix.codes.shape[1]
        if grid.levels is not None:
            return pack_floats(name, matrix, dtype)
        groups = grid.d.shape[1] if isinstance(grid, SuperGrid) else 0
        bits = (grid.high or 0).bit_length()
        if not groups or grid.dmin is None or (grid.low, grid.high) != (0, 2**bits - 1) or bits not in MLX_BITS:
            raise FormatError(f"{name}: codes {grid.low} to {grid.high} found, expected integers with a minimum.")
        runs = torch.equal(grid.group, consecutive(columns, columns // groups)) and columns % groups == 0
        if not runs or grid.sc.shape[1] != groups or not bool((grid.sc == 1).all() and (grid.m == 1).all()):
            raise FormatError(f"{name}: its groups have steps on two levels, or are not runs of neighbouring inputs.")
        numbers = {"scales": grid.d, "biases": -grid.dmin}
        stored = {f"{name}.{part}": each.to(dtype).contiguous() for part, each in numbers.items()}
        for (part, rounded), exact in zip(stored.items(), numbers.values(), strict=True):
            if not bool((torch.isfinite(rounded) & (rounded == exact)).all()):
                raise FormatError(f"{part}: a number is not exact in {dtype}, the dtype in the file.")
        return {f"{name}.weight": pack(matrix.codes, bits).view(torch.uint32)} | stored

    def empty(self, name: str, shape: tuple[int, int], format: NumberFormat, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer without contents."""
        if format.levels is not None:
            return empty_floats(name, shape, format)
        (out, columns), groups, steps = shape, format.groups(shape[1]), self.scale_dtype(dtype)
        return {
            f"{name}.weight": torch.empty(out, words_of(columns, format.bits), dtype=torch.uint32, device="meta"),
            f"{name}.scales": torch.empty(out, groups, dtype=steps, device="meta"),
            f"{name}.biases": torch.empty(out, groups, dtype=steps, device="meta"),
        }

    def in_files(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors of the layers of a block with experts stacked."""
        return stacked(tensors)

    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) from the shape of scales and the group size."""
        out, groups = expect(name, tensors, "scales", (None, None), {*SCALES, torch.uint8}).shape
        return out, groups * (self.grid_of(self.config, name).group or 1)

    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix of one layer."""
        if format.levels is not None:
            return unpack_floats(name, tensors, format)
        out, groups = expect(name, tensors, "scales", (None, None), SCALES).shape
        columns = groups * (format.group or 1)
        words = expect(name, tensors, "weight", (out, words_of(columns, format.bits)), {torch.uint32})
        minimum = expect(name, tensors, "biases", (out, groups), SCALES)
        scale, one = tensors[f"{name}.scales"].float(), torch.ones(out, groups, dtype=torch.int32)
        grid = SuperGrid(
            d=scale,
            sc=one,
            dmin=-minimum.float(),
            m=one,
            group=consecutive(columns, format.group),
            low=0,
            high=2**format.bits - 1,
        )
        codes = unpack(words.view(torch.int32), format.bits, columns).to(torch.int32)
        return QuantizedMatrix(codes=codes, grid=grid)

    def describe(self, network: Quantized) -> dict[str, Any]:
        """Return the config of a network. MLX takes a layer for quantized if its file has scales."""
        usual = network.scheme.number_format
        if network.layers:
            usual = Counter(network.layers.values()).most_common(1)[0][0]
        one_mode = len({_mode(format) for format in (usual, *network.layers.values())}) == 1
        others = {
            stack_of(name): _fields(format) | ({} if one_mode else {"mode": _mode(format)})
            for name, format in network.layers.items()
            if format != usual
        }
        return {"quant_method": METHOD, **_fields(usual), "mode": _mode(usual), **others}

    def grid_of(self, config: Mapping[str, Any], name: str) -> NumberFormat:
        """Return the number format of a layer: integers with a minimum, or that of another mode."""
        key = next((key for key in (name, stack_of(name), stack_of(name, "experts")) if key in config), None)
        entry = dict(config) if key is None else object_of(f"MLX: {name}", config[key])
        mode = entry.get("mode", AFFINE)
        if not isinstance(mode, str) or mode not in DEFAULTS:
            raise FormatError(f"MLX: {name} has mode {mode!r}; nearplane reads only {', '.join(DEFAULTS)}.")
        entry = DEFAULTS[mode] | entry
        bits, size = entry["bits"], entry["group_size"]
        if mode != AFFINE:
            if {"group_size": size, "bits": bits} != DEFAULTS[mode]:
                raise FormatError(f"MLX: {name} has {bits!r} bits in groups of {size!r}, which {mode} has not.")
            return MODES[mode]
        if type(bits) is not int or bits not in MLX_BITS:
            raise FormatError(f"MLX: {name} has bits {bits!r}, expected {', '.join(map(str, MLX_BITS))}.")
        return integers(bits, group_size_of(f"MLX: group_size of {name}", size, ()), minimum=True)


def _mode(format: NumberFormat) -> str:
    """Return MLX's name of how weights of a number format are stored."""
    return AFFINE if format.minimum else format.name


def _fields(format: NumberFormat) -> dict[str, Any]:
    """Return the fields of the config for a number format."""
    return {"group_size": format.group, "bits": format.bits}


FORMAT = Format(MLX(), MLXFolder, MLXReader)

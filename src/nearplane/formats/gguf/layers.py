"""A quantized layer in a GGUF: one tensor of blocks, whose type is in its name here and in the header of the file.

    NAME.weight_q4_k  (out, bytes of a row)  uint8

and what config.json beside the file says of them, for the commands that read the folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from nearplane.errors import FormatError, RecipeError
from nearplane.formats.config_file import ConfigFile, Quantized
from nearplane.formats.gguf.blocks import TYPES, BlockType, pack, unpack
from nearplane.formats.integers import expect
from nearplane.formats.layer_format import LayerFormat
from nearplane.gguf_header import FILE
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.superblock import SuperGrid
from nearplane.schemes import LayerGrid

METHOD, FORMAT_VERSION = "gguf", 1
KINDS = ("Linear", "Conv1D", "Embedding", "Expert")
PLAIN = {(kind.bits, kind.group): kind for kind in TYPES.values() if kind.symmetric and kind.single}


class Blocks(LayerFormat):
    """The tensor of a layer."""

    KEY = "weight"
    SUFFIXES = tuple(f"weight_{name}" for name in TYPES)
    BITS = tuple(sorted({bits for bits, _ in PLAIN}))

    def check(self, name: str, shape: tuple[int, int], kind: str, grid: LayerGrid) -> None:
        """Refuse grids that no type of llama.cpp has, and rows that blocks do not divide."""
        if kind not in KINDS:
            raise RecipeError(f"{name} is a {kind}; a GGUF holds {', '.join(KINDS)}. Leave it as it is with --ignore.")
        block = type_of(name, grid)
        if shape[1] % block.columns:
            raise RecipeError(
                f"{name} has {shape[1]} inputs, not a multiple of the {block.columns} of a block of {block.name}. Leave it as it "
                f"is with --ignore."
            )

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return fp16, in every model."""
        del model_dtype
        return torch.float16

    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the blocks of one layer."""
        del dtype
        kind, matrix = _with_blocks(name, matrix)
        return {f"{name}.weight_{kind.name}": pack(kind, matrix)}

    def parts(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the tensors of every layer: one."""
        found = {}
        for name in names:
            layer, _, suffix = name.rpartition(".")
            if suffix in self.SUFFIXES:
                found[layer] = [name]
        return found

    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) as blocks and their type tell."""
        kind = _stored(name, tensors)
        raw = expect(name, tensors, f"weight_{kind.name}", (None, None), {torch.uint8})
        return raw.shape[0], raw.shape[1] // kind.bytes * kind.columns

    def unpack(self, name: str, tensors: Mapping[str, Tensor], grid: LayerGrid) -> QuantizedMatrix:
        """Return the matrix of one layer."""
        kind = _stored(name, tensors)
        if kind.name != grid.blocks:
            raise FormatError(f"{name}: blocks of {kind.name}, config.json says {grid.blocks}. Fetch the folder again.")
        return unpack(kind, tensors[f"{name}.weight_{kind.name}"], self.shape_of(name, tensors)[1])


LAYERS = Blocks()


class Config(ConfigFile):
    """What config.json says: the type of every layer, and what the file says of embeddings and tokenizer."""

    def describe(self, network: Quantized) -> dict[str, Any]:
        """Return the config of a network."""
        types = {name: type_of(name, grid).name for name, grid in sorted(network.layers.items())}
        said = {"embeddings": network.embeddings, "pre": network.pre}
        return {
            "quant_method": METHOD,
            "format_version": FORMAT_VERSION,
            "file": FILE,
            "types": types,
            **{key: value for key, value in said.items() if value is not None},
            "written_by": f"nearplane {network.version}",
        }

    def grid_of(self, config: Mapping[str, Any], name: str) -> LayerGrid:
        """Return the grid of the type that the config says."""
        if config.get("format_version") != FORMAT_VERSION or config.get("file") != FILE:
            raise FormatError(
                f"quantization_config says version {config.get('format_version')!r} of {config.get('file')!r}; this version of "
                f"nearplane reads {FORMAT_VERSION} of {FILE}. Update nearplane, or fetch config.json again."
            )
        types = config.get("types")
        kind = types.get(name) if isinstance(types, Mapping) else None
        if not isinstance(kind, str) or kind not in TYPES:
            raise FormatError(
                f"{name}: its type in config.json is {kind!r}; known are {', '.join(TYPES)}. Fetch it again."
            )
        return LayerGrid(TYPES[kind].bits, TYPES[kind].group, TYPES[kind].symmetric, blocks=kind)


def type_of(name: str, grid: LayerGrid) -> BlockType:
    """Return the type of blocks of a grid.

    Raises:
        RecipeError: there is none.
    """
    if grid.blocks is not None:
        return TYPES[grid.blocks]
    kind = PLAIN.get((grid.bits, grid.group_size)) if grid.symmetric else None
    if kind is None:
        raise RecipeError(
            f"{name}: {grid.bits} bits in {'' if grid.symmetric else 'a'}symmetric groups of {grid.group_size or 'a row'} asked "
            f"for; a GGUF has {', '.join(str(bits) for bits, _ in PLAIN)} bits in symmetric groups of 32 (--group-size 32), and "
            f"the types of --grid."
        )
    return kind


def _with_blocks(name: str, matrix: QuantizedMatrix[Any]) -> tuple[BlockType, QuantizedMatrix[SuperGrid]]:
    """Return the type of blocks that holds a matrix, and the matrix on their grid."""
    grid = matrix.grid
    if isinstance(grid, SuperGrid):
        columns = matrix.codes.shape[1] // grid.d.shape[1]
        for kind in TYPES.values():
            if (kind.low, kind.high, kind.columns) == (grid.low, grid.high, columns):
                return kind, matrix
    elif isinstance(grid, Grid) and grid.levels is None and not bool(grid.zero.any()):
        group = matrix.codes.shape[1] // grid.scale.shape[1]
        for kind in PLAIN.values():
            if (kind.low, kind.high, kind.group) == (grid.low, grid.high, group):
                d = grid.scale.expand(len(matrix.codes), -1)
                blocks = SuperGrid(
                    d=d, sc=torch.ones_like(d, dtype=torch.int32), group=grid.group, low=grid.low, high=grid.high
                )
                return kind, QuantizedMatrix(codes=matrix.codes, grid=blocks)
    raise FormatError(
        f"{name}: codes from {getattr(grid, 'low', None)} to {getattr(grid, 'high', None)} on a grid that no type of GGUF has."
    )


def _stored(name: str, tensors: Mapping[str, Tensor]) -> BlockType:
    """Return the type of the blocks that are there."""
    found = [kind for kind in TYPES.values() if f"{name}.weight_{kind.name}" in tensors]
    if len(found) != 1:
        raise FormatError(f"{name}: {len(found)} tensors of blocks, expected one. Fetch the folder again.")
    return found[0]

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
from nearplane.formats.gguf.block_bytes import pack, unpack
from nearplane.formats.gguf.gguf_header import FILE
from nearplane.formats.integers import expect
from nearplane.formats.layer_format import LayerFormat
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.number_formats import TYPES, BlockType, NumberFormat, integers
from nearplane.lattice.superblock import SuperGrid, on_two_levels

METHOD, FORMAT_VERSION = "gguf", 1
KINDS = ("Linear", "Conv1D", "Embedding", "Expert")
PLAIN = {integers(kind.bits, kind.group): kind for kind in TYPES.values() if kind.symmetric and kind.single}


class Blocks(LayerFormat):
    """The tensor of a layer."""

    KEY = "weight"
    SUFFIXES = tuple(f"weight_{name}" for name in TYPES)
    BITS = tuple(sorted(format.bits for format in PLAIN))

    def check(self, name: str, shape: tuple[int, int], kind: str, format: NumberFormat) -> None:
        """Refuse grids that no type of llama.cpp has, and rows that blocks do not divide."""
        if kind not in KINDS:
            raise RecipeError(f"{name} is a {kind}; a GGUF holds {', '.join(KINDS)}. Leave it as it is with --ignore.")
        block = block_type(name, format)
        if shape[1] % block.columns:
            raise RecipeError(
                f"{name} has {shape[1]} inputs, not a multiple of the {block.columns} of a block of {block.name}. Leave it as it "
                f"is with --ignore."
            )

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return fp16, in every model."""
        return torch.float16

    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the blocks of one layer."""
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

    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix of one layer."""
        kind = _stored(name, tensors)
        if kind != format:
            raise FormatError(f"{name}: blocks of {kind.name}, config.json says {format.name}. Fetch the folder again.")
        return unpack(kind, tensors[f"{name}.weight_{kind.name}"], self.shape_of(name, tensors)[1])


LAYERS = Blocks()


class Config(ConfigFile):
    """What config.json says: the type of every layer, and what the file says of embeddings and tokenizer."""

    def describe(self, network: Quantized) -> dict[str, Any]:
        """Return the config of a network."""
        types = {name: block_type(name, format).name for name, format in sorted(network.layers.items())}
        said = {"embeddings": network.embeddings, "pre": network.pre}
        return {
            "quant_method": METHOD,
            "format_version": FORMAT_VERSION,
            "file": FILE,
            "types": types,
            **{key: value for key, value in said.items() if value is not None},
            "written_by": f"nearplane {network.version}",
        }

    def grid_of(self, config: Mapping[str, Any], name: str) -> NumberFormat:
        """Return the type that the config says."""
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
        return TYPES[kind]


def block_type(name: str, format: NumberFormat) -> BlockType:
    """Return the type of blocks that holds a number format.

    Raises:
        RecipeError: there is none.
    """
    kind = TYPES.get(format.name) or PLAIN.get(format)
    if kind is None:
        asked = f"{format.bits} bits in {'' if format.symmetric else 'a'}symmetric groups of {format.group or 'a row'}"
        plain = ", ".join(str(each.bits) for each in PLAIN)
        raise RecipeError(
            f"{name}: {asked if format.levels is None else format.name} asked for; a GGUF has {plain} bits in symmetric groups of "
            f"32 (--group-size 32), and the types of --grid."
        )
    return kind


def _with_blocks(name: str, matrix: QuantizedMatrix[Any]) -> tuple[BlockType, QuantizedMatrix[SuperGrid]]:
    """Return the type of blocks that holds a matrix, and the matrix on their grid."""
    if (found := on_two_levels(matrix)) is not None:
        columns = matrix.codes.shape[1] // found.grid.d.shape[1]
        for kind in TYPES.values():
            if (kind.low, kind.high, kind.columns) == (found.grid.low, found.grid.high, columns):
                return kind, found
    grid = matrix.grid
    raise FormatError(
        f"{name}: codes from {getattr(grid, 'low', None)} to {getattr(grid, 'high', None)} on a grid that no type of GGUF has."
    )


def _stored(name: str, tensors: Mapping[str, Tensor]) -> BlockType:
    """Return the type of the blocks that are there."""
    found = [kind for kind in TYPES.values() if f"{name}.weight_{kind.name}" in tensors]
    if len(found) != 1:
        raise FormatError(f"{name}: {len(found)} tensors of blocks, expected one. Fetch the folder again.")
    return found[0]

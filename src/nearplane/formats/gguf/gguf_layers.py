"""Storage of quantized layers in a GGUF, and their config in config.json. A layer is one tensor of blocks:

    NAME.weight_q4_k          (out, bytes of a row)  uint8
    NAME.weight_global_scale  (1,)                   float32  nvfp4 alone, see `nvfp4_blocks.py`

The type of the blocks is part of the name here and stands in the header of the file.

A block holds 32 or 256 neighbours of a row. Types of 32 have a 16-bit step (mxfp4: the exponent of a power of two,
8 bits) and some a 16-bit minimum; those of 256
("k-quants", see `kquants.py`) have 16-bit numbers for the block and short integers for its groups. Codes and steps are
stored bit for bit: nothing is rounded here, and a value that a type cannot store exactly is an error.

Layouts: `ggml/src/ggml-common.h` and `ggml-quants.c` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from nearplane.errors import FormatError, RecipeError
from nearplane.formats.compressed_tensors.fp4_packed import codes_of, exponents, nibbles, powers
from nearplane.formats.gguf import nvfp4_blocks
from nearplane.formats.gguf.gguf_header import FILE, GLOBAL_SCALE
from nearplane.formats.gguf.kquants import KQUANTS, Fields, in_bytes, split
from nearplane.formats.integers import expect
from nearplane.formats.layer_format import Held, LayerFormat, Quantized, check_kind
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.octaves import OctaveGrid
from nearplane.lattice.shared_grid import SharedGrid
from nearplane.lattice.superblock import SuperGrid, in_blocks, on_two_levels
from nearplane.number_formats import GGUF_TYPES, MXFP4, TYPES, BlockType, NumberFormat, integers, number_format
from nearplane.recipe.readers import Weights, readers_of

METHOD, FORMAT_VERSION = "gguf", 1
KINDS = ("Linear", "Conv1D", "Embedding", "Expert")
INTEGERS = {  # types that hold plain integers
    integers(kind.bits, kind.group): kind
    for kind in TYPES.values()
    if kind.symmetric and kind.single and kind.levels is None
}


class Blocks(LayerFormat):
    """Storage of a layer as one tensor of blocks, in nvfp4 with a global scale."""

    KEY = "weight"
    SUFFIXES = (*(f"weight_{name}" for name in GGUF_TYPES), GLOBAL_SCALE)

    def check(self, name: str, shape: tuple[int, int], kind: str, format: NumberFormat) -> None:
        """Refuse grids that no type of llama.cpp has, and rows that are no whole number of blocks."""
        check_kind(name, kind, KINDS, f"GGUF has {', '.join(KINDS)}")
        block = block_type(name, format)
        if shape[1] % block.columns:
            raise RecipeError(
                f"{name} has {shape[1]} inputs, not a multiple of {block.columns}, the block size of {block.name}. Leave the "
                f"layer unquantized with --ignore."
            )

    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the blocks of one layer."""
        if isinstance(matrix.grid, SharedGrid):
            return nvfp4_blocks.pack(name, matrix)
        kind, matrix = _with_blocks(name, matrix)
        return {f"{name}.weight_{kind.name}": packed_blocks(kind, matrix)}

    def held(self, matrix: QuantizedMatrix[Any], format: NumberFormat) -> Held:
        """Return the matrix in blocks of the first type that has its codes and divides its groups.

        Minima of types of 32 are 16-bit numbers, which products of steps and zeros rarely are; those types are left out.
        """
        for kind in () if isinstance(format, BlockType) or format.levels else TYPES.values():
            same = (kind.bits, kind.symmetric, kind.levels) == (format.bits, format.symmetric, None)
            if (
                same
                and not (format.group or matrix.codes.shape[1]) % kind.columns
                and (kind.symmetric or not kind.single)
            ):
                return Held(in_blocks(matrix, kind), kind)
        return Held(matrix, format)

    def parts(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the tensor of blocks of every layer, and its global scale."""
        parts = dict[str, list[str]]()
        for name in sorted(names, key=lambda name: name.endswith(GLOBAL_SCALE)):
            layer, _, suffix = name.rpartition(".")
            if suffix in self.SUFFIXES and (suffix != GLOBAL_SCALE or layer in parts):
                parts.setdefault(layer, []).append(name)
        return parts

    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) from the shape and the type of the blocks."""
        kind = _stored(name, tensors)
        raw = expect(name, tensors, f"weight_{kind.name}", (None, None), {torch.uint8})
        return raw.shape[0], raw.shape[1] // kind.bytes * kind.columns

    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix of one layer."""
        kind = _stored(name, tensors)
        if kind.name != format.name:
            raise FormatError(f"{name} is {kind.name}, but {format.name} in config.json. Fetch the folder again.")
        shape = self.shape_of(name, tensors)
        if kind == nvfp4_blocks.KIND:
            return nvfp4_blocks.unpack(name, tensors, shape)
        return unpack(kind, tensors[f"{name}.weight_{kind.name}"], shape[1])

    def describe(self, network: Quantized) -> dict[str, Any]:
        """Return the config of a network."""
        types = {name: block_type(name, format).name for name, format in sorted(network.layers.items())}
        options = {"embeddings": network.embeddings, "pre": network.pre}
        return {
            "quant_method": METHOD,
            "format_version": FORMAT_VERSION,
            "file": FILE,
            "types": types,
            **{key: value for key, value in options.items() if value is not None},
            "written_by": f"nearplane {network.version}",
        }

    def grid_of(self, config: Mapping[str, Any], name: str) -> NumberFormat:
        """Return the number format of a layer in the config."""
        if config.get("format_version") != FORMAT_VERSION or config.get("file") != FILE:
            raise FormatError(
                f"quantization_config has version {config.get('format_version')!r} and file {config.get('file')!r}, "
                f"expected {FORMAT_VERSION} and {FILE}. Update nearplane, or fetch config.json again."
            )
        types = config.get("types")
        kind = types.get(name) if isinstance(types, Mapping) else None
        if not isinstance(kind, str) or kind not in GGUF_TYPES:
            raise FormatError(
                f"{name} has type {kind!r} in config.json, expected one of {', '.join(GGUF_TYPES)}. Fetch config.json again."
            )
        return number_format(kind)


def block_type(name: str, format: NumberFormat) -> BlockType:
    """Return the block type that stores a number format.

    Raises:
        RecipeError: No block type stores it.
    """
    readers_of("gguf", "nearplane").check(name, Weights(format))
    return GGUF_TYPES.get(format.name) or INTEGERS[format]


def _with_blocks(name: str, matrix: QuantizedMatrix[Any]) -> tuple[BlockType, QuantizedMatrix[Any]]:
    """Return the block type that stores a matrix, and the matrix on its grid."""
    if (levels := getattr(matrix.grid, "levels", None)) is not None:
        single = not isinstance(matrix.grid, SuperGrid)
        for kind in TYPES.values():
            if kind.levels == tuple(levels.tolist()) and kind.single == single:
                return kind, matrix
    if (on_grid := on_two_levels(matrix)) is not None:
        columns = matrix.codes.shape[1] // on_grid.grid.d.shape[1]
        for kind in TYPES.values():
            same = (kind.low, kind.high, kind.columns) == (on_grid.grid.low, on_grid.grid.high, columns)
            if same and kind.levels is None:
                return kind, on_grid
    grid = matrix.grid
    raise FormatError(
        f"{name}: no GGUF type stores its codes from {getattr(grid, 'low', None)} to {getattr(grid, 'high', None)}."
    )


def _stored(name: str, tensors: Mapping[str, Tensor]) -> BlockType:
    """Return the type of a layer's blocks from the name of their tensor."""
    kinds = [kind for kind in GGUF_TYPES.values() if f"{name}.weight_{kind.name}" in tensors]
    if len(kinds) != 1:
        raise FormatError(f"{name} has {len(kinds)} tensors of blocks, expected one. Fetch the folder again.")
    return kinds[0]


def packed_blocks(kind: BlockType, matrix: QuantizedMatrix) -> Tensor:
    """Return the blocks of a matrix, (out, bytes of a row) uint8.

    Args:
        kind: Type of the blocks.
        matrix: Codes, and a `SuperGrid` whose groups and blocks are runs of neighbours; of a type with levels and one
            step a block, a `Grid`.

    Raises:
        FormatError: The type cannot store the matrix exactly.
    """
    grid, codes = matrix.grid, matrix.codes
    if kind.levels is not None and kind.single:
        return _pack(kind, _on_levels(kind, matrix)).reshape(len(codes), -1)
    if not isinstance(grid, SuperGrid):
        raise FormatError(f"{kind.name}: the matrix is on a {type(grid).__name__}, expected a SuperGrid of that type.")
    out, columns = codes.shape
    if columns % kind.columns:
        raise FormatError(f"{kind.name}: {columns} inputs are not a multiple of the block size {kind.columns}.")
    blocks, groups = columns // kind.columns, columns // kind.group
    runs = torch.arange(columns, device=codes.device) // kind.group
    shapes = {"d": (out, blocks), "sc": (out, groups)}
    if kind.m:
        shapes |= {"dmin": (out, blocks), "m": (out, groups)}
    actual = {name: tuple(part.shape) for name, part in grid.parts.items()}
    if actual != shapes or not torch.equal(grid.group, runs) or (grid.low, grid.high) != (kind.low, kind.high):
        raise FormatError(
            f"{kind.name}: codes {grid.low} to {grid.high} with {actual} found, expected {kind.low} to {kind.high} "
            f"with {shapes}, in groups of {kind.group} neighbours."
        )
    _within(kind, "codes", codes, (kind.low, kind.high))
    _within(kind, "sc", grid.sc, kind.sc)
    if grid.m is not None:
        _within(kind, "m", grid.m, (1, 1) if kind.columns == 32 else (0, kind.m))
    d = _halves(f"{kind.name}: a step (d)", grid.d.reshape(-1))
    fields = Fields(
        codes=(codes - kind.low).reshape(-1, kind.columns).to(torch.uint8),
        d=d,
        dmin=d[:, :0] if grid.dmin is None else _halves(f"{kind.name}: a step of minima (dmin)", grid.dmin.reshape(-1)),
        sc=grid.sc.reshape(len(d), -1).to(torch.int16),
        m=d[:, :0] if grid.m is None else grid.m.reshape(len(d), -1).to(torch.int16),
    )
    return (KQUANTS[kind.name].pack(fields) if kind.name in KQUANTS else _pack(kind, fields)).reshape(out, -1)


def _on_levels(kind: BlockType, matrix: QuantizedMatrix[Any]) -> Fields:
    """Return the fields of blocks with levels and one step each.

    Raises:
        FormatError: The type cannot store the matrix exactly.
    """
    grid, (out, columns) = matrix.grid, matrix.codes.shape
    runs = torch.arange(columns, device=matrix.codes.device) // kind.group
    if (
        columns % kind.columns
        or grid.levels is None
        or tuple(grid.levels.tolist()) != kind.levels
        or grid.scale.shape != (out, columns // kind.columns)
        or bool(grid.zero.any())
        or not torch.equal(grid.group, runs)
    ):
        raise FormatError(
            f"{kind.name}: {tuple(grid.scale.shape)} steps of {columns} inputs found, expected one for each {kind.columns} "
            f"neighbours, the type's levels, and no zeros."
        )
    _within(kind, "codes", matrix.codes, (kind.low, kind.high))
    codes = matrix.codes.reshape(-1, kind.columns).to(torch.uint8)
    if kind == MXFP4:
        d, codes = exponents(kind.name, grid.scale).view(-1, 1), nibbles(codes.int()).to(torch.uint8)
    else:
        d = _halves(f"{kind.name}: a step (d)", grid.scale.reshape(-1))
    return Fields(codes=codes, d=d, dmin=d[:, :0], sc=d[:, :0], m=d[:, :0])


def unpack(kind: BlockType, raw: Tensor, columns: int) -> QuantizedMatrix[Any]:
    """Return the matrix whose blocks are `raw`, with steps in float32.

    Args:
        kind: Type of the blocks.
        raw: (out, bytes of a row) uint8 blocks.
        columns: Number of inputs of the layer.

    Raises:
        FormatError: The number of bytes does not fit the number of inputs.
    """
    expected = columns // kind.columns * kind.bytes
    if raw.dtype != torch.uint8 or raw.ndim != 2 or raw.shape[1] != expected or columns % kind.columns or not columns:
        raise FormatError(
            f"{kind.name}: {str(raw.dtype).removeprefix('torch.')} {tuple(raw.shape)} found, expected uint8 with "
            f"{expected} bytes per row of {columns} inputs, {kind.bytes} for every {kind.columns}."
        )
    out = len(raw)
    blocks = raw.reshape(-1, kind.bytes)
    fields = KQUANTS[kind.name].unpack(blocks) if kind.name in KQUANTS else _unpack(kind, blocks)
    if kind == MXFP4:
        fields = fields._replace(codes=codes_of(fields.codes.to(torch.int32)))
    group, codes = torch.arange(columns, device=raw.device) // kind.group, fields.codes.to(torch.int32) + kind.low
    levels = None if kind.levels is None else torch.tensor(kind.levels, dtype=torch.float64)
    if levels is not None and kind.single:
        scale = (powers(fields.d) if kind == MXFP4 else _halves_of(fields.d)).view(out, -1)
        plain = (OctaveGrid if kind == MXFP4 else Grid)(
            scale=scale, zero=torch.zeros_like(scale), group=group, low=kind.low, high=kind.high, levels=levels
        )
        return QuantizedMatrix(codes=codes.view(out, columns), grid=plain)
    grid = SuperGrid(
        d=_halves_of(fields.d).view(out, -1),
        sc=fields.sc.to(torch.int32).view(out, -1),
        dmin=_halves_of(fields.dmin).view(out, -1) if kind.m else None,
        m=fields.m.to(torch.int32).view(out, -1) if kind.m else None,
        group=group,
        low=kind.low,
        high=kind.high,
        levels=levels,
    )
    return QuantizedMatrix(codes=codes.view(out, columns), grid=grid)


def _within(kind: BlockType, what: str, integers: Tensor, limits: tuple[int, int]) -> None:
    if integers.numel() and (int(integers.min()) < limits[0] or int(integers.max()) > limits[1]):
        raise FormatError(
            f"{kind.name}: {what} from {int(integers.min())} to {int(integers.max())}, expected {limits[0]} to "
            f"{limits[1]}."
        )


def _pack(kind: BlockType, f: Fields) -> Tensor:
    """Return the bytes of blocks of 32: d, the minimum, four bytes of fifth bits, codes; 8-bit codes are signed."""
    if kind.bits == 8:
        return torch.cat([f.d, f.codes ^ 128], 1)
    fifth = in_bytes((f.codes >> 4).view(-1, 4, 8).mT, 1) if kind.bits == 5 else f.codes[:, :0]
    return torch.cat([f.d, _negative(f.dmin), fifth, in_bytes((f.codes & 15).view(-1, 2, 16), 4)], 1)


def _unpack(kind: BlockType, raw: Tensor) -> Fields:
    """Return the fields of blocks of 32, each of which is one group."""
    step, fifth = 1 if kind == MXFP4 else 2, 4 if kind.bits == 5 else 0
    d, dmin, high, low = raw.split([step, 2 * kind.m, fifth, kind.bytes - step - 2 * kind.m - fifth], 1)
    codes = low ^ 128 if kind.bits == 8 else split(low, 4).reshape(-1, 32)
    if fifth:
        codes = codes | split(high, 1).mT.reshape(-1, 32) << 4
    one = torch.ones(len(d), 1, dtype=torch.int16, device=d.device)
    return Fields(codes=codes, d=d, dmin=_negative(dmin), sc=one, m=one)


def _negative(half: Tensor) -> Tensor:
    """Negate 16-bit floating-point numbers: files store a minimum, a grid an offset that is subtracted.

    Args:
        half: (blocks, 2) bytes, or (blocks, 0).
    """
    return half ^ torch.tensor([0, 128], dtype=torch.uint8, device=half.device)[: half.shape[1]]


def _halves(name: str, numbers: Tensor) -> Tensor:
    """Return numbers (n,) as (n, 2) bytes of 16-bit floating point, the lower first.

    Raises:
        FormatError: A number is not exact in float16.
    """
    halves = numbers.to(torch.float16)
    if not bool((torch.isfinite(halves) & (halves == numbers)).all()):
        raise FormatError(f"{name} is not exact in float16, the dtype in the file. Round the steps before the solve.")
    return halves.contiguous().view(torch.uint8).view(-1, 2)


def _halves_of(raw: Tensor) -> Tensor:
    """Return (n, 2) bytes of 16-bit floating-point numbers as (n,) float32."""
    return raw.contiguous().view(torch.float16).view(-1).float()

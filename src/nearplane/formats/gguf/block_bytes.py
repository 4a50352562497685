"""The block types of GGUF and their bytes: codes and steps of a matrix into blocks and back, bit for bit.

A block holds 32 or 256 neighbours of a row. Types of 32 have a 16-bit step and maybe a 16-bit minimum; those of 256
("k-quants", see `kquants.py`) have 16-bit numbers for the block and short integers for the groups in it. Nothing is rounded
here: what a type cannot hold exactly is an error.

Layouts: `ggml/src/ggml-common.h` and `ggml-quants.c` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nearplane.errors import FormatError
from nearplane.formats.gguf import kquants
from nearplane.formats.gguf.bits import Fields, halves, halves_of
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.number_formats import BlockType
from nearplane.lattice.superblock import SuperGrid


def pack(kind: BlockType, matrix: QuantizedMatrix) -> Tensor:
    """Return the blocks of a matrix, (out, bytes of a row) uint8.

    Args:
        kind: of its blocks.
        matrix: codes, and a `SuperGrid` whose groups and blocks are runs of neighbours.

    Raises:
        FormatError: the type cannot hold the matrix exactly.
    """
    grid, codes = matrix.grid, matrix.codes
    if not isinstance(grid, SuperGrid):
        raise FormatError(f"{kind.name}: the matrix is on a {type(grid).__name__}, expected a SuperGrid of that type.")
    out, columns = codes.shape
    if columns % kind.columns:
        raise FormatError(f"{kind.name}: {columns} inputs are not a multiple of the {kind.columns} of a block.")
    blocks, groups = columns // kind.columns, columns // kind.group
    runs = torch.arange(columns, device=codes.device) // kind.group
    shapes = {"d": (out, blocks), "sc": (out, groups)}
    if kind.m:
        shapes |= {"dmin": (out, blocks), "m": (out, groups)}
    found = {name: tuple(part.shape) for name, part in grid.parts.items()}
    if found != shapes or not torch.equal(grid.group, runs) or (grid.low, grid.high) != (kind.low, kind.high):
        raise FormatError(
            f"{kind.name}: codes {grid.low} to {grid.high} with {found} found, expected {kind.low} to {kind.high} with {shapes}, "
            f"{kind.group} neighbours a group."
        )
    _within(kind, "codes", codes, (kind.low, kind.high))
    _within(kind, "sc", grid.sc, kind.sc)
    if grid.m is not None:
        _within(kind, "m", grid.m, (1, 1) if kind.columns == 32 else (0, kind.m))
    fields = Fields(
        codes=(codes - kind.low).reshape(-1, kind.columns).to(torch.uint8),
        d=halves(f"{kind.name}: d", grid.d.reshape(-1)),
        dmin=None if grid.dmin is None else halves(f"{kind.name}: dmin", grid.dmin.reshape(-1)),
        sc=grid.sc.reshape(len(grid.d.reshape(-1)), -1).to(torch.int16),
        m=None if grid.m is None else grid.m.reshape(len(grid.d.reshape(-1)), -1).to(torch.int16),
    )
    return LAYOUTS[kind.name].pack(fields).reshape(out, -1)


def unpack(kind: BlockType, raw: Tensor, columns: int) -> QuantizedMatrix[SuperGrid]:
    """Return the matrix whose blocks are `raw`, with steps in float32.

    Args:
        kind: of its blocks.
        raw: (out, bytes of a row) uint8.
        columns: inputs of the layer.

    Raises:
        FormatError: there are more or fewer bytes than the blocks of such rows take.
    """
    expected = columns // kind.columns * kind.bytes
    if raw.dtype != torch.uint8 or raw.ndim != 2 or raw.shape[1] != expected or columns % kind.columns or not columns:
        raise FormatError(
            f"{kind.name}: {str(raw.dtype).removeprefix('torch.')} {tuple(raw.shape)} found, expected uint8 with {expected} bytes "
            f"a row of {columns} inputs, {kind.bytes} for {kind.columns}."
        )
    out = len(raw)
    fields = LAYOUTS[kind.name].unpack(raw.reshape(-1, kind.bytes))
    grid = SuperGrid(
        d=halves_of(fields.d).view(out, -1),
        sc=fields.sc.to(torch.int32).view(out, -1),
        dmin=None if fields.dmin is None else halves_of(fields.dmin).view(out, -1),
        m=None if fields.m is None else fields.m.to(torch.int32).view(out, -1),
        group=torch.arange(columns, device=raw.device) // kind.group,
        low=kind.low,
        high=kind.high,
    )
    return QuantizedMatrix(codes=(fields.codes.to(torch.int32) + kind.low).view(out, columns), grid=grid)


def _within(kind: BlockType, what: str, integers: Tensor, limits: tuple[int, int]) -> None:
    if integers.numel() and (int(integers.min()) < limits[0] or int(integers.max()) > limits[1]):
        raise FormatError(
            f"{kind.name}: {what} from {int(integers.min())} to {int(integers.max())}, expected {limits[0]} to {limits[1]}."
        )


def _pack_q4_0(f: Fields) -> Tensor:
    return torch.cat([f.d, _nibbles(f.codes)], 1)


def _pack_q4_1(f: Fields) -> Tensor:
    return torch.cat([f.d, _minimum(f), _nibbles(f.codes)], 1)


def _pack_q5_0(f: Fields) -> Tensor:
    return torch.cat([f.d, _fifth_bits(f.codes), _nibbles(f.codes & 15)], 1)


def _pack_q5_1(f: Fields) -> Tensor:
    return torch.cat([f.d, _minimum(f), _fifth_bits(f.codes), _nibbles(f.codes & 15)], 1)


def _pack_q8_0(f: Fields) -> Tensor:
    return torch.cat([f.d, f.codes ^ 128], 1)  # 128 more than the code, as signed byte


def _unpack_q4_0(raw: Tensor) -> Fields:
    return _flat(raw[:, :2], None, _of_nibbles(raw[:, 2:]))


def _unpack_q4_1(raw: Tensor) -> Fields:
    return _flat(raw[:, :2], raw[:, 2:4], _of_nibbles(raw[:, 4:]))


def _unpack_q5_0(raw: Tensor) -> Fields:
    return _flat(raw[:, :2], None, _of_nibbles(raw[:, 6:]) | _of_fifth_bits(raw[:, 2:6]))


def _unpack_q5_1(raw: Tensor) -> Fields:
    return _flat(raw[:, :2], raw[:, 2:4], _of_nibbles(raw[:, 8:]) | _of_fifth_bits(raw[:, 4:8]))


def _unpack_q8_0(raw: Tensor) -> Fields:
    return _flat(raw[:, :2], None, raw[:, 2:] ^ 128)


def _flat(d: Tensor, minimum: Tensor | None, codes: Tensor) -> Fields:
    """Return the fields of blocks that are one group each; the file has the minimum, an offset is what is subtracted."""
    one = torch.ones(len(d), 1, dtype=torch.int16, device=d.device)
    dmin = None if minimum is None else _negative(minimum)
    return Fields(codes=codes, d=d, dmin=dmin, sc=one, m=None if minimum is None else one)


def _minimum(f: Fields) -> Tensor:
    assert f.dmin is not None, "of a type with minima"
    return _negative(f.dmin)


def _negative(half: Tensor) -> Tensor:
    """Return 16-bit floating-point numbers, (blocks, 2) bytes, with the other sign."""
    return half ^ torch.tensor([0, 128], dtype=torch.uint8, device=half.device)


def _nibbles(codes: Tensor) -> Tensor:
    return codes[:, :16] | codes[:, 16:] << 4


def _of_nibbles(packed: Tensor) -> Tensor:
    return torch.cat([packed & 15, packed >> 4], 1)


def _fifth_bits(codes: Tensor) -> Tensor:
    """Return (blocks, 4) bytes: bit j is the fifth of code j."""
    bits = (codes >> 4).view(-1, 4, 8) << torch.arange(8, dtype=torch.uint8, device=codes.device)
    return bits.sum(2, dtype=torch.uint8)


def _of_fifth_bits(packed: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (((packed[:, :, None] >> shifts) & 1) << 4).reshape(-1, 32)


class Layout(NamedTuple):
    """Bytes of blocks from their fields, and back."""

    pack: Callable[[Fields], Tensor]
    unpack: Callable[[Tensor], Fields]


LAYOUTS: Mapping[str, Layout] = {
    "q4_0": Layout(_pack_q4_0, _unpack_q4_0),
    "q4_1": Layout(_pack_q4_1, _unpack_q4_1),
    "q5_0": Layout(_pack_q5_0, _unpack_q5_0),
    "q5_1": Layout(_pack_q5_1, _unpack_q5_1),
    "q8_0": Layout(_pack_q8_0, _unpack_q8_0),
    "q2_k": Layout(kquants.pack_q2_k, kquants.unpack_q2_k),
    "q3_k": Layout(kquants.pack_q3_k, kquants.unpack_q3_k),
    "q4_k": Layout(kquants.pack_q4_k, kquants.unpack_q4_k),
    "q5_k": Layout(kquants.pack_q5_k, kquants.unpack_q5_k),
    "q6_k": Layout(kquants.pack_q6_k, kquants.unpack_q6_k),
}

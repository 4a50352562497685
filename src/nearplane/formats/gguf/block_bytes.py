"""The block types of GGUF and their bytes: codes and steps of a matrix into blocks and back, bit for bit.

A block holds 32 or 256 neighbours of a row. Types of 32 have a 16-bit step and maybe a 16-bit minimum; those of 256
("k-quants", see `kquants.py`) have 16-bit numbers for the block and short integers for the groups in it. Nothing is rounded
here: what a type cannot hold exactly is an error.

Layouts: `ggml/src/ggml-common.h` and `ggml-quants.c` of llama.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearplane.errors import FormatError
from nearplane.formats.gguf.kquants import KQUANTS, Fields, joined, split
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
    d = _halves(f"{kind.name}: d", grid.d.reshape(-1))
    fields = Fields(
        codes=(codes - kind.low).reshape(-1, kind.columns).to(torch.uint8),
        d=d,
        dmin=d[:, :0] if grid.dmin is None else _halves(f"{kind.name}: dmin", grid.dmin.reshape(-1)),
        sc=grid.sc.reshape(len(d), -1).to(torch.int16),
        m=d[:, :0] if grid.m is None else grid.m.reshape(len(d), -1).to(torch.int16),
    )
    return (KQUANTS[kind.name].pack(fields) if kind.name in KQUANTS else _pack(kind, fields)).reshape(out, -1)


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
    blocks = raw.reshape(-1, kind.bytes)
    fields = KQUANTS[kind.name].unpack(blocks) if kind.name in KQUANTS else _unpack(kind, blocks)
    grid = SuperGrid(
        d=_halves_of(fields.d).view(out, -1),
        sc=fields.sc.to(torch.int32).view(out, -1),
        dmin=_halves_of(fields.dmin).view(out, -1) if kind.m else None,
        m=fields.m.to(torch.int32).view(out, -1) if kind.m else None,
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


def _pack(kind: BlockType, f: Fields) -> Tensor:
    """Return the bytes of blocks of 32: d, the minimum, four bytes of fifth bits, codes; of 8 bits as signed bytes."""
    if kind.bits == 8:
        return torch.cat([f.d, f.codes ^ 128], 1)
    fifth = joined((f.codes >> 4).view(-1, 4, 8).mT, 1) if kind.bits == 5 else f.codes[:, :0]
    return torch.cat([f.d, _negative(f.dmin), fifth, joined((f.codes & 15).view(-1, 2, 16), 4)], 1)


def _unpack(kind: BlockType, raw: Tensor) -> Fields:
    """Return what the bytes of blocks of 32 hold, which are one group each."""
    fifth = 4 if kind.bits == 5 else 0
    d, dmin, high, low = raw.split([2, 2 * kind.m, fifth, kind.bytes - 2 - 2 * kind.m - fifth], 1)
    codes = low ^ 128 if kind.bits == 8 else split(low, 4).reshape(-1, 32)
    if fifth:
        codes = codes | split(high, 1).mT.reshape(-1, 32) << 4
    one = torch.ones(len(d), 1, dtype=torch.int16, device=d.device)
    return Fields(codes=codes, d=d, dmin=_negative(dmin), sc=one, m=one)


def _negative(half: Tensor) -> Tensor:
    """Return 16-bit floating-point numbers with the other sign: files have a minimum, an offset is what is subtracted.

    Args:
        half: (blocks, 2) bytes, or none.
    """
    return half ^ torch.tensor([0, 128], dtype=torch.uint8, device=half.device)[: half.shape[1]]


def _halves(called: str, numbers: Tensor) -> Tensor:
    """Return numbers (n,) as (n, 2) bytes of 16-bit floating point, the lower first.

    Raises:
        FormatError: one is not exact in it.
    """
    short = numbers.to(torch.float16)
    if not bool((torch.isfinite(short) & (short == numbers)).all()):
        raise FormatError(f"{called} is not exact in float16, which the file stores. Round it before the solve.")
    return short.contiguous().view(torch.uint8).view(-1, 2)


def _halves_of(raw: Tensor) -> Tensor:
    """Return (n,) float32 what (n, 2) bytes of 16-bit floating point stand for."""
    return raw.contiguous().view(torch.float16).view(-1).float()

"""Blocks of GGUF, bit for bit beside the dequantizer of the `gguf` package."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from nearplane.errors import FormatError
from nearplane.formats.gguf.gguf_layers import packed_blocks, unpack
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.number_formats import MXFP4, TYPES, BlockType

KINDS = pytest.mark.parametrize("kind", TYPES.values(), ids=TYPES)
NUMBERS = {  # where a block's halves begin
    "q4_0": (0,), "q4_1": (0, 2), "iq4_nl": (0,), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,),
    "iq4_xs": (0,), "mxfp4": (), "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
}  # fmt: skip


def blocks(
    kind: BlockType, rows: int, count: int, fill: int | None = None, numbers: list[float] | None = None
) -> Tensor:
    """Rows of blocks of random bytes, or of one byte, with random finite numbers or the given ones in turn."""
    source = torch.Generator().manual_seed(kind.number)
    raw = torch.randint(0, 256, (rows * count, kind.bytes), dtype=torch.uint8, generator=source)
    if fill is not None:
        raw[:] = fill
    for place, start in enumerate(NUMBERS[kind.name]):
        drawn = torch.randn(len(raw), generator=source)
        if numbers is not None:
            drawn = torch.tensor(numbers).repeat(len(raw))[place : place + len(raw)]
        raw[:, start : start + 2] = drawn.half().view(torch.uint8).view(-1, 2)
    if kind == MXFP4:
        raw[:, 0] = torch.tensor([0, 1, 127, 252]).repeat(len(raw))[: len(raw)]  # exponents; 252 is the largest for 6.0
        raw[:, 1:] = torch.where(raw[:, 1:] & 15 == 8, raw[:, 1:] - 8, raw[:, 1:])  # zeros are positive
        raw[:, 1:] = torch.where(raw[:, 1:] >> 4 == 8, raw[:, 1:] - 128, raw[:, 1:])
    return raw.view(rows, -1)


def expected(kind: BlockType, raw: Tensor) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType(kind.number)))


@KINDS
def test_random_blocks_mean_what_gguf_reads_in_them_and_come_back_bit_for_bit(kind: BlockType) -> None:
    raw = blocks(kind, 5, 3)
    matrix = unpack(kind, raw, 3 * kind.columns)
    assert torch.equal(matrix.decode(), expected(kind, raw))
    assert torch.equal(packed_blocks(kind, matrix), raw)


@KINDS
@pytest.mark.parametrize("fill", [0, 255, 128, 127, 15, 240])
def test_extreme_blocks_too(kind: BlockType, fill: int) -> None:
    """All integers at their limits; steps that are subnormal, the largest, negative and 0."""
    raw = blocks(kind, 2, 4, fill, numbers=[6e-8, 65504.0, -1.5, 0.0, -65504.0])
    matrix = unpack(kind, raw, 4 * kind.columns)
    wanted = expected(kind, raw)
    assert bool(torch.isfinite(wanted).all())
    assert torch.equal(matrix.decode(), wanted)
    assert torch.equal(packed_blocks(kind, matrix), raw)


@KINDS
def test_sizes_are_those_of_the_package(kind: BlockType) -> None:
    number = gguf.GGMLQuantizationType[kind.name.upper()]
    assert kind.number == number
    assert (kind.columns, kind.bytes) == gguf.GGML_QUANT_SIZES[number]


@pytest.mark.parametrize(
    "kind", [TYPES[name] for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4")], ids=lambda k: k.name
)
def test_values_that_gguf_quantized_pack_to_its_own_bytes(kind: BlockType) -> None:
    values = np.random.default_rng(0).normal(size=(4, 96)).astype(np.float32)
    raw = torch.from_numpy(gguf.quants.quantize(values, gguf.GGMLQuantizationType(kind.number)))
    assert torch.equal(packed_blocks(kind, unpack(kind, raw, 96)), raw)


def test_what_a_type_with_levels_cannot_hold_is_refused() -> None:
    kind = TYPES["iq4_nl"]
    matrix = unpack(kind, blocks(kind, 2, 2), 64)
    grid = matrix.grid
    with pytest.raises(FormatError, match="iq4_nl: codes from 0 to 16"):
        packed_blocks(kind, replace(matrix, codes=matrix.codes.clone().fill_(0).index_fill_(1, torch.tensor(3), 16)))
    with pytest.raises(FormatError, match=r"a step \(d\) is not exact in float16"):
        packed_blocks(kind, replace(matrix, grid=replace(grid, scale=grid.scale + 1e-4 * torch.pi)))
    others = {"levels": grid.levels + 1, "zero": grid.zero + 1, "group": grid.group.flip(0), "scale": grid.scale[:, :1]}
    for name, other in others.items():
        with pytest.raises(FormatError, match="expected one for each 32 neighbours, the type's levels, and no zeros"):
            packed_blocks(kind, replace(matrix, grid=replace(grid, **{name: other})))


def test_steps_of_mxfp4_are_powers_of_two_and_a_negative_zero_is_read_as_zero() -> None:
    raw = torch.full((1, MXFP4.bytes), 8 << 4 | 8, dtype=torch.uint8)
    raw[0, 0] = 127
    matrix = unpack(MXFP4, raw, 32)
    assert torch.equal(matrix.decode(), expected(MXFP4, raw))
    assert packed_blocks(MXFP4, matrix).tolist() == [[127, *[0] * 16]]
    with pytest.raises(FormatError, match="mxfp4: a step is not a power of two"):
        packed_blocks(MXFP4, replace(matrix, grid=replace(matrix.grid, scale=matrix.grid.scale * 1.5)))


@pytest.mark.parametrize("kind", [kind for kind in TYPES.values() if kind.levels is None], ids=lambda kind: kind.name)
def test_what_a_type_cannot_hold_is_refused(kind: BlockType) -> None:
    matrix = unpack(kind, blocks(kind, 2, 1), kind.columns)
    grid = matrix.grid
    far = replace(matrix, codes=matrix.codes.clone().fill_(kind.high + 1))
    with pytest.raises(FormatError, match=f"{kind.name}: codes from {kind.high + 1}"):
        packed_blocks(kind, far)
    with pytest.raises(FormatError, match=r"a step \(d\) is not exact in float16"):
        packed_blocks(kind, replace(matrix, grid=replace(grid, d=grid.d + 1e-4 * torch.pi)))
    with pytest.raises(FormatError, match=f"sc from .* expected {kind.sc[0]} to {kind.sc[1]}"):
        packed_blocks(kind, replace(matrix, grid=replace(grid, sc=grid.sc + kind.sc[1] + 1 - int(grid.sc.max()))))
    with pytest.raises(FormatError, match=r"groups of .* neighbours"):
        packed_blocks(kind, replace(matrix, grid=replace(grid, group=grid.group.flip(0) + 1)))
    plain = Grid(scale=grid.scale, zero=grid.zero, group=grid.group, low=kind.low, high=kind.high)
    with pytest.raises(FormatError, match="on a Grid, expected a SuperGrid"):
        packed_blocks(kind, QuantizedMatrix(codes=matrix.codes, grid=plain))
    with pytest.raises(FormatError, match="not a multiple"):
        packed_blocks(kind, QuantizedMatrix(codes=matrix.codes[:, 1:], grid=grid))


@KINDS
def test_bytes_that_are_no_whole_blocks_are_refused(kind: BlockType) -> None:
    raw = blocks(kind, 2, 1)
    for broken in (raw[:, 1:], raw.float(), raw[0]):
        with pytest.raises(FormatError, match=f"expected uint8 with {kind.bytes} bytes per row"):
            unpack(kind, broken, kind.columns)
    with pytest.raises(FormatError, match=f"expected uint8 with {kind.bytes} bytes per row"):
        unpack(kind, raw, kind.columns + 1)

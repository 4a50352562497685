"""Packed integers of compressed-tensors: bytes, and what they do not hold."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import config_of_grids, random_matrix
from nearplane.errors import FormatError
from nearplane.formats.compressed_tensors.compressed_tensors_format import FORMAT
from nearplane.formats.integers import Integers
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.number_formats import integers

layout = FORMAT.layers


def config(bits: int = 4, group_size: int | None = 32, symmetric: bool = True, **changes: Any) -> dict[str, Any]:
    grid = {"bits": bits, "group_size": group_size, "symmetric": symmetric}
    made = config_of_grids("compressed-tensors", ["a"], ignore=["lm_head"], order="pivoted", damp="auto", **grid)
    return json.loads(json.dumps(made | changes))  # as a reader gets it


def unpacked(name: str, tensors: dict[str, torch.Tensor], made: dict[str, Any]) -> QuantizedMatrix:
    return layout.unpack(name, tensors, FORMAT.layers.grid_of(made, name))


@given(st.data())
@settings(deadline=None)
def test_what_is_packed_reads_back_exactly(data: st.DataObject) -> None:
    bits = data.draw(st.integers(2, 8))
    group_size, columns = data.draw(
        st.sampled_from([(32, 96), (128, 256), (8, 24), (None, 172), (None, 33), (None, 1)])
    )
    dtype = data.draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    out = data.draw(st.integers(1, 9))
    matrix = random_matrix(out, columns, bits=bits, group_size=group_size, symmetric=True, dtype=dtype)
    tensors = layout.pack("a", matrix, dtype)
    back = unpacked("a", tensors, config(bits, group_size))
    assert tensors["a.weight_scale"].dtype == dtype
    assert torch.equal(back.codes, matrix.codes)
    assert torch.equal(back.grid.scale, matrix.grid.scale)
    assert torch.equal(back.grid.zero, matrix.grid.zero)
    assert torch.equal(back.grid.group, matrix.grid.group)
    assert torch.equal(back.decode(), matrix.decode())
    assert (back.grid.low, back.grid.high) == (matrix.grid.low, matrix.grid.high)


@pytest.mark.parametrize("bits", range(2, 9))
def test_bytes_are_those_of_compressed_tensors_itself(bits: int) -> None:
    matrix = random_matrix(3, 96, bits=bits, group_size=32, symmetric=True)
    tensors = layout.pack("a", matrix, torch.float16)
    assert torch.equal(tensors["a.weight_packed"], pack_to_int32(matrix.codes.to(torch.int8), bits))
    assert torch.equal(tensors["a.weight_shape"], torch.tensor([3, 96]))


def test_one_row_of_steps_is_stored_for_every_output() -> None:
    """A grid may share its steps among rows; the format cannot."""
    matrix = random_matrix(5, 64, bits=4, group_size=32, symmetric=True)
    shared = replace(matrix, grid=replace(matrix.grid, scale=matrix.grid.scale[:1], zero=matrix.grid.zero[:1]))
    tensors = layout.pack("a", shared, torch.float16)
    assert tensors["a.weight_scale"].shape == (5, 2)
    assert torch.equal(unpacked("a", tensors, config()).decode(), shared.decode())


def test_integers_outside_their_range_are_never_packed() -> None:
    matrix = random_matrix(4, 64, bits=4, group_size=32, symmetric=True)
    for codes in (matrix.codes + 1, matrix.codes - 1):
        with pytest.raises(FormatError, match=r"a: codes range from .* expected -8 to 7"):
            layout.pack("a", replace(matrix, codes=codes), torch.float16)
    for low, high in ((-8, 8), (None, None), (0, 14), (-256, 255)):
        with pytest.raises(FormatError, match=f"from {low} to {high}"):
            layout.pack("a", replace(matrix, grid=replace(matrix.grid, low=low, high=high)), torch.float16)
    shifted = replace(matrix, grid=replace(matrix.grid, zero=matrix.grid.zero + 1))
    with pytest.raises(FormatError, match="symmetric grid with zero points up to"):
        layout.pack("a", shifted, torch.float16)


@pytest.mark.parametrize("bits", range(2, 9))
def test_zero_points_are_packed_along_the_outputs(bits: int) -> None:
    """In a dense stream, from which the same matrix is read."""
    matrix = random_matrix(32, 64, bits=bits, group_size=32, symmetric=False)
    tensors = layout.pack("a", matrix, torch.float16)
    assert tensors["a.weight_zero_point"].shape == (bits, 2)
    format = integers(bits, 32, symmetric=False)
    empty = layout.empty("a", (32, 64), format, torch.float16)
    assert {name: each.shape for name, each in empty.items()} == {name: each.shape for name, each in tensors.items()}
    again = layout.unpack("a", tensors, format)
    assert torch.equal(again.codes, matrix.codes)
    assert torch.equal(again.decode(), matrix.decode())


@pytest.mark.parametrize("scale", [1 + 2**-12, 1e6, float("nan"), float("inf"), 2**-26])
def test_scales_are_never_rounded(scale: float) -> None:
    """The solver rounded them before the solve: a scale that is not exact here would decode to other weights."""
    matrix = random_matrix(4, 64, bits=4, group_size=32, symmetric=True)
    matrix.grid.scale[2, 1] = scale
    with pytest.raises(FormatError, match=r"a: a scale is not exact in torch\.float16"):
        layout.pack("a", matrix, torch.float16)


def padded(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return words that hold 32 // bits whole codes, the first in the lowest bits, as compressed-tensors 0.17 packs them."""
    each = 32 // bits
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % each)).view(len(codes), -1, each)
    words = (codes << bits * torch.arange(each)).sum(2)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_words_padded_as_in_older_versions_are_read_by_their_number(bits: int, symmetric: bool) -> None:
    """Densely read they would be other weights. Zero points are padded along the outputs."""
    matrix = random_matrix(64, 96, bits=bits, group_size=32, symmetric=symmetric)
    tensors = layout.pack("a", matrix, torch.float16)
    stored = Integers.of("a", matrix, torch.float16)
    tensors["a.weight_packed"] = padded(stored.codes, bits)
    if not symmetric:
        tensors["a.weight_zero_point"] = padded(stored.zeros.T, bits).T.contiguous()
    again = unpacked("a", tensors, config(bits, symmetric=symmetric))
    assert torch.equal(again.decode(), matrix.decode())


def test_words_of_another_number_are_refused() -> None:
    tensors = layout.pack("a", random_matrix(2, 64, bits=3, group_size=32, symmetric=True), torch.float16)
    tensors["a.weight_packed"] = torch.zeros(2, 8, dtype=torch.int32)
    with pytest.raises(FormatError, match=r"a\.weight_packed is"):
        unpacked("a", tensors, config(3))

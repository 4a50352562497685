"""Blocks of NVFP4: bytes by hand, and values as the gguf package reads them, times the global scale's reciprocal."""

from __future__ import annotations

from dataclasses import replace

import gguf
import pytest
import torch
from torch import Tensor

from nearplane.errors import FormatError, RecipeError
from nearplane.formats.compressed_tensors.fp4_packed import NVFP4Packed
from nearplane.formats.gguf.gguf_layers import Blocks
from nearplane.formats.gguf.nvfp4_blocks import KIND, check_scaled, pack, unpack
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.shared_grid import SharedGrid
from nearplane.number_formats import E2M1, NVFP4

LLAMA, QWEN2 = {"model_type": "llama"}, {"model_type": "qwen2"}


def matrix(codes: Tensor, block: Tensor, divisor: float) -> QuantizedMatrix[SharedGrid]:
    """Return a matrix with these codes 0 to 14, steps (out, groups) and global scale."""
    group, levels = torch.arange(codes.shape[1]) // 16, torch.tensor(E2M1, dtype=torch.float64)
    grid = SharedGrid(block=block, divisor=divisor, group=group, low=0, high=14, levels=levels)
    return QuantizedMatrix(codes=codes, grid=grid)


def random_matrix(out: int = 6, columns: int = 192, divisor: float = 3142.137) -> QuantizedMatrix[SharedGrid]:
    source = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 15, (out, columns), generator=source, dtype=torch.int32)
    steps = torch.randint(1, 127, (out, columns // 16), generator=source, dtype=torch.uint8)
    divisor = float(torch.tensor(divisor))
    return matrix(codes, steps.view(torch.float8_e4m3fn).float(), divisor)


def test_the_bytes_of_a_block_by_hand() -> None:
    """Four steps, then 8 bytes of each group: code i in the lower and code i + 8 in the upper half."""
    codes = torch.full((1, 64), 7, dtype=torch.int32)  # zeros
    codes[0, 0], codes[0, 8] = 14, 0  # 6 and -6: 0111 and 1111
    codes[0, 17], codes[0, 63] = 8, 6  # 0.5 and -0.5: 0001 and 1001
    block = torch.tensor([[1.0, 448.0, 2.0**-9, 1.5]])  # 0 0111 000, 0 1111 110, 0 0000 001, 0 0111 100
    tensors = pack("a", matrix(codes, block, 4.0))
    wanted = [0x38, 0x7E, 0x01, 0x3C, *[0] * 32]
    wanted[4], wanted[4 + 8 + 1], wanted[4 + 24 + 7] = 0xF7, 0x01, 0x90
    assert tensors["a.weight_nvfp4"].tolist() == [wanted]
    assert tensors["a.weight_global_scale"].tolist() == [4.0]


def test_values_are_those_of_the_gguf_package_times_the_reciprocal() -> None:
    """With a power of two as global scale both are exact; else they differ by the rounding of the reciprocal."""
    for divisor in (512.0, 3142.137):
        made = random_matrix(divisor=divisor)
        raw = pack("a", made)["a.weight_nvfp4"]
        read = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType.NVFP4))
        theirs = read * torch.tensor(made.grid.divisor).reciprocal()
        if divisor == 512.0:
            assert torch.equal(theirs, made.decode().float())
        torch.testing.assert_close(theirs, made.decode().float(), rtol=2.0**-22, atol=0)


def test_type_and_sizes_are_those_of_the_package() -> None:
    assert KIND.number == gguf.GGMLQuantizationType.NVFP4
    assert (KIND.columns, KIND.bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.NVFP4]
    assert (KIND.bits, KIND.group, KIND.levels, KIND.inputs) == (NVFP4.bits, NVFP4.group, NVFP4.levels, NVFP4.inputs)


def test_a_layer_comes_back_bit_for_bit_also_by_way_of_compressed_tensors() -> None:
    made, blocks, words = random_matrix(), Blocks(), NVFP4Packed()
    tensors = blocks.pack("a", made, torch.float16)
    assert blocks.shape_of("a", tensors) == made.codes.shape
    assert blocks.unpack("a", tensors, NVFP4).same_as(made)
    there = words.unpack("a", words.pack("a", made, torch.float16), NVFP4)
    again = blocks.pack("a", blocks.held(there, NVFP4).matrix, torch.float16)
    assert all(torch.equal(again[name], each) for name, each in tensors.items())


def test_parts_are_blocks_and_global_scale_in_any_order() -> None:
    names = ["a.weight_global_scale", "a.weight_nvfp4", "b.weight_q4_0", "c.weight_global_scale", "norm.weight"]
    assert Blocks().parts(names) == {
        "a": ["a.weight_nvfp4", "a.weight_global_scale"],
        "b": ["b.weight_q4_0"],
    }


def test_blocks_without_a_global_scale_have_1() -> None:
    made = random_matrix(divisor=1.0)
    raw = pack("a", made)["a.weight_nvfp4"]
    assert unpack("a", {"a.weight_nvfp4": raw}, (6, 192)).same_as(made)


@pytest.mark.parametrize("step", [0x7F, 0x80, 0xFF])
def test_steps_that_are_no_positive_numbers_are_refused(step: int) -> None:
    raw = torch.zeros(1, 36, dtype=torch.uint8)
    raw[0, 1] = step
    with pytest.raises(FormatError, match=f"a: a step is {step}, expected 0 to 126"):
        unpack("a", {"a.weight_nvfp4": raw}, (1, 64))


def test_what_the_type_does_not_hold_is_refused() -> None:
    made = random_matrix()
    with pytest.raises(RecipeError, match=r"a has 80 inputs, not a multiple of 64, .* Leave the layer unquantized"):
        Blocks().check("a", (6, 80), "Linear", NVFP4)
    other = replace(made, grid=replace(made.grid, group=made.grid.group.flip(0)))
    with pytest.raises(FormatError, match="in groups of 16 neighbours"):
        pack("a", other)
    with pytest.raises(FormatError, match="not a positive 8-bit float"):
        pack("a", replace(made, grid=replace(made.grid, block=made.grid.block * 1.01)))


def test_layers_whose_global_scale_llama_cpp_does_not_multiply_with_are_refused() -> None:
    check_scaled("a", "blk.0.ffn_up.weight", False, LLAMA)
    check_scaled("a", "blk.0.attn_q.weight", True, QWEN2)
    for stored, biased, config, words in (
        ("blk.0.ffn_up.weight", True, LLAMA, "does not run MLPs with both a global scale and a bias"),
        (
            "blk.0.ffn_up.weight",
            False,
            QWEN2,
            "computes the MLPs of the architecture qwen2 without their global scales",
        ),
        ("token_embd.weight", False, LLAMA, "looks up rows of embeddings without their global scale"),
    ):
        with pytest.raises(RecipeError, match=f"a: llama.cpp {words}.* Use --grid mxfp4"):
            check_scaled("a", stored, biased, config)

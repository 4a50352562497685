"""The bit stream of packed codes: golden words, and the packer of compressed-tensors as an independent opinion."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given
from hypothesis import strategies as st

from nearplane.coding.packed_words import pack, unpack

ALL_BITS = range(2, 9)


def as_hex(words: torch.Tensor) -> list[str]:
    return [f"{word & 0xFFFFFFFF:08X}" for word in words.flatten().tolist()]


GOLDEN = {
    2: ["E4E4E4E4", "E4E4E4E4"],
    3: ["88FAC688", "C688FAC6", "FAC688FA"],
    4: ["76543210", "FEDCBA98", "76543210", "FEDCBA98"],
    5: ["8A418820", "C5A92839", "CA307B9A", "38BDAB49", "FFBBCDEB"],
    6: ["440C2040", "A2481C61", "3CE34C2C", "544D2450", "A6585D65", "7DE75C6D"],
    7: ["40608080", "880E1828", "68C16284", "88901E38", "58A94264", "668C982E", "3E78E9C3"],
    8: ["03020100", "07060504", "0B0A0908", "0F0E0D0C", "13121110", "17161514", "1B1A1918", "1F1E1D1C"],
}


def reference(codes: list[int], bits: int) -> list[str]:
    """The definition, in Python integers."""
    stream = sum(code << (bits * i) for i, code in enumerate(codes))
    return [f"{(stream >> (32 * r)) & 0xFFFFFFFF:08X}" for r in range(-(-len(codes) * bits // 32))]


@pytest.mark.parametrize("bits", GOLDEN)
def test_words_never_change(bits: int) -> None:
    """Files are read by others: a change of one byte is a break."""
    codes = torch.arange(32) % 2**bits
    assert as_hex(pack(codes, bits)) == GOLDEN[bits] == reference(codes.tolist(), bits)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_whole_codes_fill_a_word_from_its_low_end(bits: int) -> None:
    codes = torch.tensor([1] + [0] * (32 // bits - 2) + [2**bits - 1])
    assert as_hex(pack(codes, bits)) == [f"{((2**bits - 1) << (32 - bits)) + 1:08X}"]


@given(st.data())
def test_unpack_is_the_inverse_and_compressed_tensors_agrees(data: st.DataObject) -> None:
    bits, rows, n = data.draw(st.integers(2, 8)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 100))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    codes = torch.randint(0, 2**bits, (rows, n), generator=generator)
    words = pack(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (rows, -(-n * bits // 32))
    assert torch.equal(unpack(words, bits, n), codes.to(torch.uint8))
    assert torch.equal(words, pack_to_int32((codes - 2 ** (bits - 1)).to(torch.int8), bits))


@pytest.mark.parametrize("bits", ALL_BITS)
def test_leading_axes_and_strides_do_not_matter(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (40, 3, 2), generator=torch.Generator().manual_seed(bits)).permute(2, 1, 0)
    words = pack(codes, bits)
    assert torch.equal(words[1, 2], pack(codes[1, 2], bits))
    assert torch.equal(unpack(words, bits, 40), codes.to(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_every_integer_dtype_packs_the_same(dtype: torch.dtype) -> None:
    codes = torch.arange(64) % 128
    assert torch.equal(pack(codes.to(dtype), 7), pack(codes, 7))


@pytest.mark.parametrize(("codes", "bits"), [([-1, 0], 4), ([0, 16], 4), ([256], 8), ([0], 1), ([0], 9)])
def test_what_does_not_fit_is_refused(codes: list[int], bits: int) -> None:
    """A code too large would spill over into its neighbours."""
    with pytest.raises(ValueError, match="codes"):
        pack(torch.tensor(codes), bits)


def test_unpack_refuses_words_of_another_length_or_dtype() -> None:
    words = pack(torch.zeros(2, 32, dtype=torch.int32), 3)
    with pytest.raises(ValueError, match=r"4 words of torch\.int32, found 3"):
        unpack(words, 3, 33)
    with pytest.raises(ValueError, match=r"torch\.int64"):
        unpack(words.to(torch.int64), 3, 32)

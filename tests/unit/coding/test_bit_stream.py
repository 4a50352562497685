"""Bit streams: what is written is read, bits as the format says, and a stream that ends early is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearplane.coding.bit_stream import BitReader, BitWriter, array_bits, best_rice, rice_cost, varint, zigzag
from nearplane.errors import FormatError

INTEGERS = st.lists(st.one_of(st.integers(-3, 3), st.integers(-(2**20), 2**20)), min_size=1, max_size=40)


def reader(writer: BitWriter) -> BitReader:
    return BitReader(np.frombuffer(writer.bytes(), np.uint8), 0, "layer 7")


def test_numbers_of_either_sign_alternate() -> None:
    assert zigzag(np.array([0, -1, 1, -2, 2])).tolist() == [0, 1, 2, 3, 4]


@given(st.lists(st.integers(-(2**30) + 1, 2**30 - 1), max_size=20))
def test_gamma_codes_are_read_back(values: list[int]) -> None:
    writer = BitWriter()
    for value in values:
        writer.signed(value)
        writer.put(5, 3)
    found = reader(writer)
    assert [(found.signed(), found.take(3)) for _ in values] == [(value, 5) for value in values]
    assert found.at == writer.count


@given(INTEGERS, st.booleans())
def test_arrays_are_read_back_in_as_many_bits_as_was_said(values: list[int], zero: bool) -> None:
    array, writer = np.array(values, np.int32) * (not zero), BitWriter()
    writer.optional(array)
    found = reader(writer)
    assert found.optional(len(array), "columns", 2**20).tolist() == array.tolist()
    assert found.at == writer.count
    centre = BitWriter()
    centre.signed(int(np.sort(array)[(len(array) - 1) // 2]))
    assert writer.count == (1 + array_bits(array) + centre.count if array.any() else 1)


@given(INTEGERS)
def test_the_parameter_is_near_the_best_of_all(values: list[int]) -> None:
    folded = zigzag(np.array(values))
    parameter, bits = best_rice(folded)
    assert bits == rice_cost(folded, parameter)
    writer = BitWriter()
    writer.rice(np.array(values), parameter)
    assert writer.count == bits


def test_bits_are_those_of_the_format() -> None:
    """Low bit first; a gamma code of 4: two ones for two bits below the highest of 5, a zero, then 01."""
    writer = BitWriter()
    writer.put(6, 3)
    writer.gamma(4)
    assert writer.bits().tolist() == [0, 1, 1, 1, 1, 0, 1, 0]
    assert writer.bytes() == bytes([0b01011110])
    assert [varint(value) for value in (0, 127, 128, 300)] == [b"\0", b"\x7f", b"\x80\x01", b"\xac\x02"]


def test_a_stream_that_ends_early_or_goes_beyond_its_limits_is_refused() -> None:
    writer = BitWriter()
    writer.array(np.array([1000, -1000, 3], np.int32))
    data = np.frombuffer(writer.bytes(), np.uint8)
    with pytest.raises(FormatError, match=r"layer 7: the 2 bytes end within the columns"):
        BitReader(data[:2], 0, "layer 7").array(3, "columns", 2000)
    with pytest.raises(FormatError, match=r"the columns range from -1000 to 1000, but the limit is 999"):
        BitReader(data, 0, "layer 7").array(3, "columns", 999)
    with pytest.raises(FormatError, match="more than 31 bits"):
        BitReader(np.full(8, 255, np.uint8), 0, "layer 7").gamma()

"""Bit streams, low bit first: plain, gamma-coded and Rice-coded integers, and varints.

The reader checks every length before it is used, and raises FormatError where the bytes end too early.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nearplane.coding.intrinsics import load64, trailing_zeros
from nearplane.compiled import compiled
from nearplane.errors import FormatError

MAX_RICE_ONES = 24  # ones of a Rice code; after that many, 32 plain bits follow
ALL_EQUAL = 15  # value of the Rice parameter that means: all entries equal the centre
DAMAGED = "The file is damaged or truncated. Fetch it again."


@compiled()
def zigzag(value: NDArray[np.int64]) -> NDArray[np.int64]:
    """Map 0, -1, 1, -2, ... to 0, 1, 2, 3, ..."""
    folded = np.empty(len(value), np.int64)
    for n in range(len(value)):  # numpy's where would take over a second to compile
        folded[n] = -2 * value[n] - 1 if value[n] < 0 else 2 * value[n]
    return folded


@compiled()
def rice_cost(folded: NDArray[np.int64], parameter: int) -> int:
    """Return the number of bits in the Rice codes of zig-zagged numbers."""
    total = 0
    for value in folded:
        quotient = value >> parameter
        total += quotient + 1 + parameter if quotient < MAX_RICE_ONES else MAX_RICE_ONES + 32
    return total


@compiled()
def best_rice(folded: NDArray[np.int64]) -> tuple[int, int]:
    """Return the parameter, 0 ... 14, with the fewest bits, and their number."""
    mean = folded.sum() // max(1, len(folded))
    start = 0
    while mean >> start and start < 14:
        start += 1
    best, fewest = -1, 0
    for parameter in range(max(0, start - 2), min(14, start + 1) + 1):
        bits = rice_cost(folded, parameter)
        if best < 0 or bits < fewest:
            best, fewest = parameter, bits
    return best, fewest


@compiled()
def write_rice(folded: NDArray[np.int64], parameter: int, bits: NDArray[np.uint8]) -> None:
    """Write Rice codes to `bits`, one bit per byte; all entries must be 0 before."""
    at = 0
    for value in folded:
        quotient = value >> parameter
        ones, zeros, width = (quotient, 1, parameter) if quotient < MAX_RICE_ONES else (MAX_RICE_ONES, 0, 32)
        bits[at : at + ones] = 1
        at += ones + zeros
        for i in range(width):
            bits[at] = (value >> i) & 1
            at += 1


@compiled()
def read_rice(stream: NDArray[np.uint8], at: int, parameter: int, values: NDArray[np.int64]) -> int:
    """Fill `values` from bit `at` on; return the position after them, or -1 if the stream ends earlier."""
    end = 8 * len(stream)
    base, one = np.uint64(stream.ctypes.data), np.uint64(1)
    low_mask = (one << np.uint64(parameter)) - one
    for n in range(len(values)):
        if at + 64 <= end:  # a code has at most 56 bits; a load gives at least 57
            word = load64(base + np.uint64(at >> 3)) >> np.uint64(at & 7)
        else:
            word = np.uint64(0)
            for i in range(at >> 3, len(stream)):
                word |= np.uint64(stream[i]) << np.uint64(8 * (i - (at >> 3)))
            word >>= np.uint64(at & 7)
        ones = trailing_zeros(~word)
        if ones < np.uint64(MAX_RICE_ONES):
            value = np.int64(ones << np.uint64(parameter) | (word >> (ones + one)) & low_mask)
            at += int(np.int64(ones)) + 1 + parameter
        else:
            value = np.int64((word >> np.uint64(MAX_RICE_ONES)) & np.uint64(0xFFFFFFFF))
            at += MAX_RICE_ONES + 32
        if at > end:
            return -1
        values[n] = -((value + 1) >> 1) if value & 1 else value >> 1
    return at


class BitWriter:
    """Collect numbers in a bit stream, low bit first."""

    def __init__(self) -> None:
        self._parts: list[NDArray[np.uint8]] = []
        self.count = 0  # bits so far

    def extend(self, bits: NDArray[np.uint8]) -> None:
        """Append bits, one per byte."""
        self._parts.append(bits)
        self.count += len(bits)

    def put(self, value: int, width: int) -> None:
        """Append a plain number of `width` bits."""
        self.extend(((value >> np.arange(width)) & 1).astype(np.uint8))

    def gamma(self, value: int) -> None:
        """Append value >= 0: one 1 for each bit of value + 1 below its highest, a 0, then these bits."""
        width = (value + 1).bit_length() - 1
        self.put((1 << width) - 1, width + 1)
        self.put(value + 1 - (1 << width), width)

    def signed(self, value: int) -> None:
        """Append an integer of either sign by its zig-zag."""
        self.gamma(-2 * value - 1 if value < 0 else 2 * value)

    def rice(self, values: NDArray[np.int64], parameter: int) -> None:
        """Append integers of either sign, each by the Rice code of its zig-zag."""
        folded = zigzag(values)
        bits = np.zeros(rice_cost(folded, parameter), np.uint8)
        write_rice(folded, parameter, bits)
        self.extend(bits)

    def array(self, values: NDArray[np.int32]) -> None:
        """Append at least one integer: parameter, centre, and the Rice codes of the differences from the centre."""
        low, high = int(values.min()), int(values.max())
        if low == high:
            self.put(ALL_EQUAL, 4)
            self.signed(low)
            return
        centre = centre_of(values)
        differences = values.astype(np.int64) - centre
        parameter, _ = best_rice(zigzag(differences))
        self.put(parameter, 4)
        self.signed(centre)
        self.rice(differences, parameter)

    def optional(self, values: NDArray[np.int32]) -> None:
        """Append a flag, and the array only if an integer is not zero."""
        self.put(bool(values.any()), 1)
        if values.any():
            self.array(values)

    def bits(self) -> NDArray[np.uint8]:
        """Return the bits so far, one per byte."""
        return np.concatenate(self._parts) if self._parts else np.zeros(0, np.uint8)

    def bytes(self) -> bytes:
        """Return the stream, padded with zero bits to whole bytes."""
        return np.packbits(self.bits(), bitorder="little").tobytes()


def centre_of(values: NDArray[np.int32]) -> int:
    """Return the centre that `BitWriter.array` stores: the lower median."""
    return int(np.partition(values, (len(values) - 1) // 2)[(len(values) - 1) // 2])


def array_bits(values: NDArray[np.int32]) -> int:
    """Return the number of bits that `BitWriter.optional` writes, without the flag and the centre."""
    if values.min() == values.max():
        return 4 if values[0] else 0
    folded = zigzag(values.astype(np.int64) - centre_of(values))
    return 4 + best_rice(folded)[1]


class BitReader:
    """Reader of the bit stream of a BitWriter in `data`, from bit `at` on."""

    def __init__(self, data: NDArray[np.uint8], at: int, name: str) -> None:
        self.data, self.at, self.name = data, at, name

    def truncated(self, what: str) -> FormatError:
        """Return the error for a stream that ends within the part `what`."""
        return FormatError(f"{self.name}: the {len(self.data)} bytes end within the {what}. {DAMAGED}")

    def take(self, width: int, what: str = "header") -> int:
        """Return a plain number of `width` <= 32 bits."""
        if self.at + width > 8 * len(self.data):
            raise self.truncated(what)
        first = self.at >> 3
        word = int.from_bytes(self.data[first : first + 5].tobytes(), "little")
        value = (word >> (self.at & 7)) & ((1 << width) - 1)
        self.at += width
        return value

    def gamma(self, what: str = "header") -> int:
        """Return a gamma-coded number below 2^31."""
        width = 0
        while self.take(1, what):
            width += 1
            if width > 31:
                raise FormatError(f"{self.name}: a number in the {what} has more than 31 bits. {DAMAGED}")
        return (1 << width) + self.take(width, what) - 1

    def signed(self, what: str = "header") -> int:
        """Return an integer of either sign."""
        value = self.gamma(what)
        return -((value + 1) >> 1) if value & 1 else value >> 1

    def rice(self, count: int, parameter: int, what: str) -> NDArray[np.int64]:
        """Return `count` integers of either sign."""
        if count * (parameter + 1) > 8 * len(self.data) - self.at:
            raise self.truncated(what)
        values = np.empty(count, np.int64)
        at = read_rice(self.data, self.at, parameter, values)
        if at < 0:
            raise self.truncated(what)
        self.at = int(at)
        return values

    def array(self, count: int, what: str, limit: int) -> NDArray[np.int32]:
        """Return `count` integers of at most `limit` in magnitude."""
        parameter, centre = self.take(4, what), self.signed(what)
        if parameter == ALL_EQUAL:
            values = np.broadcast_to(np.int64(centre), (count,))
        else:
            values = self.rice(count, parameter, what) + centre
        low, high = int(values.min()), int(values.max())
        if max(-low, high) > limit:
            raise FormatError(
                f"{self.name}: the {what} range from {low} to {high}, but the limit is {limit}. {DAMAGED}"
            )
        return values.astype(np.int32)

    def optional(self, count: int, what: str, limit: int) -> NDArray[np.int32]:
        """Return `count` integers; all are zero if the flag before them is 0."""
        return self.array(count, what, limit) if self.take(1, what) else np.zeros(count, np.int32)


def varint(value: int) -> bytes:
    """Return value >= 0 in groups of seven bits, low group first; the high bit is set on all bytes but the last."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: NDArray[np.uint8], at: int) -> tuple[int, int]:
    """Return the number that `varint` wrote at byte `at`, and the byte after it: -1 if it does not end within five."""
    value = 0
    for shift, byte in zip(range(0, 35, 7), data[at : at + 5].tolist(), strict=False):
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    return 0, -1

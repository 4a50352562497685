"""tANS entropy coder: coding of symbols with tables of 4,096 states, in eight lanes.

Tabled asymmetric numeral systems (Duda, 2013). All tables have 4096 states, so the state carries over from table to
table. An entry of a decoding table is `bits to read | symbol << 8 | next state before those bits << 16`.

A lane is read forwards, low bit first, and therefore written from its last symbol to its first. The state before the
first symbol is stored. After the last one it must be 0, with all bits of the lane used; the decoder checks both.
For any bytes, kernels stay inside their buffers: states stay below 4096 by the construction of the tables, and before
unaligned loads a check bounds how many bits the next reads can consume.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearplane.coding.intrinsics import load8, load16, load32, load64, prevent_inlining, store8, store64
from nearplane.compiled import compiled

LANES = 8
PADDING_BYTES = 64  # bytes after the end of a stream that must be readable
STATE_STRIDE = 2563  # distance between the states of a symbol; odd, so that all 4096 are visited
_u64 = np.uint64


class EncoderTables(NamedTuple):
    """Lookup tables of the encoder by symbol and state; 4096 is added to states."""

    widths: NDArray[np.uint64]  # (tables, 256) added to a state: bits 16 and up of the sum count the bits to write
    offsets: NDArray[np.uint64]  # (tables, 256) start of a symbol's states in `states`, minus its frequency
    states: NDArray[np.uint16]  # (tables, 4096) next states


class Segments(NamedTuple):
    """Runs of symbols of a chunk that share a table."""

    counts: NDArray[np.int64]  # (segments,) number of symbols
    tables: NDArray[np.int64]  # (segments,) index of the table


class Lanes(NamedTuple):
    """Lengths and first words of the lanes of a chunk."""

    lengths: NDArray[np.int64]  # (8,) in bytes
    words: NDArray[np.int64]  # (8,) first state | unused low bits of the first byte << 12


class _Addresses(NamedTuple):
    """Addresses of the encoder tables of a segment."""

    widths: np.uint64
    offsets: np.uint64
    states: np.uint64


class _Writer(NamedTuple):
    """State of a lane during encoding, which proceeds from its end."""

    at: np.uint64  # address after the bytes that are still to be written
    bits: np.uint64  # the low `held` bits are not yet written
    held: np.uint64
    state: np.uint64


@compiled()
def build(frequencies: NDArray[np.uint16]) -> tuple[NDArray[np.uint32], EncoderTables]:
    """Build the tables of the coder from (tables, 256) frequencies, of which each row sums to 4096.

    Returns:
        (tables, 4096) entries for decoding, and the tables of the encoder.
    """
    tables = len(frequencies)
    entries = np.empty((tables, 4096), np.uint32)
    widths = np.zeros((tables, 256), np.uint64)  # negative numbers wrap around
    offsets = np.zeros((tables, 256), np.uint64)
    states = np.empty((tables, 4096), np.uint16)
    symbol_of = np.empty(4096, np.uint8)
    next_state = np.empty(256, np.int64)
    fill = np.empty(256, np.int64)
    for t in range(tables):
        frequency = frequencies[t].astype(np.int64)
        at = 0
        for symbol in range(256):
            for _ in range(frequency[symbol]):
                symbol_of[at] = symbol
                at = (at + STATE_STRIDE) & 4095
        start = 0
        for symbol in range(256):
            f = frequency[symbol]
            next_state[symbol] = f
            fill[symbol] = start
            if f > 0:
                width = 0
                while (f << width) < 4096:  # number of bits that the largest states write
                    width += 1
                widths[t, symbol] = np.uint64((width << 16) - (f << width))
                offsets[t, symbol] = np.uint64(start - f)
            start += f
        for state in range(4096):
            symbol = symbol_of[state]
            x = next_state[symbol]
            next_state[symbol] += 1
            width = 0
            while (x << width) < 4096:
                width += 1
            entries[t, state] = width | np.int64(symbol) << 8 | ((x << width) - 4096) << 16
            states[t, fill[symbol]] = state + 4096
            fill[symbol] += 1
    return entries, EncoderTables(widths, offsets, states)


@compiled()
def _encode_one(read: np.uint64, tables: _Addresses, bits: Any, held: Any, x: Any) -> Any:
    """Code the symbol at an address; return the bits of the lane, the number not yet written, and the state."""
    symbol = load8(read) << _u64(3)
    width = (x + load64(tables.widths + symbol)) >> _u64(16)
    bits = (bits << width) | (x & ((_u64(1) << width) - _u64(1)))
    return bits, held + width, load16(tables.states + (((x >> width) + load64(tables.offsets + symbol)) << _u64(1)))


@compiled()
def _encode_some(end: np.uint64, count: np.uint64, tables: _Addresses, lane: _Writer) -> _Writer:
    """Code the `count` symbols before address `end` in one lane, from the last to the first; see `encode`."""
    at, bits, held, x = lane
    for _ in range(count):
        end -= _u64(1)
        bits, held, x = _encode_one(end, tables, bits, held, x)
        store64(at - _u64(8), bits << ((_u64(64) - held) & _u64(63)))
        at -= held >> _u64(3)
        held &= _u64(7)
    return _Writer(at, bits, held, x)


@compiled()
def encode(
    symbols: NDArray[np.uint8], segments: Segments, tables: EncoderTables, out: NDArray[np.uint8], ends: Lanes
) -> int:
    """Code the segments of a chunk into `out`, lane after lane.

    Lane k holds the k-th eighth of every segment, count // 8 symbols; the last lane also holds the remainder. Four
    lanes are coded together, four symbols of each at a time.

    Args:
        out: Output buffer; 2 bytes per symbol and 16 per lane are enough.
        ends: Lengths and words of the lanes, filled in.

    Returns:
        The number of bytes written.
    """
    prevent_inlining()
    counts = segments.counts
    capacity = 16
    for count in counts:
        capacity += 2 * (count // LANES)
    last = 2 * len(symbols) + 16 * LANES  # end of the last lane, which is longer
    base = _u64(out.ctypes.data)
    bits, held, state = np.zeros(LANES, np.uint64), np.zeros(LANES, np.uint64), np.full(LANES, 4096, np.uint64)
    at = np.empty(LANES, np.uint64)  # every lane is filled from its end
    for lane in range(LANES):
        at[lane] = base + _u64(last if lane == LANES - 1 else (lane + 1) * capacity)
    base_in, base_state = _u64(symbols.ctypes.data), _u64(tables.states.ctypes.data)
    base_width, base_offset = _u64(tables.widths.ctypes.data), _u64(tables.offsets.ctypes.data)
    one, s3, seven, eight, m63, c64 = _u64(1), _u64(3), _u64(7), _u64(8), _u64(63), _u64(64)
    first = len(symbols)
    for segment in range(len(counts) - 1, -1, -1):
        count, table = counts[segment], segments.tables[segment]
        entry, row = _u64(table << 11), _u64(table << 13)
        lookup = _Addresses(base_width + entry, base_offset + entry, base_state + row)
        first -= count
        share = count // LANES
        fours = share >> 2
        for lane in range(LANES):  # symbols left over from rounds of four, at the lane's end
            end = first + (count if lane == LANES - 1 else (lane + 1) * share)
            remaining = end - first - lane * share - 4 * fours
            writer = _Writer(at[lane], bits[lane], held[lane], state[lane])
            at[lane], bits[lane], held[lane], state[lane] = _encode_some(base_in + _u64(end), remaining, lookup, writer)
        for h in range(0, LANES if fours else 0, 4):
            a0, a1, a2, a3 = at[h], at[h + 1], at[h + 2], at[h + 3]
            b0, b1, b2, b3 = bits[h], bits[h + 1], bits[h + 2], bits[h + 3]
            h0, h1, h2, h3 = held[h], held[h + 1], held[h + 2], held[h + 3]
            x0, x1, x2, x3 = state[h], state[h + 1], state[h + 2], state[h + 3]
            read, stride = base_in + _u64(first + h * share + 4 * fours), _u64(share)
            for _ in range(fours):
                for _ in range(4):
                    read -= one
                    b0, h0, x0 = _encode_one(read, lookup, b0, h0, x0)
                    b1, h1, x1 = _encode_one(read + stride, lookup, b1, h1, x1)
                    b2, h2, x2 = _encode_one(read + stride + stride, lookup, b2, h2, x2)
                    b3, h3, x3 = _encode_one(read + stride + stride + stride, lookup, b3, h3, x3)
                store64(a0 - eight, b0 << ((c64 - h0) & m63))  # at most 7 + 4 * 12 bits
                store64(a1 - eight, b1 << ((c64 - h1) & m63))
                store64(a2 - eight, b2 << ((c64 - h2) & m63))
                store64(a3 - eight, b3 << ((c64 - h3) & m63))
                a0, a1, a2, a3 = a0 - (h0 >> s3), a1 - (h1 >> s3), a2 - (h2 >> s3), a3 - (h3 >> s3)
                h0, h1, h2, h3 = h0 & seven, h1 & seven, h2 & seven, h3 & seven
            at[h], at[h + 1], at[h + 2], at[h + 3] = a0, a1, a2, a3
            bits[h], bits[h + 1], bits[h + 2], bits[h + 3] = b0, b1, b2, b3
            held[h], held[h + 1], held[h + 2], held[h + 3] = h0, h1, h2, h3
            state[h], state[h + 1], state[h + 2], state[h + 3] = x0, x1, x2, x3
    size = 0
    for lane in range(LANES):
        unused = (_u64(8) - held[lane]) & seven
        begin = np.int64(at[lane] - base)
        if held[lane] > _u64(0):
            begin -= 1
            out[begin] = np.uint8(bits[lane] << unused)
        ends.lengths[lane] = (last if lane == LANES - 1 else (lane + 1) * capacity) - begin
        ends.words[lane] = np.int64((state[lane] & _u64(4095)) | unused << _u64(12))
        for i in range(ends.lengths[lane]):
            out[size + i] = out[begin + i]
        size += ends.lengths[lane]
    return size


@compiled()
def _decode_one(write: np.uint64, table: np.uint64, bits: Any, at: Any, x: Any) -> Any:
    """Decode a symbol to an address; return the bits after it, their position, and the state."""
    entry = load32(table + (x << _u64(2)))
    width = entry & _u64(63)
    store8(write, entry >> _u64(8))
    return bits >> width, at + width, (entry >> _u64(16)) + (bits & ((_u64(1) << width) - _u64(1)))


@compiled()
def decode_lanes(
    padded: NDArray[np.uint8],
    start: int,
    lanes: Lanes,
    segments: Segments,
    entries: NDArray[np.uint32],
    out: NDArray[np.uint8],
) -> bool:
    """Decode the eight lanes of a chunk, four at a time.

    Args:
        padded: Bytes of the chunk, with at least PADDING_BYTES bytes after the last lane.
        start: First byte of the first lane.
        lanes: Lengths and words of the lanes, as written by `encode`.
        out: Output buffer of as many bytes as there are symbols.

    Returns:
        Whether every lane ended in state 0 with all its bits used.
    """
    prevent_inlining()
    lengths, words, counts = lanes.lengths, lanes.words, segments.counts
    base, base_out, base_table = _u64(padded.ctypes.data), _u64(out.ctypes.data), _u64(entries.ctypes.data)
    limit = 8 * (len(padded) - 8)  # last bit position allowed for an unaligned load
    at, state = np.empty(LANES, np.uint64), np.empty(LANES, np.uint64)  # in bits from the start of the bytes
    one, s3, seven = _u64(1), _u64(3), _u64(7)
    end = start
    for lane in range(LANES):
        at[lane], state[lane] = _u64(8 * end + (words[lane] >> 12)), _u64(words[lane] & 4095)
        end += lengths[lane]
    for h in range(0, LANES, 4):
        first = 0
        for segment in range(len(counts)):
            count = counts[segment]
            share = count >> 3
            table = base_table + _u64(segments.tables[segment] << 14)
            p0, p1, p2, p3 = at[h], at[h + 1], at[h + 2], at[h + 3]
            x0, x1, x2, x3 = state[h], state[h + 1], state[h + 2], state[h + 3]
            write, stride = base_out + _u64(first + h * share), _u64(share)
            rounds_left = share >> 2
            while rounds_left > 0:
                max_position = np.int64(max(max(p0, p1), max(p2, p3)))
                rounds = min(rounds_left, (limit - max_position) // 48)  # a round of four symbols reads at most 48 bits
                if rounds <= 0:
                    break
                rounds_left -= rounds
                for _ in range(rounds):
                    b0 = load64(base + (p0 >> s3)) >> (p0 & seven)
                    b1 = load64(base + (p1 >> s3)) >> (p1 & seven)
                    b2 = load64(base + (p2 >> s3)) >> (p2 & seven)
                    b3 = load64(base + (p3 >> s3)) >> (p3 & seven)
                    for _ in range(4):
                        b0, p0, x0 = _decode_one(write, table, b0, p0, x0)
                        b1, p1, x1 = _decode_one(write + stride, table, b1, p1, x1)
                        b2, p2, x2 = _decode_one(write + stride + stride, table, b2, p2, x2)
                        b3, p3, x3 = _decode_one(write + stride + stride + stride, table, b3, p3, x3)
                        write += one
            at[h], at[h + 1], at[h + 2], at[h + 3] = p0, p1, p2, p3
            state[h], state[h + 1], state[h + 2], state[h + 3] = x0, x1, x2, x3
            done = ((share >> 2) - rounds_left) << 2
            for lane in range(h, h + 4):  # symbols left over from the rounds of four
                p, x = at[lane], state[lane]
                for i in range(first + lane * share + done, first + (count if lane == 7 else (lane + 1) * share)):
                    if np.int64(p) > limit:
                        return False
                    _, p, x = _decode_one(base_out + _u64(i), table, load64(base + (p >> s3)) >> (p & seven), p, x)
                at[lane], state[lane] = p, x
            first += count
    end = start
    for lane in range(LANES):
        end += lengths[lane]
        if state[lane] != _u64(0) or (at[lane] + seven) >> s3 != _u64(end):
            return False
    return True

"""The tANS coder: symbols under a sequence of tables to bits and back, in one lane or eight interleaved ones.

All tables have 4096 states, so a state is carried from table to table. An entry of a decoding table is
`bits to read | symbol << 8 | next state before those bits << 16`. A canonical Huffman code is the same machine: a code of
length l is a frequency of 2^(12 - l) whose states stand together, and the state is then the next twelve bits of the stream.

A lane is read forwards, low bit first, and was therefore written from its last symbol to its first. The state before the
first symbol is stored; after the last one it is 0, and the lane's bits are used up exactly: both are checked.
No kernel reads or writes outside its buffers, whatever the bytes: states stay below 4096 by the construction of the tables,
and unaligned loads are preceded by a bound on how far the reads that follow can advance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

LANES = 8
PADDING = 64  # readable bytes after the last that belongs to a stream
_STEP = 2563  # between the states of a symbol; odd, so it visits all 4096
_u8 = np.uint64


def _load(bits: int, align: int) -> Any:
    """Make an intrinsic that loads an unsigned number at an address, zero-extended to 64 bits."""

    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            found = builder.load(builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer()))
            found.align = align
            return builder.zext(found, ir.IntType(64)) if bits < 64 else found

        return types.uint64(types.uint64), generate

    return load


def _store(bits: int) -> Any:
    """Make an intrinsic that stores the low bits of a number at any address."""

    @intrinsic
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            value = builder.trunc(arguments[1], ir.IntType(bits)) if bits < 64 else arguments[1]
            builder.store(value, pointer).align = 1
            return context.get_dummy_value()

        return types.void(types.uint64, types.uint64), generate

    return store


load64 = _load(64, 1)
_load32 = _load(32, 4)
_load16 = _load(16, 2)
_load8 = _load(8, 1)
_store32, _store64 = _store(32), _store(64)


def build(
    frequencies: NDArray[np.uint16], contiguous: bool
) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.int32], NDArray[np.uint16]]:
    """Build the tables of the machine from (tables, 256) frequencies that each sum to 4096.

    Args:
        contiguous: give each symbol neighbouring states, the most frequent symbol first (Huffman).

    Returns:
        Entries for decoding (tables, 4096); for encoding, per symbol, what to add to a state so that the high half is the
        number of bits to write, and the offset of its states in the last array (tables, 4096).
    """
    if contiguous:
        return _build(frequencies, np.argsort(-frequencies.astype(np.int64), axis=1, kind="stable"), 1)
    return _build(frequencies, np.broadcast_to(np.arange(256), frequencies.shape).copy(), _STEP)


@njit(cache=True, nogil=True)
def _build(
    frequencies: NDArray[np.uint16], orders: NDArray[np.int64], step: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.int32], NDArray[np.uint16]]:
    tables = len(frequencies)
    entries = np.empty((tables, 4096), np.uint32)
    widths = np.zeros((tables, 256), np.uint32)
    offsets = np.zeros((tables, 256), np.int32)
    states = np.empty((tables, 4096), np.uint16)
    place = np.empty(4096, np.uint8)
    following = np.empty(256, np.int64)
    fill = np.empty(256, np.int64)
    for t in range(tables):
        frequency = frequencies[t].astype(np.int64)
        at = 0
        for symbol in orders[t]:
            for _ in range(frequency[symbol]):
                place[at] = symbol
                at = (at + step) & 4095
        start = 0
        for symbol in range(256):
            f = frequency[symbol]
            following[symbol] = f
            fill[symbol] = start
            if f > 0:
                width = 0
                while (f << width) < 4096:  # bits that the largest states write
                    width += 1
                widths[t, symbol] = (width << 16) - (f << width)
                offsets[t, symbol] = start - f
            start += f
        for state in range(4096):
            symbol = place[state]
            x = following[symbol]
            following[symbol] += 1
            width = 0
            while (x << width) < 4096:
                width += 1
            entries[t, state] = width | np.int64(symbol) << 8 | ((x << width) - 4096) << 16
            states[t, fill[symbol]] = state
            fill[symbol] += 1
    return entries, widths, offsets, states


@njit(cache=True, nogil=True)
def encode(
    symbols: NDArray[np.uint8],
    counts: NDArray[np.int64],
    which: NDArray[np.int64],
    lanes: int,
    widths: NDArray[np.uint32],
    offsets: NDArray[np.int32],
    states: NDArray[np.uint16],
    out: NDArray[np.uint8],
    lengths: NDArray[np.int64],
    words: NDArray[np.int64],
) -> int:
    """Code the segments of a chunk, `counts[i]` symbols under table `which[i]`, lane after lane into `out`.

    Lane k of n takes the k-th n-th of every segment, count // n symbols, and the last lane what remains. Fills the `lengths`
    of the lanes in bytes and their `words`, first state | unused low bits of the first byte << 12.

    Args:
        out: 2 bytes per symbol and 16 per lane are enough.

    Returns:
        Bytes written.
    """
    capacity = 2 * (len(symbols) // lanes + (lanes - 1) * len(counts)) + 16
    scratch = np.empty(lanes * capacity, np.uint8)
    base = _u8(scratch.ctypes.data)
    bits, held, state = np.zeros(lanes, np.uint64), np.zeros(lanes, np.uint64), np.zeros(lanes, np.uint64)
    at = np.empty(lanes, np.uint64)  # every lane is filled from its end
    for lane in range(lanes):
        at[lane] = base + _u8((lane + 1) * capacity)
    base_in, base_state = _u8(symbols.ctypes.data), _u8(states.ctypes.data)
    base_width, base_offset = _u8(widths.ctypes.data), _u8(offsets.ctypes.data)
    low32, one, two, s3, s16, seven = _u8(0xFFFFFFFF), _u8(1), _u8(2), _u8(3), _u8(16), _u8(7)
    stop = len(symbols)
    for segment in range(len(counts) - 1, -1, -1):
        count, table = counts[segment], which[segment]
        width_of, offset_of = base_width + _u8(table << 10), base_offset + _u8(table << 10)
        state_of = base_state + _u8(table << 13)
        first = stop - count
        share = count // lanes
        rest = count - lanes * share  # of the last lane, coded before the others begin
        done = 0
        while done < rest + share:
            single = done < rest
            step = min(4, rest - done if single else rest + share - done)
            for lane in range(lanes - 1 if single else 0, lanes):
                end = (stop - done) if single else first + (lane + 1) * share - (done - rest)
                b, h, x = bits[lane], held[lane], state[lane]
                read = base_in + _u8(end)
                for _ in range(step):
                    read -= one
                    symbol = _load8(read) << two
                    x += _u8(4096)
                    width = ((x + _load32(width_of + symbol)) & low32) >> s16
                    b = (b << width) | (x & ((one << width) - one))
                    h += width
                    x = _load16(state_of + ((((x >> width) + _load32(offset_of + symbol)) & low32) << one))
                _store64(at[lane] - _u8(8), b << ((_u8(64) - h) & _u8(63)))  # at most 7 + 4 * 12 bits
                at[lane] -= h >> s3
                bits[lane], held[lane], state[lane] = b, h & seven, x
            done += step
        stop = first
    size = 0
    for lane in range(lanes):
        unused = (_u8(8) - held[lane]) & seven
        begin = np.int64(at[lane] - base)
        if held[lane] > _u8(0):
            begin -= 1
            scratch[begin] = np.uint8(bits[lane] << unused)
        lengths[lane] = (lane + 1) * capacity - begin
        words[lane] = np.int64(state[lane] | unused << _u8(12))
        for i in range(lengths[lane]):
            out[size + i] = scratch[begin + i]
        size += lengths[lane]
    return size


@njit(cache=True, nogil=True)
def decode_lane(
    data: NDArray[np.uint8],
    start: int,
    counts: NDArray[np.int64],
    which: NDArray[np.int64],
    entries: NDArray[np.uint32],
    out: NDArray[np.uint8],
) -> int:
    """Decode one lane, a state of twelve bits and its stream, from bit `start` of the data.

    Args:
        data: with PADDING bytes after what belongs to the stream.

    Returns:
        The bit after the last one used, or -1 where the data end before that or the last state is not 0.
    """
    base = _u8(data.ctypes.data)
    last = _u8(8 * (len(data) - PADDING))
    at = _u8(start)
    if at + _u8(12) > last:
        return -1
    x = (load64(base + (at >> _u8(3))) >> (at & _u8(7))) & _u8(4095)
    at += _u8(12)
    n = 0
    for segment in range(len(counts)):
        table = entries[which[segment]]
        for _ in range(counts[segment]):
            entry = _u8(table[x])
            out[n] = np.uint8(entry >> _u8(8))
            n += 1
            width = entry & _u8(63)
            if at > last:
                return -1
            x = (entry >> _u8(16)) + (load64(base + (at >> _u8(3))) >> (at & _u8(7)) & ((_u8(1) << width) - _u8(1)))
            at += width
    if x != _u8(0) or at > last:
        return -1
    return np.int64(at)


@njit(cache=True, nogil=True)
def decode_lanes(
    data: NDArray[np.uint8],
    start: int,
    lengths: NDArray[np.int64],
    words: NDArray[np.int64],
    counts: NDArray[np.int64],
    which: NDArray[np.int64],
    entries: NDArray[np.uint32],
    out: NDArray[np.uint8],
) -> bool:
    """Decode the eight lanes of a chunk, four at a time.

    Args:
        data: at least PADDING bytes stand after the last lane.
        start: of the first lane; `lengths` and `words` are as `encode` gives them.
        out: as many bytes as the counts sum to.

    Returns:
        Whether every lane ended in state 0 with its bits used up.
    """
    base, base_out, base_table = _u8(data.ctypes.data), _u8(out.ctypes.data), _u8(entries.ctypes.data)
    limit = base + _u8(len(data) - 8)  # the last address of an unaligned load
    pointer, offset, state = np.empty(4, np.uint64), np.empty(4, np.uint64), np.empty(4, np.uint64)
    one, two, m63, m255, s3, s8, s16 = _u8(1), _u8(2), _u8(63), _u8(255), _u8(3), _u8(8), _u8(16)
    seven = _u8(7)
    ends = base + _u8(start)
    for half in range(2):
        begin = ends
        for k in range(4):
            pointer[k] = ends
            offset[k] = _u8(words[4 * half + k] >> 12)
            state[k] = _u8(words[4 * half + k] & 4095)
            ends += _u8(lengths[4 * half + k])
        first = 0
        for segment in range(len(counts)):
            count = counts[segment]
            share = count >> 3
            table = base_table + _u8(which[segment] << 14)
            p0, p1, p2, p3 = pointer[0], pointer[1], pointer[2], pointer[3]
            c0, c1, c2, c3 = offset[0], offset[1], offset[2], offset[3]
            x0, x1, x2, x3 = state[0], state[1], state[2], state[3]
            o0 = base_out + _u8(first + 4 * half * share)
            o1 = o0 + _u8(share)
            o2 = o1 + _u8(share)
            o3 = o2 + _u8(share)
            left = share >> 2
            while left > 0:
                furthest = max(max(p0, p1), max(p2, p3))
                if furthest > limit:
                    return False
                rounds = min(left, np.int64(limit - furthest) // 6)  # a round of four symbols advances at most 6 bytes
                if rounds == 0:
                    break
                left -= rounds
                for _ in range(rounds):
                    b0, b1, b2, b3 = load64(p0) >> c0, load64(p1) >> c1, load64(p2) >> c2, load64(p3) >> c3
                    w0, w1, w2, w3 = _u8(0), _u8(0), _u8(0), _u8(0)
                    for r in range(4):
                        shift = _u8(8 * r)
                        e = _load32(table + (x0 << two))
                        width = e & m63
                        w0 |= ((e >> s8) & m255) << shift
                        x0 = (e >> s16) + (b0 & ((one << width) - one))
                        b0 >>= width
                        c0 += width
                        e = _load32(table + (x1 << two))
                        width = e & m63
                        w1 |= ((e >> s8) & m255) << shift
                        x1 = (e >> s16) + (b1 & ((one << width) - one))
                        b1 >>= width
                        c1 += width
                        e = _load32(table + (x2 << two))
                        width = e & m63
                        w2 |= ((e >> s8) & m255) << shift
                        x2 = (e >> s16) + (b2 & ((one << width) - one))
                        b2 >>= width
                        c2 += width
                        e = _load32(table + (x3 << two))
                        width = e & m63
                        w3 |= ((e >> s8) & m255) << shift
                        x3 = (e >> s16) + (b3 & ((one << width) - one))
                        b3 >>= width
                        c3 += width
                    _store32(o0, w0)
                    _store32(o1, w1)
                    _store32(o2, w2)
                    _store32(o3, w3)
                    o0 += _u8(4)
                    o1 += _u8(4)
                    o2 += _u8(4)
                    o3 += _u8(4)
                    p0, p1, p2, p3 = p0 + (c0 >> s3), p1 + (c1 >> s3), p2 + (c2 >> s3), p3 + (c3 >> s3)
                    c0, c1, c2, c3 = c0 & seven, c1 & seven, c2 & seven, c3 & seven
            pointer[0], pointer[1], pointer[2], pointer[3] = p0, p1, p2, p3
            offset[0], offset[1], offset[2], offset[3] = c0, c1, c2, c3
            state[0], state[1], state[2], state[3] = x0, x1, x2, x3
            done = ((share >> 2) - left) << 2
            for k in range(4):  # what four symbols at a time left over
                lane = 4 * half + k
                stop = count if lane == 7 else (lane + 1) * share
                at, c, x = pointer[k], offset[k], state[k]
                for i in range(first + lane * share + done, first + stop):
                    if at > limit:
                        return False
                    entry = _load32(table + (x << two))
                    width = entry & m63
                    out[i] = np.uint8(entry >> s8)
                    x = (entry >> s16) + ((load64(at) >> c) & ((one << width) - one))
                    c += width
                    at += c >> s3
                    c &= seven
                pointer[k], offset[k], state[k] = at, c, x
            first += count
        for k in range(4):
            begin += _u8(lengths[4 * half + k])
            if state[k] != _u8(0) or pointer[k] + ((offset[k] + seven) >> s3) != begin:
                return False
    return True

"""Read a coded matrix of coder tans with plain Python and NumPy: docs/format.md in code. Slow on purpose."""

from __future__ import annotations

import math
import zlib

import numpy as np

TAIL = [round(2**31 * math.erfc(i / 64 / math.sqrt(2)) / 2) for i in range(424)]
OCTAVE = [round(2**20 * 2 ** (-j / 16)) for j in range(16)]


class Bits:
    def __init__(self, data: bytes) -> None:
        self.value, self.at = int.from_bytes(data, "little"), 0

    def take(self, width: int) -> int:
        self.at += width
        return self.value >> (self.at - width) & ((1 << width) - 1)

    def align(self) -> int:
        self.at = (self.at + 7) // 8 * 8
        return self.at // 8

    def varint(self) -> int:
        byte = self.take(8)
        return byte if byte < 128 else byte - 128 + (self.varint() << 7)

    def ones(self, most: int) -> int:
        return 1 + self.ones(most - 1) if most and self.take(1) else 0

    def gamma(self) -> int:
        return (1 << (width := self.ones(99))) - 1 + self.take(width)

    def rice(self, k: int) -> int:
        q = self.ones(24)
        z = self.take(32) if q == 24 else q << k | self.take(k)
        return -(z + 1) // 2 if z & 1 else z // 2

    def array(self, count: int) -> list[int]:
        k, z = self.take(4), self.gamma()
        return [(-(z + 1) // 2 if z & 1 else z // 2) + (self.rice(k) if k < 15 else 0) for _ in range(count)]

    def escapes(self) -> list[int]:
        count = self.gamma()
        k = self.take(4) if count else 0
        return [self.rice(k) for _ in range(count)]


def tail(odd: int, spread: int) -> int:
    x = odd * OCTAVE[(spread - 48) & 15] << 16 >> (21 + ((spread - 48) >> 4))
    i = x >> 10
    return TAIL[i] - ((TAIL[i] - TAIL[i + 1]) * (x & 1023) >> 10) if i < 423 else 0


def family(spread: int, shape: int) -> list[int]:
    weight = [0] * 129
    for m, part in zip(range(-4, 5), (1, 8, 28, 56, 70, 56, 28, 8, 1), strict=True):
        q = [1 << 30] + [tail(2 * k + 1, spread + m * shape) for k in range(128)]
        for k in range(128):
            weight[k] += part * (q[k] - q[k + 1]) * (1 if k else 2)
        weight[128] += part * 2 * q[128]
    left, top, escaped = 1 << 39, 127, weight[128]
    while top > 1 and weight[top] << 14 < left:
        escaped, top = escaped + 2 * weight[top], top - 1
    f, room = [0] * 256, 4096
    f[0] = min(max(1, (escaped * room + left // 2) // left), room - 2 * top - 1)
    room, left = room - f[0], left - escaped
    for k in range(top, 0, -1):
        f[128 + k] = f[128 - k] = min(max(1, (weight[k] * room + left // 2) // max(1, left)), (room - 2 * k + 1) // 2)
        room, left = room - 2 * f[128 + k], left - 2 * weight[k]
    f[128] = room
    return f


def paired(single: list[int]) -> list[int]:
    nibble = [4096 - sum(single[121:136]), *single[121:136]]
    weight = [nibble[s & 15] * nibble[s >> 4] for s in range(256)]
    kept = [w if w >= 1024 else 0 for w in weight]
    kept[0] = max(kept[0], 1) + sum(weight) - sum(kept)
    order = sorted((w, s) for s, w in enumerate(kept) if w)
    f, room, left = [0] * 256, 4096, sum(kept)
    for after, (w, s) in zip(range(len(order) - 1, -1, -1), order, strict=True):
        f[s] = min(max(1, (w * room + left // 2) // left), room - after) if after else room
        room, left = room - f[s], left - w
    return f


def machine(f: list[int]) -> list[tuple[int, int, int]]:
    following, entries = list(f), []
    symbol_of = dict(zip([n * 2563 & 4095 for n in range(4096)], np.repeat(range(256), f).tolist(), strict=True))
    for s in (symbol_of[state] for state in range(4096)):
        width = 13 - following[s].bit_length()
        entries.append((width, s, (following[s] << width) - 4096))
        following[s] += 1
    return entries


def run(lane: Bits, state: int, segments: list, symbols: np.ndarray) -> None:
    for count, table, at in segments:
        for i in range(at, at + count):
            width, symbols[i], base = table[state]
            state = base + lane.take(width)
    assert state == 0, "a stream does not end where its symbols do"


def read_chunks(blob: bytes, bits: Bits, cells: list, symbols: np.ndarray) -> list[int]:
    chunks, total, escapes, _ = max(1, (len(symbols) + (1 << 16)) >> 17), len(symbols), [], bits.align()
    directory = [(bits.varint(), bits.take(32)) for _ in range(chunks)]
    start = bits.at // 8 + 4
    assert zlib.crc32(blob[: start - 4]) == bits.take(32), "checksum of the header"
    for n, (size, checksum) in enumerate(directory):
        data, start = blob[start : start + size], start + size
        begin, end = n * total // chunks, (n + 1) * total // chunks
        assert zlib.crc32(data) == checksum, "checksum of a chunk"
        chunk = Bits(data)
        escapes, _ = escapes + chunk.escapes(), chunk.align()
        words = [chunk.take(16) for _ in range(8)]
        ends = np.cumsum([0, *(chunk.varint() for _ in range(7)), len(data)]) + chunk.at // 8
        parts = [(max(first, begin), min(first + count, end), table) for table, *_, first, count in cells]
        parts = [(a, b - a, (b - a) // 8, table) for a, b, table in parts if a < b]
        for lane, word in enumerate(words):
            segments = [(n - 7 * e if lane == 7 else e, table, a + lane * e) for a, n, e, table in parts]
            stream = Bits(data[ends[lane] : ends[lane + 1]])
            stream.take(word >> 12)
            run(stream, word & 4095, segments, symbols)
    return escapes


def read(blob: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    bits = Bits(blob)
    assert (bits.take(4), bits.take(4)) == (0, 2), "coder tans, version 2"
    out, width, base = bits.varint(), bits.varint(), bits.take(16)
    column_steps, row_steps, columns = 1 << bits.take(3), 1 << bits.take(3), bits.array(width)
    rows = bits.array(out) if bits.take(1) else [0] * out
    spread, shape, slope, steps = bits.take(8), bits.take(4), bits.take(3), 1 << bits.take(2)
    corrections = bits.array(width) if bits.take(1) else [0] * width
    row_levels = bits.array(out) if bits.take(1) else [0] * out
    row_level_steps, centre = 1 << bits.take(2) if any(row_levels) else 1, sorted(columns)[(width - 1) // 2]
    pairs = bits.gamma()
    predicted = [(2 * (centre - c) * slope * steps + 4 * column_steps) // (8 * column_steps) for c in columns]
    levels = [max(-40, min(40, p + c)) for p, c in zip(predicted, corrections, strict=True)]
    cells, total, single = [], 0, {}
    for g, level in enumerate(sorted(set(levels))):
        group = [j for j in range(width) if levels[j] == level]
        for row_level in sorted(set(row_levels)):
            members = [i for i in range(out) if row_levels[i] == row_level]
            key = max(0, min(160, spread + 16 // steps * level + 16 // row_level_steps * row_level))
            size = len(members) * ((len(group) + 1) // 2 if g < pairs else len(group))
            cells.append((key, g < pairs, group, members, total, size))
            total += size
    stored = bits.take(1)
    for key in sorted({cell[0] for cell in cells}):
        single[key] = family(key, shape)
        if stored and bits.take(1):
            top, k = bits.gamma(), bits.take(4)
            found = {s: single[key][s] + bits.rice(k) for s in [0, *range(128 - top, 129 + top)]}
            single[key] = [found.get(s, 0) for s in range(256)]
    tables = {c[:2]: machine(paired(single[c[0]]) if c[1] else single[c[0]]) for c in cells}
    cells, symbols = [(tables[c[:2]], *c[1:]) for c in cells], np.zeros(total, np.int64)
    escapes = read_chunks(blob, bits, cells, symbols)
    codes = np.zeros((out, width), np.int64)
    for _, pair, group, members, first, size in cells:
        part = symbols[first : first + size].reshape(len(members), -1)
        part = np.stack([part & 15, part >> 4], 2).reshape(len(members), -1) - 8 if pair else part - 128
        escaped = part == (-8 if pair else -128)
        part[escaped], escapes = escapes[: escaped.sum()], escapes[escaped.sum() :]
        codes[np.ix_(members, group)] = part[:, : len(group)]
    scale = np.float32(2 ** ((base - 32768) / 256)) * 2.0 ** (np.array(columns) / column_steps)
    row_scale = (2.0 ** (np.array(rows) / row_steps)).astype(np.float32)
    column_scale = scale.astype(np.float32)
    return row_scale[:, None].astype(float) * codes * column_scale.astype(float), codes, column_scale, row_scale

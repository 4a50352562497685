"""Decoding of the lanes of coded matrices on a GPU, compiled by Triton; `tans.py` and `symbols.py` do the same on the CPU.

A program decodes a chunk with a thread for each of its eight lanes, and one launch all chunks of a batch of matrices.
Everything is integer arithmetic, so that nothing differs from the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearplane.coding.tans import LANES

BYTES = 1024  # that a program of `pack` writes
ROWS, COLUMNS = 8, 128  # of a program of `unpack`


def decode(
    coded: Tensor, chunks: Tensor, lanes: Tensor, segments: Tensor, entries: Tensor,
    symbols: Tensor, wrong: Tensor, escaped: Tensor, outside: Tensor, escapes: Tensor,
) -> None:  # fmt: skip
    """Decode all chunks of several matrices. All but `symbols` of what is filled must be 0 before.

    Args:
        coded: (bytes,) uint8, a multiple of four, that hold all lanes.
        chunks: (chunks, 5) int64, flat: first symbol; first segment, and the one after the last; first of `escapes`, and
            the room there.
        lanes: (chunks, 8, 3) int64, flat: first byte, length and word, see `tans.Lanes`.
        segments: (segments, 4) int64, flat: number of symbols, table, group, and whether symbols are pairs.
        entries: (tables, 4096) int32, see `tans`.
        symbols: (symbols,) uint8, filled with the symbols of all chunks.
        wrong: (chunks,) int32, filled with whether a lane does not end where its symbols do.
        escaped: (chunks,) int32, filled with the number of symbols that are or have escapes.
        outside: (groups,) int32, filled with whether codes of a group of bytes exceed -8 ... 7.
        escapes: (escapes,) int32, filled with these symbols in any order, each as its place in the chunk << 8 | symbol.
    """
    words = coded.view(torch.int32)
    with _device_of(coded):
        _decode[(len(wrong),)](
            words, len(words), chunks, lanes, segments, entries, symbols, wrong, escaped, outside, escapes,
            LANES=LANES, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


def pack(symbols: Tensor, groups: Tensor, largest: int, codes: Tensor) -> None:
    """Copy the groups of one matrix to `codes` (bytes,), some of them packed from bytes to nibbles; see `packed_matrix.pack`.

    Args:
        groups: (groups, 6) int64: first symbol, symbols of a row, first byte, bytes of a row, bytes, and whether it is packed.
        largest: Bytes of the largest group.
    """
    with _device_of(symbols):
        _pack[(triton.cdiv(largest, BYTES), len(groups))](
            symbols, groups, codes, B=BYTES, num_warps=4, enable_fp_fusion=False
        )


def unpack(symbols: Tensor, places: Tensor, columns: Tensor, codes: Tensor) -> None:
    """Fill codes (out, in) int32 with those of decoded symbols; escapes become the least code. See `symbols.scatter`.

    Args:
        places: (out,) int64 position of each row.
        columns: (4, in) int64 of each column, see `packed_matrix.column_table`.
    """
    out, width = codes.shape
    with _device_of(symbols):
        _unpack[(triton.cdiv(out, ROWS), triton.cdiv(width, COLUMNS))](
            symbols, places, columns, codes, out, width, R=ROWS, C=COLUMNS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def _device_of(tensor: Tensor) -> Any:
    """Return a context in which kernels start on the device of a tensor."""
    return torch.accelerator.device_index(tensor.device.index)


@triton.jit
def _decode(
    words, size, chunks, lanes, segments, entries, symbols, wrong, escaped, outside, escapes, LANES: tl.constexpr
):
    """Decode the lanes of one chunk."""
    chunk = tl.program_id(0)
    lane = tl.arange(0, LANES)
    chunk_symbols = symbols + tl.load(chunks + 5 * chunk)
    first_segment, last_segment = tl.load(chunks + 5 * chunk + 1), tl.load(chunks + 5 * chunk + 2)
    first_escape, room = tl.load(chunks + 5 * chunk + 3), tl.load(chunks + 5 * chunk + 4)
    at_lane = lanes + 3 * (LANES * chunk + lane)
    begin, length, word = tl.load(at_lane), tl.load(at_lane + 1), tl.load(at_lane + 2)
    x = (word & 4095).to(tl.int32)
    begin_bit = 8 * begin + (word >> 12)
    at = begin_bit >> 5  # word that is read next
    skipped = (begin_bit & 31).to(tl.int32)
    bits = tl.load(words + at, mask=at < size, other=0).to(tl.uint32, bitcast=True).to(tl.uint64) >> skipped.to(
        tl.uint64
    )
    held = 32 - skipped  # bits that are read and not used
    at += 1
    ahead = tl.load(words + at, mask=at < size, other=0)  # read before it is needed
    done = 0  # symbols of earlier segments
    for segment in range(first_segment, last_segment):
        count, table = tl.load(segments + 4 * segment).to(tl.int32), tl.load(segments + 4 * segment + 1)
        group, pairs = tl.load(segments + 4 * segment + 2), tl.load(segments + 4 * segment + 3) != 0
        share = count // LANES
        place = done + lane * share
        mine = share + tl.where(lane == LANES - 1, count % LANES, 0)  # the last lane takes what remains
        wide = tl.zeros((LANES,), tl.int32)
        for i in range(share + count % LANES):
            here = i < mine
            few = held < 32
            more = ahead.to(tl.uint32, bitcast=True).to(tl.uint64) << held.to(tl.uint64)
            bits |= tl.where(few, more, 0)
            held += tl.where(few, 32, 0)
            at += few.to(tl.int64)
            ahead = tl.load(words + at, mask=few & (at < size), other=ahead)
            entry = tl.load(entries + 4096 * table + x)
            width = entry & 63
            symbol = (entry >> 8) & 255
            taken = (bits & ((1 << width) - 1).to(tl.uint64)).to(tl.int32)
            x = tl.where(here, (entry >> 16) + taken, x)
            width = tl.where(here, width, 0)
            bits >>= width.to(tl.uint64)
            held -= width
            tl.store(chunk_symbols + place + i, symbol.to(tl.uint8), mask=here)
            wide |= tl.where(here, (symbol + 8) & 240, 0)
            escape = here & tl.where(pairs, ((symbol & 15) == 0) | (symbol < 16), symbol == 128)
            n = tl.atomic_add(escaped + chunk + tl.zeros((LANES,), tl.int32), 1, mask=escape, sem="relaxed")
            tl.store(escapes + first_escape + n, (place + i) << 8 | symbol, mask=escape & (n < room))
        tl.store(outside + group + tl.zeros((LANES,), tl.int32), 1, mask=wide != 0)
        done += count
    end = (32 * at - held + 7) >> 3
    tl.store(wrong + chunk, tl.max(((x != 0) | (end != begin + length)).to(tl.int32), 0))


@triton.jit
def _pack(symbols, groups, codes, B: tl.constexpr):
    """Copy or pack some bytes of one group."""
    group = groups + 6 * tl.program_id(1)
    source, row_symbols = symbols + tl.load(group), tl.load(group + 1)
    target, row_bytes, size, packed = (
        codes + tl.load(group + 2),
        tl.load(group + 3),
        tl.load(group + 4),
        tl.load(group + 5),
    )
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    here = at < size
    if packed != 0:
        row, column = at // row_bytes, 2 * (at % row_bytes)
        low = tl.load(source + row * row_symbols + column, mask=here, other=0)
        high = tl.load(source + row * row_symbols + column + 1, mask=here & (column + 1 < row_symbols), other=0)
        tl.store(target + at, ((low + 8) & 15) | (((high + 8) & 15) << 4), mask=here)
    else:
        tl.store(target + at, tl.load(source + at, mask=here), mask=here)


@triton.jit
def code_of(stored, half):
    """Return the codes (int32) in bytes: as int8 where `half` is 0, in the low nibble where it is 1, in the high one at 2."""
    byte = stored.to(tl.int32)
    whole = stored.to(tl.int8, bitcast=True).to(tl.int32)
    return tl.where(half == 0, whole, tl.where(half == 1, byte & 15, byte >> 4) - 8)


@triton.jit
def _unpack(symbols, places, columns, codes, out, width, R: tl.constexpr, C: tl.constexpr):
    """Write the codes of a tile of a matrix."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.program_id(1) * C + tl.arange(0, C)
    place = tl.load(places + row, mask=row < out, other=0)
    first = tl.load(columns + column, mask=column < width, other=0)
    stride = tl.load(columns + width + column, mask=column < width, other=0)
    half = tl.load(columns + 2 * width + column, mask=column < width, other=0)
    here = (row < out)[:, None] & (column < width)[None, :]
    byte = tl.load(symbols + first[None, :] + place[:, None] * stride[None, :], mask=here, other=0)
    tl.store(codes + row[:, None] * width + column[None, :], code_of(byte, half[None, :]), mask=here)

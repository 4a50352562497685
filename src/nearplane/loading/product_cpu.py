"""Products with codes of 2, 4 or 8 bits in words of 32 bits on the CPU, and the values of the codes, compiled by Numba.

The fields of a word belong to neighbouring inputs of one output; a register holds one word of each of several outputs.
A mask leaves one field where it stands, so that as an integer it is the code times a power of two. Inputs are divided
by that power beforehand. Hence a weight costs a mask, a conversion to float32 and a multiplication, each exact but the
last. Codes count from 0 in the middle of their range; all fields but the highest, whose sign is the word's, hold the
code plus half the range.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nearplane.compiled import compiled

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.int32]

BLOCK = 64  # outputs whose words stand side by side
WIDTHS = (2, 4, 8)  # bits of a field
MIN_THREADED_WEIGHTS = 2**18  # with fewer, one thread computes everything


def pack(codes: npt.NDArray[np.integer], bits: int, columns: npt.NDArray[np.integer]) -> Words:
    """Return words (blocks, in / fields, BLOCK) of some columns of codes around 0; outputs are filled up to blocks.

    Args:
        codes: (out, any) integers from -2^(bits - 1) to 2^(bits - 1) - 1.
        bits: Of a field.
        columns: (in,) column of `codes` for each place, a multiple of the number of fields; -1: code 0.
    """
    words = np.zeros((-(-len(codes) // BLOCK), len(columns) * bits // 32, BLOCK), np.int32)
    _kernels(bits).pack(codes, columns.astype(np.int64), words)
    return words


def product(x: Floats, words: Words, steps: Floats, offsets: Floats, bits: int) -> Floats:
    """Return (rows, outputs) products of x with `step * code + offset`.

    Args:
        x: (rows, in) inputs.
        words: (blocks, in / fields, BLOCK), see `pack`.
        steps: (blocks, groups, BLOCK); groups are of equal size, a multiple of the number of fields.
        offsets: As steps, or (blocks, 0, BLOCK) where all are 0.
        bits: Of a field.
    """
    y = np.empty((len(x), len(words) * BLOCK), np.float32)
    write = _kernels(bits).product
    _in_threads(lambda a, b: write(x, words, steps, offsets, a, b, y), words, bits)
    return y


def values(words: Words, steps: Floats, offsets: Floats, bits: int) -> Floats:
    """Return the values (in, outputs) of the codes; arguments as in `product`."""
    made = np.empty((words.shape[1] * (32 // bits), len(words) * BLOCK), np.float32)
    write = _kernels(bits).values
    _in_threads(lambda a, b: write(words, steps, offsets, a, b, made), words, bits)
    return made


def _in_threads(work: Callable[[int, int], None], words: Words, bits: int) -> None:
    """Call `work` for shares of the blocks: first and last + 1, in as many threads as torch takes."""
    threads, blocks = torch.get_num_threads(), len(words)
    share = -(-blocks // threads) if words.size * (32 // bits) >= MIN_THREADED_WEIGHTS else blocks
    others = [_pool(threads - 1).submit(work, a, min(a + share, blocks)) for a in range(share, blocks, max(1, share))]
    work(0, share)
    for part in others:
        part.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


class _Kernels(NamedTuple):
    """Compiled functions that write words with a certain number of fields, their products and values."""

    pack: Callable[[npt.NDArray[np.integer], npt.NDArray[np.int64], Words], None]
    product: Callable[[Floats, Words, Floats, Floats, int, int, Floats], None]
    values: Callable[[Words, Floats, Floats, int, int, Floats], None]


@cache
def _kernels(bits: int) -> _Kernels:
    """Compile the functions for fields of some bits; their loops over fields are unrolled, as the number is constant."""
    fields, last = 32 // bits, 32 // bits - 1
    half, power = np.float32(2 ** (bits - 1)), np.float32(2.0**-bits)
    masks = np.array([(1 << bits) - 1 << bits * i for i in range(fields)], np.uint32).view(np.int32)
    # offsets of fields: those of 128 are subtracted from each code, smaller ones from sums, which costs less
    each, summed = (1, np.float32(0)) if bits == 8 else (0, half)
    offset_at = np.array([each * 2.0 ** (bits * i + bits - 1) for i in range(last)] + [0], np.float32)

    @compiled(error_model="numpy")
    def pack(codes: npt.NDArray[np.integer], columns: npt.NDArray[np.int64], words: Words) -> None:  # pragma: no cover
        """Write the words of codes; see the function of that name."""
        line = np.zeros(len(columns), np.int32)
        for row in range(len(codes)):
            for place in range(len(columns)):
                if columns[place] >= 0:
                    line[place] = codes[row, columns[place]]
            block, k = row // BLOCK, row % BLOCK
            for j in range(words.shape[1]):
                word = line[j * fields + last] << np.int32(bits * last)
                for i in range(last):
                    word |= (line[j * fields + i] + np.int32(half)) << np.int32(bits * i)
                words[block, j, k] = word

    @compiled(fastmath={"contract"}, error_model="numpy")
    def product(
        x: Floats, words: Words, steps: Floats, offsets: Floats, a: int, b: int, y: Floats
    ) -> None:  # pragma: no cover
        """Write the products (rows, outputs) of blocks a ... b - 1."""
        rows, groups = len(x), steps.shape[1]
        size = words.shape[1] // groups
        factors = np.empty((rows, words.shape[1], fields), np.float32)
        sums = np.zeros((rows, groups), np.float32)  # of the inputs of a group
        start = np.zeros((rows, groups), np.float32)  # less the offset of each field that has one
        for row in range(rows):
            for j in range(words.shape[1]):
                factor, group = np.float32(1), j // size
                for i in range(fields):
                    one = x[row, j * fields + i]
                    factors[row, j, i] = one * factor
                    factor *= power
                    sums[row, group] += one
                start[row, group] -= summed * one
            for group in range(groups):
                start[row, group] = -summed * sums[row, group] - start[row, group]
        y[:, a * BLOCK : b * BLOCK] = 0
        part = np.empty(BLOCK, np.float32)
        for block in range(a, b):
            for row in range(rows):
                out = y[row, block * BLOCK : (block + 1) * BLOCK]
                for group in range(groups):
                    part[:] = start[row, group]
                    for j in range(group * size, (group + 1) * size):
                        word, factor_of = words[block, j], factors[row, j]
                        for k in range(BLOCK):
                            total = part[k]
                            for i in range(fields):
                                total += factor_of[i] * (np.float32(word[k] & masks[i]) - offset_at[i])
                            part[k] = total
                    step = steps[block, group]
                    for k in range(BLOCK):
                        out[k] += step[k] * part[k]
                    if offsets.shape[1]:
                        offset = offsets[block, group]
                        for k in range(BLOCK):
                            out[k] += offset[k] * sums[row, group]

    @compiled(error_model="numpy")
    def values(words: Words, steps: Floats, offsets: Floats, a: int, b: int, made: Floats) -> None:  # pragma: no cover
        """Write the values (in, outputs) of blocks a ... b - 1."""
        size = words.shape[1] // steps.shape[1]
        for block in range(a, b):
            for j in range(words.shape[1]):
                word, step, factor = words[block, j], steps[block, j // size], np.float32(1)
                for i in range(fields):
                    out = made[j * fields + i, block * BLOCK : (block + 1) * BLOCK]
                    less = half if i < last else np.float32(0)
                    for k in range(BLOCK):
                        out[k] = step[k] * (np.float32(word[k] & masks[i]) * factor - less)
                    factor *= power
                    if offsets.shape[1]:
                        offset = offsets[block, j // size]
                        for k in range(BLOCK):
                            out[k] += offset[k]

    return _Kernels(pack, product, values)

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
MIN_THREADED_WEIGHTS = 2**20  # for each row of inputs; with fewer, one thread computes everything


def pack(codes: Words, bits: int) -> Words:
    """Return words (blocks, in / fields, BLOCK) of codes (outputs, in) around 0, whole blocks and words of them."""
    fields = 32 // bits
    parts = codes.reshape(-1, BLOCK, codes.shape[1] // fields, fields).transpose(3, 0, 2, 1)
    words = np.ascontiguousarray(parts[-1]) << 32 - bits
    for i in range(fields - 1):
        words |= parts[i] + (1 << bits - 1) << bits * i
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
    threads = torch.get_num_threads()
    write = _kernels(bits).product
    share = -(-len(words) // threads)
    if words.size * (32 // bits) < MIN_THREADED_WEIGHTS:
        share = len(words)
    rest = [(a, min(a + share, len(words))) for a in range(share, len(words), share)]
    others = [_pool(threads - 1).submit(write, x, words, steps, offsets, a, b, y) for a, b in rest]
    write(x, words, steps, offsets, 0, share, y)
    for part in others:
        part.result()
    return y


def values(words: Words, steps: Floats, offsets: Floats, bits: int) -> Floats:
    """Return the values (in, outputs) of the codes; arguments as in `product`."""
    made = np.empty((words.shape[1] * (32 // bits), len(words) * BLOCK), np.float32)
    _kernels(bits).values(words, steps, offsets, made)
    return made


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


class _Kernels(NamedTuple):
    """Compiled functions that write products and values of words with a certain number of fields."""

    product: Callable[[Floats, Words, Floats, Floats, int, int, Floats], None]
    values: Callable[[Words, Floats, Floats, Floats], None]


@cache
def _kernels(bits: int) -> _Kernels:
    """Compile the functions for fields of some bits; their loops over fields are unrolled, as the number is constant."""
    fields, last = 32 // bits, 32 // bits - 1
    half, power = np.float32(2 ** (bits - 1)), np.float32(2.0**-bits)
    masks = np.array([(1 << bits) - 1 << bits * i for i in range(fields)], np.uint32).view(np.int32)

    @compiled(fastmath={"contract"}, error_model="numpy")
    def product(
        x: Floats, words: Words, steps: Floats, offsets: Floats, a: int, b: int, y: Floats
    ) -> None:  # pragma: no cover
        """Write the products (rows, outputs) of blocks a ... b - 1."""
        rows, groups = len(x), steps.shape[1]
        size = words.shape[1] // groups
        factors = np.empty((rows, words.shape[1], fields), np.float32)
        sums = np.zeros((rows, groups), np.float32)  # of the inputs of a group
        start = np.zeros((rows, groups), np.float32)  # less half a range for each field that holds it
        for row in range(rows):
            for j in range(words.shape[1]):
                factor, group = np.float32(1), j // size
                for i in range(fields):
                    one = x[row, j * fields + i]
                    factors[row, j, i] = one * factor
                    factor *= power
                    sums[row, group] += one
                start[row, group] -= half * one
            for group in range(groups):
                start[row, group] = -half * sums[row, group] - start[row, group]
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
                                total += factor_of[i] * np.float32(word[k] & masks[i])
                            part[k] = total
                    step = steps[block, group]
                    for k in range(BLOCK):
                        out[k] += step[k] * part[k]
                    if offsets.shape[1]:
                        offset = offsets[block, group]
                        for k in range(BLOCK):
                            out[k] += offset[k] * sums[row, group]

    @compiled(error_model="numpy")
    def values(words: Words, steps: Floats, offsets: Floats, made: Floats) -> None:  # pragma: no cover
        """Write the values (in, outputs)."""
        size = words.shape[1] // steps.shape[1]
        for block in range(len(words)):
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

    return _Kernels(product, values)

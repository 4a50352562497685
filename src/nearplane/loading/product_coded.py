"""Products with codes whose columns take 2, 3, 4, 5, 6 or 8 bits each, and patches, on the CPU; see `product_cpu.py`.

    y[i] = row_scale[i] * sum over j of code[i, j] * column_scale[j] * x[j]

Columns without a code other than 0 take no bits. The words of an output stand one width after the other. A patch is a
code that does not fit in the bits of its column: there it counts 0, and it is added by itself.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from torch import Tensor

from nearplane.compiled import compiled
from nearplane.loading import product_cpu
from nearplane.loading.product_cpu import BLOCK, SUBTRACTED_FROM_CODES, add_fields
from nearplane.loading.torch_threads import (
    Native,
    array_at,
    fields_of,
    floats_at,
    in_threads,
    integers_at,
    native,
    next_share,
)

WIDTHS = (2, 3, 4, 5, 6, 8)  # bits of a field
# fields of a word; the last one has the bits that are left: 2 beside those of 3, 5 and 6
FIELDS = tuple(-(-32 // bits) for bits in WIDTHS)
NARROW = 2**16 - 1  # columns whose numbers take 16 bits, and the number that stands for none

bytes_at, shorts_at = array_at(types.uint8), array_at(types.int16)
unsigned_at, longs_at = array_at(types.uint16), array_at(types.int64)


class Codes(NamedTuple):
    """Codes of a matrix on the CPU; all tensors are contiguous, floats are seen as int32, so that no cast rounds them."""

    words: Tensor  # (blocks, words, BLOCK) int32
    counts: tuple[int, ...]  # words of an output in each of `WIDTHS`
    columns: Tensor  # (places,) column of each field, -1: none; 16 bits for at most `NARROW` columns, else int32
    column_scale: Tensor  # (in,) float32
    row_scale: Tensor  # (blocks, BLOCK) float32
    patch_start: Tensor  # (blocks + 1,) int32 first patch of each block
    patch_outputs: Tensor  # (patches,) uint8 output within the block
    patch_columns: Tensor  # (patches,) as columns, ascending in each block
    patch_codes: Tensor  # (patches,) int16, or float32 if one is too large

    def numbers(self) -> tuple[int, ...]:
        """Return what the compiled functions read of the codes: sizes, and the addresses of the tensors."""
        narrow, short = self.columns.itemsize == 2, self.patch_codes.itemsize == 2
        sizes = len(self.words), self.words.shape[1], len(self.column_scale), len(self.columns), len(self.patch_codes)
        return (narrow, short, *sizes, *self.counts, *(each.data_ptr() for each in (self.words, *self[2:])))


_SIZES = ("narrow", "short", "blocks", "words_of_output", "width", "places", "patches")
_COMMON = (*_SIZES, *(f"words_{bits}" for bits in WIDTHS), "words", *Codes._fields[2:])
_ROW_SCALE = _COMMON.index("row_scale")


class Addressed(NamedTuple):
    """Codes, and their numbers, which take longer to collect than a small product."""

    codes: Codes
    numbers: tuple[int, ...]

    def holds(self, row_scale: Tensor | None) -> bool:
        """Return whether this is the scale of rows, and still where it was: a module that is moved has another one."""
        return self.codes.row_scale is row_scale and row_scale.data_ptr() == self.numbers[_ROW_SCALE]


def product(x: Tensor, addressed: Addressed) -> Tensor:
    """Return (rows, outputs) products of (rows, in) contiguous float32 inputs."""
    rows, (_, _, blocks, _, width, places, _) = x.shape[0], addressed.numbers[: len(_SIZES)]
    made, y = x.new_empty(rows * (places + 1 + width)), x.new_empty(rows, blocks * BLOCK)
    alone = _few(blocks * BLOCK * width) or torch.get_num_threads() == 1
    task, kept = (rows, x.data_ptr(), made.data_ptr(), y.data_ptr()), (addressed, x, made, y)
    if not alone:
        in_threads(_kernels().product, (*addressed.numbers, 1, *task), 0, alone=True)
    in_threads(_kernels().product, (*addressed.numbers, alone, *task), blocks, alone=alone, kept=kept)
    return y


def values(addressed: Addressed, firsts: Tensor, size: int) -> Tensor:
    """Return the (in, outputs) values of some outputs.

    Args:
        addressed: The codes.
        firsts: (parts,) int64 first outputs, on the CPU.
        size: Number of outputs from each of them on, within a block.
    """
    made = torch.zeros(len(addressed.codes.column_scale), len(firsts) * size, dtype=torch.float32, device="cpu")
    task = (*addressed.numbers, size, firsts.data_ptr(), made.data_ptr())
    in_threads(_kernels().values, task, len(firsts), alone=_few(made.numel()), kept=(addressed, firsts, made))
    return made


def _few(weights: int) -> bool:
    return weights < product_cpu.MIN_THREADED_WEIGHTS


@compiled(error_model="numpy")
def _column(narrow: int, shorts: Any, integers: Any, place: int) -> Any:  # pragma: no cover
    """Return the number of a column; -1 where there is none."""
    if not narrow:
        return np.int64(integers[place])
    number = np.int64(shorts[place])
    return -1 if number == NARROW else number


def _add_products(typingctx: Any, sums: Any, words: Any, factors: Any, counts: Any) -> Any:
    """Add the products of a block and a row of inputs to BLOCK sums, width after width; the first three are addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums_at, words_at, factors_at, sizes = arguments
        for n, (bits, fields) in enumerate(zip(WIDTHS, FIELDS, strict=True)):
            count = builder.extract_value(sizes, n)
            with builder.if_then(builder.icmp_signed(">", count, ir.Constant(count.type, 0))):
                add_fields(builder, bits, sums_at, words_at, factors_at, count)
            words_at = builder.add(words_at, builder.mul(count, ir.Constant(count.type, 4 * BLOCK)))
            factors_at = builder.add(factors_at, builder.mul(count, ir.Constant(count.type, 4 * fields)))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, counts), generate


add_products: Any = intrinsic(_add_products)


class _Kernels(NamedTuple):
    """Compiled functions of tasks whose numbers are `_COMMON` and what each names."""

    product: Native
    values: Native


@cache
def _kernels() -> _Kernels:
    # Numba keeps these functions on disk, and sees when a variable around them changes, but not when another file does
    outputs_of_block, subtracted_from = BLOCK, SUBTRACTED_FROM_CODES
    product_fields = fields_of(*_COMMON, "prepares", "rows", "x", "inputs", "y")
    value_fields = fields_of(*_COMMON, "size", "firsts", "values")
    product_size, value_size = len(product_fields.names or ()), len(value_fields.names or ())

    @native
    def product(task: Any) -> None:  # pragma: no cover
        """Write the products of blocks in y (rows, outputs).

        First, where `prepares` is 1, it writes what it reads of the inputs: (rows, places) inputs times scales, divided by
        the powers of two of their fields; (rows,) what sums of products begin with: less the offset of each field that
        has one; and (rows, in) inputs times scales.
        """
        numbers = carray(task, product_size).view(product_fields)[0]
        blocks, rows, width, places = numbers.blocks, numbers.rows, numbers.width, numbers.places
        made = carray(floats_at(numbers.inputs), rows * (places + 1 + width))
        factors, start = made[: rows * places].reshape(rows, places), made[rows * places : rows * (places + 1)]
        scaled = made[rows * (places + 1) :].reshape(rows, width)
        x, scale = carray(floats_at(numbers.x), (rows, width)), carray(floats_at(numbers.column_scale), width)
        all_shorts = carray(unsigned_at(numbers.columns), places)
        all_integers = carray(integers_at(numbers.columns), places)
        counts = (numbers.words_2, numbers.words_3, numbers.words_4, numbers.words_5, numbers.words_6, numbers.words_8)
        for row in range(rows if numbers.prepares else 0):
            for column in range(width):
                scaled[row, column] = x[row, column] * scale[column]
            place, less = 0, np.float32(0)
            for n in range(len(WIDTHS)):
                bits, fields = WIDTHS[n], FIELDS[n]
                offset = np.float32(0 if bits >= subtracted_from else 1 << bits - 1)
                for _ in range(counts[n]):
                    factor = np.float32(1)
                    for i in range(fields):
                        column = _column(numbers.narrow, all_shorts, all_integers, place)
                        one = scaled[row, column] if column >= 0 else np.float32(0)
                        factors[row, place] = one * factor
                        if i < fields - 1:
                            less += offset * one
                        factor *= np.float32(2.0**-bits)
                        place += 1
            start[row] = -less
        words = carray(integers_at(numbers.words), (blocks, numbers.words_of_output, outputs_of_block))
        steps = carray(floats_at(numbers.row_scale), (blocks, outputs_of_block))
        patch_start = carray(integers_at(numbers.patch_start), blocks + 1)
        outputs = carray(bytes_at(numbers.patch_outputs), numbers.patches)
        shorts = carray(unsigned_at(numbers.patch_columns), numbers.patches)
        integers = carray(integers_at(numbers.patch_columns), numbers.patches)
        short_codes = carray(shorts_at(numbers.patch_codes), numbers.patches)
        float_codes = carray(floats_at(numbers.patch_codes), numbers.patches)
        y = carray(floats_at(numbers.y), (rows, blocks * outputs_of_block))
        part = np.empty(outputs_of_block, np.float32)
        first = next_share(task)
        while first < numbers.parts:
            for block in range(first, min(first + numbers.share, numbers.parts)):
                for row in range(rows):
                    part[:] = start[row]
                    add_products(part.ctypes.data, words[block].ctypes.data, factors[row].ctypes.data, counts)
                    for patch in range(patch_start[block], patch_start[block + 1]):
                        code = np.float32(short_codes[patch]) if numbers.short else float_codes[patch]
                        part[outputs[patch]] += code * scaled[row, _column(numbers.narrow, shorts, integers, patch)]
                    for k in range(outputs_of_block):
                        y[row, block * outputs_of_block + k] = steps[block, k] * part[k]
            first = next_share(task)

    @native
    def values(task: Any) -> None:  # pragma: no cover
        """Write the values (in, outputs) of parts; they are 0 before."""
        numbers = carray(task, value_size).view(value_fields)[0]
        parts, size, width, places, blocks = numbers.parts, numbers.size, numbers.width, numbers.places, numbers.blocks
        words = carray(integers_at(numbers.words), (blocks, numbers.words_of_output, outputs_of_block))
        steps = carray(floats_at(numbers.row_scale), blocks * outputs_of_block)
        scale = carray(floats_at(numbers.column_scale), width)
        shorts, integers = carray(unsigned_at(numbers.columns), places), carray(integers_at(numbers.columns), places)
        patch_start = carray(integers_at(numbers.patch_start), blocks + 1)
        outputs = carray(bytes_at(numbers.patch_outputs), numbers.patches)
        patch_shorts = carray(unsigned_at(numbers.patch_columns), numbers.patches)
        patch_integers = carray(integers_at(numbers.patch_columns), numbers.patches)
        short_codes = carray(shorts_at(numbers.patch_codes), numbers.patches)
        float_codes = carray(floats_at(numbers.patch_codes), numbers.patches)
        counts = (numbers.words_2, numbers.words_3, numbers.words_4, numbers.words_5, numbers.words_6, numbers.words_8)
        firsts, made = carray(longs_at(numbers.firsts), parts), carray(floats_at(numbers.values), (width, parts * size))
        first = next_share(task)
        while first < parts:
            for part in range(first, min(first + numbers.share, parts)):
                output, place, j = firsts[part], 0, 0
                block, begin = output // outputs_of_block, output % outputs_of_block
                step = steps[output : output + size]
                for n in range(len(WIDTHS)):
                    bits, fields = WIDTHS[n], FIELDS[n]
                    for _ in range(counts[n]):
                        word = words[block, j, begin : begin + size]
                        for i in range(fields):
                            column = _column(numbers.narrow, shorts, integers, place)
                            place += 1
                            if column < 0:
                                continue
                            last = i == fields - 1
                            low = np.int32(bits * i)
                            mask = np.int32(-1 if last else (1 << bits) - 1)
                            half = np.int32(0 if last else 1 << bits - 1)
                            out, factor = made[column, part * size : (part + 1) * size], scale[column]
                            for k in range(size):
                                out[k] = step[k] * np.float32((word[k] >> low & mask) - half) * factor
                        j += 1
                for patch in range(patch_start[block], patch_start[block + 1]):
                    k = np.int64(outputs[patch]) - begin
                    if 0 <= k < size:
                        code = np.float32(short_codes[patch]) if numbers.short else float_codes[patch]
                        column = _column(numbers.narrow, patch_shorts, patch_integers, patch)
                        made[column, part * size + k] = code * step[k] * scale[column]
            first = next_share(task)

    return _Kernels(product, values)

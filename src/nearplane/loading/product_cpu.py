"""Products with codes in words of 32 bits on the CPU, and the values of the codes, compiled by Numba: 2, 4 or 8 bits each.

The fields of a word belong to neighbouring inputs of one output; a register holds one word of each of several outputs.
A mask leaves one field where it stands, so that as an integer it is the code times a power of two. Inputs are divided
by that power beforehand. Hence a weight costs a mask, a conversion to float32 and a multiplication, each exact but the
last. Codes count from 0 in the middle of their range; all fields but the highest, whose sign is the word's, hold the
code plus half the range.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from torch import Tensor

from nearplane.compiled import compiled
from nearplane.loading.torch_threads import Native, fields_of, floats_at, in_threads, integers_at, native, next_share

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.int32]

BLOCK = 64  # outputs whose words stand side by side
WIDTHS = (2, 4, 8)  # bits of a field
LINE = 64  # bytes that a processor reads from memory at once
SUBTRACTED_FROM_CODES = 6  # bits of a field from which `add_products` subtracts the offset from each code
AHEAD = 4096  # bytes by which words are read before they are used
MIN_THREADED_WEIGHTS = 2**18  # with fewer, one thread computes everything


def pack(codes: npt.NDArray[np.integer], bits: int, columns: npt.NDArray[np.integer]) -> Tensor:
    """Return int32 words (blocks, in / fields, BLOCK) of some columns of codes around 0; outputs are filled up to blocks.

    Args:
        codes: (out, any) integers from -2^(bits - 1) to 2^(bits - 1) - 1.
        bits: Of a field.
        columns: (in,) column of `codes` for each place, a multiple of the number of fields; -1: code 0.
    """
    words = np.zeros((-(-len(codes) // BLOCK), len(columns) * bits // 32, BLOCK), np.int32)
    _kernels(bits).pack(codes, columns.astype(np.int64), words)
    return torch.from_numpy(words)


def product(
    x: Tensor, words: Tensor, steps: Tensor, offsets: Tensor, bits: int, added_to: Tensor | None = None
) -> Tensor:
    """Return (rows, outputs) products of x with `step * code + offset`.

    All tensors are contiguous and on the CPU.

    Args:
        x: (rows, in) float32 inputs.
        words: (blocks, in / fields, BLOCK), see `pack`.
        steps: (blocks, groups, BLOCK) float32, maybe seen as int32; groups are of equal size, a multiple of the number of
            fields.
        offsets: As steps, or (blocks, 0, BLOCK) where all are 0.
        bits: Of a field.
        added_to: What the products are added to and what is returned; zeros if there is none.

    Raises:
        ValueError: Shapes do not belong together, or a tensor is not contiguous or on another device.
    """
    y = x.new_zeros(len(x), len(words) * BLOCK) if added_to is None else added_to
    shape = _shape(words, steps, offsets, bits)
    if x.shape != (len(x), shape[0] * 32 // bits) or y.shape != (len(x), len(words) * BLOCK):
        raise ValueError(f"inputs are {tuple(x.shape)} and products {tuple(y.shape)} for words {tuple(words.shape)}")
    kernels = _kernels(bits)
    inputs = torch.from_numpy(kernels.inputs(x.numpy(), shape[1]))
    _in_threads(kernels.product, (len(x), *shape), (words, inputs, steps, offsets, y), bits)
    return y


def values(words: Tensor, steps: Tensor, offsets: Tensor, bits: int) -> Tensor:
    """Return the values (in, outputs) of the codes; arguments as in `product`."""
    made = words.new_empty(words.shape[1] * (32 // bits), len(words) * BLOCK, dtype=torch.float32)
    _in_threads(_kernels(bits).values, _shape(words, steps, offsets, bits), (words, steps, offsets, made), bits)
    return made


def _shape(words: Tensor, steps: Tensor, offsets: Tensor, bits: int) -> tuple[int, int, int]:
    """Return the words of an output, the groups, and the groups with an offset.

    Raises:
        ValueError: They do not belong together.
    """
    shape = width, groups, offset_groups = words.size(1), steps.size(1), offsets.size(1)
    blocks_differ = not len(words) == len(steps) == len(offsets)
    if blocks_differ or not 0 < groups <= width or width % groups or offset_groups not in (0, groups):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (words, steps, offsets))
        raise ValueError(f"words, steps and offsets are {shapes}: they do not belong together")
    return shape


def _in_threads(work: Native, numbers: tuple[int, ...], tensors: tuple[Tensor, ...], bits: int) -> None:
    """Let threads work on blocks of words, the first of the tensors.

    Raises:
        ValueError: A tensor is on another device, its numbers have no 32 bits or do not follow each other.
    """
    for tensor in tensors:
        if not (tensor.is_cpu and tensor.is_contiguous() and tensor.itemsize == 4):
            found = f"{tensor.dtype} with strides {tensor.stride()} on {tensor.device}"
            raise ValueError(f"expected contiguous tensors of 32-bit numbers on the CPU, found {found}")
    words, addresses = tensors[0], [tensor.data_ptr() for tensor in tensors]
    alone = words.numel() * (32 // bits) < MIN_THREADED_WEIGHTS
    in_threads(work, (*numbers, *addresses), len(words), alone=alone, kept=tensors)


class _Kernels(NamedTuple):
    """Compiled functions that write words with a certain number of fields, their products and values."""

    pack: Callable[[npt.NDArray[np.integer], npt.NDArray[np.int64], Words], None]
    inputs: Callable[[Floats, int], Floats]
    product: Native
    values: Native


@cache
def _kernels(bits: int) -> _Kernels:
    """Compile the functions for fields of some bits; their loops over fields are unrolled, as the number is constant."""
    fields, last = 32 // bits, 32 // bits - 1
    half, power = np.float32(2 ** (bits - 1)), np.float32(2.0**-bits)
    masks = np.array([(1 << bits) - 1 << bits * i for i in range(fields)], np.uint32).view(np.int32)
    product_fields = fields_of("rows", "width", "groups", "offset_groups", "words", "inputs", "steps", "offsets", "y")
    value_fields = fields_of("width", "groups", "offset_groups", "words", "steps", "offsets", "values")
    product_size, value_size = len(product_fields.names or ()), len(value_fields.names or ())
    summed = np.float32(0) if bits == 8 else half  # offset of fields that is subtracted from sums

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

    @compiled(error_model="numpy")
    def inputs(x: Floats, groups: int) -> Floats:  # pragma: no cover
        """Return what `product` reads of the inputs, one after the other.

        That is (rows, words of an output, fields) inputs divided by the powers of fields, (rows, groups) sums of the
        inputs of a group, and (rows, groups) what sums of products begin with: less the offset of each field that has one.
        """
        rows, words = len(x), x.shape[1] // fields
        size = words // groups
        made = np.zeros(x.size + 2 * rows * groups, np.float32)
        factors = made[: x.size].reshape(rows, words, fields)
        sums = made[x.size : x.size + rows * groups].reshape(rows, groups)
        start = made[x.size + rows * groups :].reshape(rows, groups)
        for row in range(rows):
            for j in range(words):
                factor, group = np.float32(1), j // size
                for i in range(fields):
                    one = x[row, j * fields + i]
                    factors[row, j, i] = one * factor
                    factor *= power
                    sums[row, group] += one
                start[row, group] -= summed * one
            for group in range(groups):
                start[row, group] = -summed * sums[row, group] - start[row, group]
        return made

    @native
    def product(task: Any) -> None:  # pragma: no cover
        """Add the products of blocks to y (rows, outputs).

        The width is that of an output in words; inputs are those of the function of that name.
        """
        numbers = carray(task, product_size).view(product_fields)[0]
        blocks, rows, width = numbers.parts, numbers.rows, numbers.width
        groups, offset_groups = numbers.groups, numbers.offset_groups
        count = rows * width * fields
        inputs = carray(floats_at(numbers.inputs), count + 2 * rows * groups)
        factors = inputs[:count].reshape(rows, width, fields)
        sums = inputs[count : count + rows * groups].reshape(rows, groups)
        start = inputs[count + rows * groups :].reshape(rows, groups)
        words = carray(integers_at(numbers.words), (blocks, width, BLOCK))
        steps = carray(floats_at(numbers.steps), (blocks, groups, BLOCK))
        offsets = carray(floats_at(numbers.offsets), (blocks, offset_groups, BLOCK))
        y = carray(floats_at(numbers.y), (rows, blocks * BLOCK))
        size, part = width // groups, np.empty(BLOCK, np.float32)
        first = next_share(task)
        while first < blocks:
            for block in range(first, min(first + numbers.share, blocks)):
                for row in range(rows):
                    out = y[row, block * BLOCK : (block + 1) * BLOCK]
                    for group in range(groups):
                        part[:] = start[row, group]
                        a = group * size
                        add_products(
                            bits, part.ctypes.data, words[block, a:].ctypes.data, factors[row, a:].ctypes.data, size
                        )
                        step = steps[block, group]
                        for k in range(BLOCK):
                            out[k] += step[k] * part[k]
                        if offset_groups:
                            offset = offsets[block, group]
                            for k in range(BLOCK):
                                out[k] += offset[k] * sums[row, group]
            first = next_share(task)

    @native
    def values(task: Any) -> None:  # pragma: no cover
        """Write the values (in, outputs) of blocks; the width is that of an output in words."""
        numbers = carray(task, value_size).view(value_fields)[0]
        blocks, width, groups, offset_groups = numbers.parts, numbers.width, numbers.groups, numbers.offset_groups
        words = carray(integers_at(numbers.words), (blocks, width, BLOCK))
        steps = carray(floats_at(numbers.steps), (blocks, groups, BLOCK))
        offsets = carray(floats_at(numbers.offsets), (blocks, offset_groups, BLOCK))
        made = carray(floats_at(numbers.values), (width * fields, blocks * BLOCK))
        size = width // groups
        first = next_share(task)
        while first < blocks:
            for block in range(first, min(first + numbers.share, blocks)):
                for j in range(width):
                    word, step, factor = words[block, j], steps[block, j // size], np.float32(1)
                    for i in range(fields):
                        out = made[j * fields + i, block * BLOCK : (block + 1) * BLOCK]
                        less = half if i < last else np.float32(0)
                        for k in range(BLOCK):
                            out[k] = step[k] * (np.float32(word[k] & masks[i]) * factor - less)
                        factor *= power
                        if offset_groups:
                            offset = offsets[block, j // size]
                            for k in range(BLOCK):
                                out[k] += offset[k]
            first = next_share(task)

    return _Kernels(pack, inputs, product, values)


def add_fields(builder: Any, width: int, sums_at: Any, words_at: Any, factors_at: Any, count: Any) -> None:
    """Add products of codes to BLOCK sums, which stay in registers meanwhile: what `add_products` is compiled to.

    The last field of a word has the bits that are left: 2 beside fields of 3, 5 and 6. Offsets of 32 and 128 are
    subtracted from each code here; smaller ones are subtracted from sums, which costs less. Words are read early, as
    their way from memory takes longer than computing with them.

    Args:
        builder: Of the instructions.
        width: Bits of a field.
        sums_at, words_at, factors_at: Addresses of the sums, of the words and of the factors of a group.
        count: Number of words of an output, at least 1.
    """
    fields = -(-32 // width)
    i8, i32, i64, f32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
    integers, floats = ir.VectorType(i32, BLOCK), ir.VectorType(f32, BLOCK)

    def load(type_of: Any, address: Any) -> Any:
        loaded = builder.load(builder.inttoptr(address, type_of.as_pointer()))
        loaded.align = 4
        return loaded

    def at(address: Any, place: Any, times: int = 1) -> Any:
        return builder.add(address, builder.mul(place, ir.Constant(i64, 4 * times)))

    def repeated(number: Any) -> Any:
        nothing = ir.Constant(floats, ir.Undefined)
        first = builder.insert_element(nothing, number, ir.Constant(i32, 0))
        return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(i32, BLOCK), None))

    prefetch_type = ir.FunctionType(ir.VoidType(), [i8.as_pointer(), i32, i32, i32])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", [i8.as_pointer()], prefetch_type)
    to_read, everywhere, of_data = (ir.Constant(i32, number) for number in (0, 3, 1))
    first, before, loop = load(floats, sums_at), builder.block, builder.append_basic_block("word")
    builder.branch(loop)
    builder.position_at_end(loop)
    j, total = builder.phi(i64), builder.phi(floats)
    began, word_at, factor_at = total, at(words_at, j, BLOCK), at(factors_at, j, fields)
    for line in range(0, 4 * BLOCK, LINE):
        ahead = builder.inttoptr(builder.add(word_at, ir.Constant(i64, AHEAD + line)), i8.as_pointer())
        builder.call(prefetch, [ahead, to_read, everywhere, of_data])
    word = load(integers, word_at)
    for i in range(fields):
        mask = int(np.array([(1 << width) - 1 << width * i & 0xFFFFFFFF], np.uint32).view(np.int32)[0])
        code = builder.sitofp(builder.and_(word, ir.Constant(integers, [mask] * BLOCK)), floats)
        if width >= SUBTRACTED_FROM_CODES and i < fields - 1:
            code = builder.fsub(code, ir.Constant(floats, [2.0 ** (width * i + width - 1)] * BLOCK))
        factor = repeated(load(f32, at(factor_at, ir.Constant(i64, i))))
        total = builder.fadd(builder.fmul(code, factor, flags=("contract",)), total, flags=("contract",))
    following = builder.add(j, ir.Constant(i64, 1))
    for phi, begin, end in ((j, ir.Constant(i64, 0), following), (began, first, total)):
        phi.add_incoming(begin, before)
        phi.add_incoming(end, loop)
    done = builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    builder.store(total, builder.inttoptr(sums_at, floats.as_pointer())).align = 4


def _add_products(typingctx: Any, bits: Any, sums: Any, words: Any, factors: Any, count: Any) -> Any:
    """Compile `add_fields`; its arguments but the builder, of which `bits` is a constant."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        add_fields(builder, bits.literal_value, *arguments[1:])
        return context.get_dummy_value()

    return types.void(bits, types.intp, types.intp, types.intp, types.int64), generate


add_products: Any = intrinsic(prefer_literal=True)(_add_products)

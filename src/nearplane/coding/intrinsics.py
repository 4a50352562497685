"""Loads and stores at any address, and other machine instructions that Numba lacks, for compiled functions.

They check nothing: the caller must ensure that an address can be read or written.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _load(bits: int, align: int) -> Any:
    """Make an intrinsic that loads an unsigned number at an address, zero-extended to 64 bits."""

    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            number = builder.load(builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer()))
            number.align = align
            return builder.zext(number, ir.IntType(64)) if bits < 64 else number

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


def _trailing_zeros(typingctx: Any, value: Any) -> Any:
    """Count the trailing zero bits of an unsigned 64-bit number; 64 for 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


def _prevent_inlining(typingctx: Any) -> Any:
    """Prevent inlining of the calling function, whose inner loop would run out of registers in its callers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


load64 = _load(64, 1)
load32 = _load(32, 4)
load16 = _load(16, 2)
load8 = _load(8, 1)
store8, store64 = _store(8), _store(64)
trailing_zeros: Any = intrinsic(_trailing_zeros)
prevent_inlining: Any = intrinsic(_prevent_inlining)

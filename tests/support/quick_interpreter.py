"""Triton's interpreter without what it does again at every operation: the same results in less than half of the time.

`quicken()` replaces functions of triton.language by equal ones that remember types and shapes, and lets a call within a
kernel keep triton.language as the kernel replaced it. TRITON_INTERPRET must be set before this is imported.
"""

from dataclasses import replace
from functools import cache

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

replacing_call = InterpretedFunction.__call__
unwrapped_otherwise = core._unwrap_if_constexpr
first_np_dtype, NP_DTYPES = interpreter._get_np_dtype, {}
first_init = core.block_type.__init__
PLAIN = (int, core.tensor, bool, str, float, type(None), core.dtype, core.block_type, core.pointer_type)


def call(self, *args, **keywords):
    """Call a function within a kernel without replacing triton.language again."""
    if tl.core.is_builtin(tl.core.where):
        return replacing_call(self, *args, **keywords)
    return self.rewrite()(*args, **keywords)


def unwrapped(value):
    """Return the value of a constexpr, and the values of a tuple of them."""
    kind = type(value)
    if kind is core.constexpr:
        return value.value
    return value if kind in PLAIN else unwrapped_otherwise(value)


@cache
def shape_of(lengths):
    """Return a shape as types hold it, the number of elements, and the shape as tensors hold it."""
    numel = core.validate_block_shape(lengths)
    return core.tuple(lengths), numel, core.tuple([core.constexpr(length) for length in lengths]), core.constexpr(numel)


SCALAR = core.tuple([]), core.constexpr(1)


def init_block_type(self, element_ty, shape):
    lengths = tuple([unwrapped(length) for length in unwrapped(shape)])
    if not lengths:
        first_init(self, element_ty, shape)
    self.element_ty = element_ty
    self.shape, self.numel, *_ = shape_of(lengths)
    self.name = f"<{lengths}, {element_ty}>"


def init_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = shape_of(tuple(type.shape.values))[2:] if type.is_block() else SCALAR


def np_dtype(type):
    key = type.scalar.name  # of a pointer that of what it points to, with a prefix
    if key not in NP_DTYPES:
        NP_DTYPES[key] = first_np_dtype(type)
    return NP_DTYPES[key]


def same_block_type(self, other):
    return isinstance(other, core.block_type) and self.name == other.name


def quicken():
    """Let kernels that are interpreted from now on be so; overflows are computed and never looked at without `debug`."""
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)
    InterpretedFunction.__call__ = call
    core._unwrap_if_constexpr = unwrapped
    core.block_type.__init__ = init_block_type
    core.block_type.__eq__ = same_block_type
    core.tensor.__init__ = init_tensor
    interpreter._get_np_dtype = np_dtype

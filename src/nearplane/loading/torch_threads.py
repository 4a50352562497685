"""Compiled work that is shared by as many threads as torch takes: by torch's own threads, where they can be had.

Torch's threads keep their cores busy for some milliseconds after each operation, while they wait for the next one. A
second pool of threads would compete with them for these cores.

A task is what all threads read: int64 numbers, named by `fields_of`. The first three are the part that comes next, the number
of parts, and the number of parts in a share; then follow the arguments of the function, among them addresses of arrays.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import cfunc, types
from numba.extending import intrinsic

SHARES = 2  # shares per thread
SHARED = ("next", "parts", "share")  # fields of every task, before the arguments
pointer_to: Any = types.CPointer
Native = Callable[[int], None]  # gets the address of a task


def native(function: Callable[[Any], None]) -> Native:
    """Compile a function of a task, for calls from any thread.

    The function gets a pointer to the task. It must call `next_share` until that returns the number of parts or more.
    Numba keeps it on disk, where it does not notice if this module changes: names from here that decide how a task is
    read must be variables around the function.
    """
    signature = types.void(pointer_to(types.int64))
    try:
        made: Any = cfunc(signature, cache=True, error_model="numpy")(function)
    except RuntimeError:  # numba finds no folder that it can write: every process compiles anew
        made = cfunc(signature, error_model="numpy")(function)
    call: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(made.address)
    call.compiled = made  # lives as long
    called: Native = call
    return called


def fields_of(*arguments: str) -> np.dtype[Any]:
    """Return the names of the numbers of a task whose function has these arguments, as the type of a record."""
    return np.dtype([(name, np.int64) for name in (*SHARED, *arguments)])


def _next_share(typingctx: Any, task: Any) -> Any:
    """Return the first part of a share that no other thread takes; the number of parts or more if none is left."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        size = builder.load(builder.gep(arguments[0], [context.get_constant(types.intp, 2)]))
        return builder.atomic_rmw("add", arguments[0], size, "monotonic")

    return types.int64(task), generate


def array_at(number: Any) -> Any:
    """Make an intrinsic that turns an address into a pointer to numbers of a type, for `numba.carray`."""

    def pointer(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(pointer_to(number)))

        return pointer_to(number)(types.int64), generate

    return intrinsic(pointer)


next_share: Any = intrinsic(_next_share)
floats_at, integers_at = array_at(types.float32), array_at(types.int32)


def in_threads(work: Native, arguments: Sequence[int], count: int, *, alone: bool, kept: object = None) -> None:
    """Let threads call a function; each takes share after share, so that a busy core takes fewer.

    Args:
        work: Made by `native`.
        arguments: Numbers and addresses that follow the first three numbers of the task.
        count: Number of parts, which are independent.
        alone: Whether one thread takes all parts.
        kept: What the addresses are of; it lives as long as a thread that an interrupt leaves behind.
    """
    threads = 1 if alone else torch.get_num_threads()
    size = max(1, -(-count // (threads * (1 if threads == 1 else SHARES))))
    task = (ctypes.c_int64 * (len(SHARED) + len(arguments)))(0, count, size, *arguments)
    address = ctypes.addressof(task)
    if threads == 1:
        work(address)
    elif (parallel := _openmp()) is not None:
        parallel(work, address, threads, 0)
    else:
        others = [_pool(threads - 1).submit(_call, work, task, kept) for _ in range(threads - 1)]
        work(address)
        wait([other for other in others if not other.cancel()])


def _call(work: Native, task: Any, kept: object) -> None:
    work(ctypes.addressof(task))


@cache
def _openmp() -> Any:
    """Return the function of GNU's OpenMP, or of one compatible with it, that calls another one in several threads.

    None where torch brings no such library: outside of Linux.
    """
    parallel = getattr(ctypes.CDLL(None), "GOMP_parallel", None) if sys.platform == "linux" else None
    if parallel is not None:
        parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return parallel


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)

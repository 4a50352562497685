"""Compiled work that is shared by as many threads as torch takes: by torch's own threads, where they can be had.

After each of its operations torch's threads wait for the next one in a loop, and would take the time of others.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import torch
from numba import cfunc, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

SHARES = 2  # of a thread, if all are equally fast
FIRST = 3  # place of the first argument in a task, behind what `next_share` reads
pointer_to: Any = types.CPointer
Native = Callable[[int], None]  # gets the address of a task


def native(function: Callable[[Any], None]) -> Native:
    """Compile a function that reads its task, a pointer to int64 numbers, for calls from any thread.

    Until there are no more, it must take shares by `next_share`.
    """
    for context in (cpu_target.typing_context, cpu_target.target_context):
        context.refresh()  # which cfunc, unlike njit, does not do, so that it does not find new intrinsics
    signature = types.void(pointer_to(types.int64))
    try:
        made: Any = cfunc(signature, cache=True, error_model="numpy")(function)
    except RuntimeError:  # numba finds no folder that it can write: every process compiles anew
        made = cfunc(signature, error_model="numpy")(function)
    call: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(made.address)
    call.compiled = made  # lives as long
    called: Native = call
    return called


def _next_share(typingctx: Any, task: Any) -> Any:
    """Take the next share of a task; its first part is the number of all parts or more if there is none."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        size = builder.load(builder.gep(arguments[0], [context.get_constant(types.intp, 2)]))
        return builder.atomic_rmw("add", arguments[0], size, "monotonic")

    return types.int64(task), generate


def _array_at(number: Any) -> Any:
    """Make an intrinsic that turns an address into a pointer to numbers of a type, for `numba.carray`."""

    def pointer(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(pointer_to(number)))

        return pointer_to(number)(types.int64), generate

    return intrinsic(pointer)


next_share: Any = intrinsic(_next_share)
floats_at, integers_at = _array_at(types.float32), _array_at(types.int32)


def in_threads(work: Native, arguments: Sequence[int], count: int, *, alone: bool) -> None:
    """Let threads call a function; one takes share after share, so that a busy core gets fewer.

    Args:
        work: Made by `native`.
        arguments: Numbers and addresses of arrays from place `FIRST` of its task on.
        count: Of parts that are independent; place 1 of the task.
        alone: Whether one thread takes all parts.
    """
    threads = 1 if alone else torch.get_num_threads()
    size = max(1, -(-count // (threads * (1 if threads == 1 else SHARES))))
    task = (ctypes.c_int64 * (FIRST + len(arguments)))(0, count, size, *arguments)
    address = ctypes.addressof(task)
    if threads == 1:
        work(address)
    elif (parallel := _openmp()) is not None:
        parallel(work, address, threads, 0)
    else:
        others = [_pool(threads - 1).submit(work, address) for _ in range(threads - 1)]
        work(address)
        wait([other for other in others if not other.cancel()])


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

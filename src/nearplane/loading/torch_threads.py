"""Work that is shared by as many threads as torch takes: by torch's own threads, where they can be had.

After each of its operations torch's threads wait for the next one in a loop, and would take the time of others.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import torch

SHARES = 2  # of a thread, if all are equally fast
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def in_threads(work: Callable[[int, int], None], count: int) -> None:
    """Call `work(first, last + 1)` for shares of 0 ... count - 1.

    A thread takes one share after the other, so that a busy core gets fewer.

    Args:
        work: Compiled function that needs no lock of the interpreter.
        count: Of parts that can be worked on independently.
    """
    threads, failures = torch.get_num_threads(), list[BaseException]()
    if threads == 1:
        return work(0, count)
    size = max(1, -(-count // (threads * SHARES)))
    starts = iter(range(0, count, size))

    def take(_: object = None) -> None:
        try:
            for start in starts:
                work(start, min(start + size, count))
        except BaseException as failure:  # what calls this from OpenMP's threads would only print it
            failures.append(failure)

    if (parallel := _openmp()) is not None:
        parallel(CALLBACK(take), None, threads, 0)
    else:
        others = [_pool(threads - 1).submit(take) for _ in range(threads - 1)]
        take()
        wait([other for other in others if not other.cancel()])
    if failures:
        raise failures[0]


@cache
def _openmp() -> Any:
    """Return the function of GNU's OpenMP, or of one compatible with it, that calls another one in several threads.

    None where torch brings no such library: outside of Linux.
    """
    return getattr(ctypes.CDLL(None), "GOMP_parallel", None) if sys.platform == "linux" else None


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)

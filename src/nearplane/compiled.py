"""Compilation of functions with numba, cached on disk where a folder for it can be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(**options: Any) -> Callable[[Function], Function]:
    """Return a decorator that compiles a function on its first call, without the interpreter's lock.

    Args:
        options: Further options of `numba.njit`.
    """

    def decorate(function: Function) -> Function:
        try:
            dispatcher: Any = njit(cache=True, nogil=True, **options)(function)
        except RuntimeError:  # numba finds no folder that it can write: every process compiles anew
            dispatcher = njit(nogil=True, **options)(function)
        file = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
        if file is not None:
            # numba compares this before it reads the rest, which names classes that a newer source may not have
            file._version = f"{file._version} {file._source_stamp}"
        compiled_function: Function = dispatcher
        return compiled_function

    return decorate

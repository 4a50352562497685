"""Kernels in Triton, on a pretended GPU if one is open: the interpreter runs them, and each is counted as one launch.

Set TRITON_INTERPRET=1 before triton is imported for the first time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._pytree import tree_map_only
from triton.runtime import interpreter

import pretended_cards
from pretended import Pretend


@dataclass
class Count:
    """Launches of Triton's kernels."""

    launches: int = 0


@contextmanager
def interpreted() -> Iterator[Count]:
    """Count launches inside, on a pretended GPU also for the function of the package that asks for them.

    As on CUDA, a launch is refused where a tensor is on another device than the others.
    The interpreter replaces Triton's language again at every call of a function within a kernel. Here it does so once a
    module and launch, which takes half the time.
    """
    count, start, replace = Count(), interpreter.GridExecutor.__call__, interpreter._patch_lang
    replaced: set[int] = set()

    def launched(executor: Any, *args: Any, **kwargs: Any) -> Any:
        count.launches += 1
        devices = {each.device.type for each in (*args, *kwargs.values()) if isinstance(each, Tensor)}
        if pretended_cards.GPU is not None:
            pretended_cards.here().launches += 1
            if devices != {pretended_cards.KIND}:
                raise RuntimeError(f"{executor.fn.__name__} is launched with tensors on {devices}.")
        args, kwargs = tree_map_only(Pretend, lambda each: each.held, (args, kwargs))
        replaced.clear()
        return start(executor, *args, **kwargs)

    def replaced_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module not in replaced:
            replaced.add(module)
            return replace(function)

    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", launched),
        mock.patch.object(interpreter, "_patch_lang", replaced_once),
    ):
        yield count

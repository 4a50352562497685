"""Triton's interpreter on tensors of the pretended GPU, each launch counted; set TRITON_INTERPRET=1 before triton is imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from pretended import Gpu, Pretend, pretended
from pretended_cards import here


@contextmanager
def interpreted() -> Iterator[Gpu]:
    """Open a pretended GPU that runs kernels of Triton."""
    run = GridExecutor.__call__

    def launched(self: Any, *arguments: Any, **named: Any) -> Any:
        here().launches += 1
        devices = {each.device for each in (*arguments, *named.values()) if isinstance(each, Tensor)}
        if len(devices) != 1 or not all(device.type == "pretend" for device in devices):
            raise RuntimeError(f"{self.fn.__name__} is launched with tensors on {devices}")
        inner = [each.held if isinstance(each, Pretend) else each for each in arguments]
        return run(
            self, *inner, **{name: each.held if isinstance(each, Pretend) else each for name, each in named.items()}
        )

    with pretended() as gpu, mock.patch.object(GridExecutor, "__call__", launched):
        yield gpu

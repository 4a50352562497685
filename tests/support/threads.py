"""How many threads torch computes with, for the time of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    """Let torch, and the compiled kernels with it, use so many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

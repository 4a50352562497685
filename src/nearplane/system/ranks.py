"""The processes (ranks) of a run, and how they pass values to each other. A run of one process passes nothing.

Rank 0 leads: it decides, writes all files and speaks. The others serve it: they run the same passes on their share of the
windows, and answer its requests. `process_group.py` connects processes; verbs hand the ranks down with the `Device`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Ranks:
    """A run of one process. A run of several overrides what passes between them.

    Attributes:
        rank: Number of this process, from 0.
        world: Number of processes.
        local: Number of this process among those of its machine, from 0.
        local_world: Number of processes on its machine.
    """

    rank: int = 0
    world: int = 1
    local: int = 0
    local_world: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process decides, writes and speaks."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Return the numbers of the things that belong to this rank, of `count` that are dealt in order."""
        return self.shares(count)[self.rank]

    def shares(self, count: int) -> list[range]:
        """Return the numbers of the things that belong to each rank; see `share`."""
        return [range(rank * count // self.world, (rank + 1) * count // self.world) for rank in range(self.world)]

    @property
    def gpu(self) -> int:
        """Number of the GPU of this rank: its number on its machine, or 0 where it sees no other."""
        return 0 if torch.cuda.device_count() == 1 else self.local

    def send(self, value: Any) -> None:
        """Send a value from rank 0 to all others, which call `receive`. It must be possible to pickle it."""

    def receive(self) -> Any:
        """Return what rank 0 sends."""
        raise RuntimeError("A run of one process has nothing to receive.")

    def broadcast(self, tensor: Tensor | None) -> Tensor | None:
        """Return the tensor of rank 0 on every rank; None if it is None there. Other ranks pass anything."""
        return tensor

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks in their order, on every rank. It must be possible to pickle them."""
        return [value]

    def sum(self, integers: Tensor) -> Tensor:
        """Add up integers over all ranks in place and return them, on every rank."""
        return integers

    def start(self, request: Callable[[Any], None]) -> None:
        """Make all other ranks run `request` on what they serve; see `serve`. Only rank 0 does anything."""

    def ask(self, rank: int, request: Callable[[Any], T]) -> T:
        """Make another rank run `request` on what it serves, and return its answer."""
        raise RuntimeError("A run of one process has nobody to ask.")

    @property
    def others(self) -> range:
        """The ranks that serve this one; empty for a rank that serves."""
        return range(1, self.world) if self.leads else range(0)

    def release(self) -> None:
        """Let the other ranks leave `serve`. Only rank 0 does anything."""

    def serve(self, subject: Any) -> None:
        """Run the requests of rank 0 on `subject` until it releases this rank."""
        raise RuntimeError("A run of one process serves nobody.")


ONE_PROCESS = Ranks()


def evened(loads: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return to which rank each of some pieces goes that are dealt in their order, so that all ranks have about equal loads.

    >>> evened([4, 0], [2, 2, 2, 2])
    [0, 1, 1, 1]

    Args:
        loads: What each rank has before.
        sizes: Sizes of the pieces.
    """
    ascending, more = sorted(loads), sum(sizes)
    for count, following in enumerate([*ascending[1:], inf], 1):
        level = (sum(ascending[:count]) + more) / count  # of those ranks that get something
        if level <= following:
            break
    ends = [*accumulate(max(0.0, level - load) for load in loads)]
    middles = (end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True))
    return [min(bisect_right(ends, middle), len(loads) - 1) for middle in middles]

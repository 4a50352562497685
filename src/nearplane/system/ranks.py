"""Communication between the processes (ranks) of a run. So far a run is one process."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


class Ranks:
    """A run of one process: every method is the identity. A run of several processes overrides all of them.

    Attributes:
        rank: Number of this process, from 0.
        world: Number of processes.
    """

    rank: int = 0
    world: int = 1

    def agree(self, value: T) -> T:
        """Return a value that every rank has computed, and that must be the same on all of them."""
        return value

    def sum_exactly(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place; the result has the same bits on any number of ranks."""
        return tensor

    def broadcast(self, value: T, owner: int = 0) -> T:
        """Return the value of the rank `owner`."""
        return value

    def gather(self, values: list[T]) -> list[T]:
        """Return the concatenated values of all ranks, in their order."""
        return values


ONE_PROCESS = Ranks()

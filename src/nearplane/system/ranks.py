"""The processes that share a run, and how they agree and exchange what they have. So far a run is one process."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


class Ranks:
    """One process by itself: every method is the identity. Processes that share a run override all of this together.

    Attributes:
        rank: number of this process, from 0.
        world: how many there are.
    """

    rank: int = 0
    world: int = 1

    def agree(self, value: T) -> T:
        """Return a value that every rank must have come to itself."""
        return value

    def sum_exactly(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place, to the same bits on any number of them."""
        return tensor

    def broadcast(self, value: T, owner: int = 0) -> T:
        """Return the value of the rank `owner`."""
        return value

    def gather(self, values: list[T]) -> list[T]:
        """Return the values of all ranks, in the order of the ranks."""
        return values


ALONE = Ranks()

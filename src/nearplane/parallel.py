"""How many ranks there are and how they share work. One rank for now: everything here is then the identity."""

from __future__ import annotations

from torch import Tensor


def rank() -> int:
    """Return the number of this process among its peers."""
    return 0


def world() -> int:
    """Return how many processes share the run."""
    return 1


def sum_(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place."""
    return tensor

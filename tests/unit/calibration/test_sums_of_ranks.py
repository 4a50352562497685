"""Sums over the windows of several ranks have the bits of those of one process, however the batches are dealt."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nearplane.calibration.sums_of_ranks import add_up
from nearplane.errors import RankError
from nearplane.lattice.exact_sum import unit_of
from nearplane.lattice.moments import MomentSums, MomentTotals
from nearplane.system.ranks import Ranks

BATCHES, COLUMNS = 6, 9


class OfThreads(Ranks):
    """A rank that is a thread. Its sums arrive in an order of their own."""

    def __init__(self, rank: int, world: int, barrier: Barrier, values: list[Any]) -> None:
        self.rank, self.world, self._barrier, self._values = rank, world, barrier, values

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        found = [*self._values]
        self._barrier.wait()
        return found

    def sum(self, integers: Tensor) -> Tensor:
        assert integers.dtype == torch.int64, "of other numbers the order would count"
        found = self.gather(integers.clone())
        integers.zero_()
        for each in found[self.rank :] + found[: self.rank]:
            integers += each
        return integers


def over_ranks(sums: list[MomentSums]) -> list[MomentTotals]:
    """Add up the sums of ranks; return the totals that each has."""
    world = len(sums)
    barrier, values = Barrier(world, timeout=60), [None] * world

    def run(rank: int) -> MomentTotals:
        add_up(sums[rank], OfThreads(rank, world, barrier, values))
        return sums[rank].totals()

    with ThreadPoolExecutor(world) as pool:
        return [*pool.map(run, range(world))]


def inputs(seed: int, growth: float) -> tuple[Tensor, Tensor]:
    """Return rows (batches, tokens, in) in two networks, float32: half of the inputs are dead at first and grow."""
    X = torch.randn(2, BATCHES, 12, COLUMNS, generator=torch.Generator().manual_seed(seed))
    X[:, 0, :, ::2] = 0
    X[:, 3:, :, ::2] *= growth
    return X[0], X[1]


def add(sums: MomentSums, X_hat: Tensor, X: Tensor) -> None:
    sums.add(X_hat, X, {"o": X[:, :4] - X_hat[:, :4]})


@given(
    owners=st.lists(st.integers(0, 3), min_size=BATCHES, max_size=BATCHES),
    seed=st.integers(0, 2**31),
    growth=st.sampled_from([0.0, 1.0, 2.0**12, 2.0**19, 1e30, math.nan]),
)
def test_sums_and_refusals_are_those_of_one_process(owners: list[int], seed: int, growth: float) -> None:
    """Some ranks may have no rows, and what is not finite or too large for the integers is found on all ranks."""
    X_hat, X = inputs(seed, growth)
    unit = unit_of(X_hat[0])
    alone, ranks = MomentSums(unit=unit), [MomentSums(unit=unit) for _ in range(4)]
    for batch, owner in enumerate(owners):
        for sums in (alone, ranks[owner]):
            add(sums, X_hat[batch], X[batch])
    expected = alone.totals()
    usable = all(flag for _, *flags in expected.checks for flag in flags)
    assert usable == (growth <= 2.0**12)
    for found in over_ranks(ranks):
        assert (found.tokens, found.dtype) == (expected.tokens, torch.float32)
        assert found.checks == expected.checks
        assert torch.equal(found.alive, expected.alive)
        for a, b in ((found.H, expected.H), (found.C, expected.C), (found.lost["o"], expected.lost["o"])):
            assert torch.equal(a, b) or not usable


def test_nothing_is_added_where_no_rank_has_rows() -> None:
    for found in over_ranks([MomentSums(unit=unit_of(torch.zeros(1, 3))) for _ in range(2)]):
        assert (found.H, found.alive, found.tokens) == (None, None, 0)


def test_ranks_that_computed_other_inputs_are_refused() -> None:
    sums = [MomentSums(unit=unit_of(torch.full((1, 3), size))) for size in (1.0, 2.0)]
    with pytest.raises(RankError, match=r"Rank 0 and rank 1 computed different inputs .* one kind"):
        over_ranks(sums)

"""The batches of windows that one rank of a run passes through the network. A run of one process has them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from nearplane.system.ranks import ONE_PROCESS, Ranks, evened


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """Place of a rank's batches among all windows.

    The first batch, of one window, is on every rank: it shows what a block computes. Only rank 0 adds it to sums.

    Attributes:
        numbers: Number of each batch among the batches of all ranks.
        starts: Number of the first window of each batch.
        fitted: How many of these batches enter sums; the others hold extra windows, which enter none.
        batches: Batches of all ranks.
        most: Windows of the rank that has the most, by which all decide what fits into memory.
        windows: Calibration windows of all ranks.
        extra_windows: Extra windows of all ranks.
        sources: Number of the text in a mix of each batch of extra windows; empty for a single text.
        texts: Number of texts in a mix that have extra windows, 1 for a single text.
        ranks: The ranks that have the other batches.
    """

    numbers: Sequence[int]
    starts: Sequence[int]
    fitted: int
    batches: int
    most: int
    windows: int
    extra_windows: int = 0
    sources: Sequence[int] = ()
    texts: int = 1
    ranks: Ranks = ONE_PROCESS

    @property
    def repeated(self) -> bool:
        """Whether the first batch enters the sums of another rank."""
        return not self.ranks.leads

    @classmethod
    def of_one_process(cls, sizes: Sequence[int]) -> Dealt:
        """Return the place of the batches of one process, of so many windows each, which all enter sums."""
        *starts, windows = 0, *accumulate(sizes)
        count = len(sizes)
        return cls(numbers=range(count), starts=starts, fitted=count, batches=count, most=windows, windows=windows)

    @classmethod
    def among(cls, ranks: Ranks, fitted: Sequence[int], extra: Sequence[int], sources: Sequence[int]) -> Dealt:
        """Return the batches of a rank; each has neighbouring ones, and about as many windows as the others.

        Args:
            ranks: The ranks.
            fitted, extra: Numbers of windows in the batches of calibration and of extra windows.
            sources: Number of the text of each batch of extra windows; empty for a single text.
        """
        starts = [0, *accumulate((*fitted, *extra))]
        first = [[0, *(1 + each for each in some)] for some in ranks.shares(len(fitted) - 1)]
        owners = evened([sum(fitted[each] for each in some) for some in first], extra)
        by_rank = [
            (some, [len(fitted) + each for each, owner in enumerate(owners) if owner == rank])
            for rank, some in enumerate(first)
        ]
        calibration, more = by_rank[ranks.rank]
        return cls(
            numbers=[*calibration, *more],
            starts=[starts[each] for each in (*calibration, *more)],
            fitted=len(calibration),
            batches=len(starts) - 1,
            most=max(sum(starts[each + 1] - starts[each] for each in (*some, *others)) for some, others in by_rank),
            windows=sum(fitted),
            extra_windows=sum(extra),
            sources=[sources[each - len(fitted)] for each in more] if sources else (),
            texts=1 + max(sources, default=0),
            ranks=ranks,
        )

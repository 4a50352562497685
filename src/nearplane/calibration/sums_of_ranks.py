"""Sums over the windows of all ranks, from those of each rank over its own windows."""

from __future__ import annotations

import torch

from nearplane.errors import RankError
from nearplane.lattice.exact_sum import ExactSum
from nearplane.lattice.moments import ExtraRows, MomentSums
from nearplane.system.ranks import Ranks


def add_up(sums: MomentSums, ranks: Ranks) -> None:
    """Replace the sums of a rank by those of all ranks, some of which may have no rows. Only integers are added.

    Raises:
        RankError: The units of the ranks differ, so that the first batch, which all have, does.
    """
    assert sums.unit is not None, "every rank has the first batch"
    own = sums.named
    unit, *peaks = torch.cat([sums.unit, *(each.peak for each in own.values())]).tolist()
    forms = {
        name: (each.shape, each.span, each.batches, peak) for (name, each), peak in zip(own.items(), peaks, strict=True)
    }
    every = ranks.gather((sums.tokens, sums.dtype, unit, None if sums.alive is None else len(sums.alive), forms))
    if (other := next((rank for rank, each in enumerate(every) if each[2] != unit), None)) is not None:
        raise RankError(
            f"Rank {ranks.rank} and rank {other} computed different inputs of a layer from the same first window. All ranks need "
            f"processors or GPUs of one kind, and the same model, versions and options."
        )
    total: dict[str, ExactSum] = {}
    for name in sorted({name for each in every for name in each[4]}):
        found = [each[4][name] for each in every if name in each[4]]
        shape, span, *_ = found[0]
        total[name] = own.pop(name) if name in own else ExactSum(sums.unit, shape, span)
        batches, peak = sum(each[2] for each in found), torch.tensor([each[3] for each in found]).double().amax()
        total[name].merge_all(ranks.sum, batches, float(peak))  # NaN if one is
    sums.named = dict(
        sorted(total.items(), key=lambda each: each[0] != "H")
    )  # that of the quantized network is checked first
    if inputs := max(each[3] or 0 for each in every):
        alive = torch.zeros(inputs, dtype=torch.int64, device=sums.unit.device) if sums.alive is None else sums.alive
        sums.alive = ranks.sum(alive)
    sums.tokens = sum(each[0] for each in every)
    sums.dtype = next((each[1] for each in every if each[0]), sums.dtype)


def collect(extra: ExtraRows, ranks: Ranks, device: torch.device) -> None:
    """Replace the extra rows of a rank by those of all ranks, in the order of the windows."""
    every = ranks.gather(([x.cpu() for x in extra.X_hat], [x.cpu() for x in extra.X], extra.sizes))
    extra.X_hat = [x.to(device) for rows, _, _ in every for x in rows]
    extra.X = [x.to(device) for _, rows, _ in every for x in rows]
    extra.sizes = [sum(counts) for counts in zip(*(sizes for _, _, sizes in every), strict=True)]

"""Sums over the windows of all ranks, from those of each rank over its own windows."""

from __future__ import annotations

import torch
from torch import Tensor

from nearplane.lattice.moments import ExtraRows, MomentSums
from nearplane.system.ranks import Ranks


def add_up(sums: MomentSums, ranks: Ranks, device: torch.device) -> None:
    """Replace the sums of a rank by those of all ranks, some of which may have no rows."""
    own = _named(sums)
    forms = ranks.gather((sums.tokens, sums.dtype, {name: tuple(x.shape) for name, x in own.items()}))
    shapes = {name: shape for _, _, each in forms for name, shape in each.items()}
    total: dict[str, Tensor] = {}
    for name in sorted(shapes):
        zeros = torch.zeros(shapes[name], dtype=torch.int64 if name == "alive" else torch.float64, device=device)
        total[name] = ranks.sum(own.pop(name).to(zeros.dtype) if name in own else zeros)
    sums.H, sums.C, sums.alive = (total.pop(name, None) for name in ("H", "C", "alive"))
    sums.lost = {name.removeprefix("lost."): x for name, x in total.items()}
    sums.tokens = sum(tokens for tokens, _, _ in forms)
    sums.dtype = next((dtype for tokens, dtype, _ in forms if tokens), sums.dtype)


def collect(extra: ExtraRows, ranks: Ranks, device: torch.device) -> None:
    """Replace the extra rows of a rank by those of all ranks, in the order of the windows."""
    every = ranks.gather(([x.cpu() for x in extra.X_hat], [x.cpu() for x in extra.X], extra.sizes))
    extra.X_hat = [x.to(device) for rows, _, _ in every for x in rows]
    extra.X = [x.to(device) for _, rows, _ in every for x in rows]
    extra.sizes = [sum(counts) for counts in zip(*(sizes for _, _, sizes in every), strict=True)]


def _named(sums: MomentSums) -> dict[str, Tensor]:
    """Return all sums by name."""
    named = {"H": sums.H, "C": sums.C, "alive": sums.alive} | {f"lost.{name}": x for name, x in sums.lost.items()}
    return {name: x for name, x in named.items() if x is not None}

"""Search for the steps of blocks in torch for every device; the compiled searches are tested against it.

Steps are rounded to their storage format before any error is measured with them. The error of a group is
`sum_k h_k |e_k|^p` after rounding its weights to nearest, p = 2.5 as in `scale.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nearplane.lattice.superblock import rounded
from nearplane.number_formats import BlockFormat

RANGE_FRACTIONS = tuple(1 - 0.65 * i / 17 for i in range(18))  # candidates for the ends of a group's grid
SC_FRACTIONS = (1.0, 0.97, 0.94, 0.9, 0.86, 0.8)  # the largest step of a block is this part of the largest sc
RADIUS = 2  # integers tried on each side of the nearest one


def error_of(kind: BlockFormat, W: Tensor, h: Tensor, s: Tensor, o: Tensor) -> Tensor:
    """Return the errors of (..., g) weights with steps `s` (...) and offsets `o` (...), in float64; NaN where a step is 0."""
    s, o = s[..., None], o[..., None]
    codes = ((W + o) * (1 / s)).round_().clamp_(kind.low, kind.high)
    e = (s.double() * codes).sub_(o).sub_(W).abs_()
    return e.sqrt().mul_(e).mul_(e).mul_(h).sum(-1)


def groups_in_torch(kind: BlockFormat, W: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Return (n,) real-valued steps and (n,) offsets of the groups: the first of all candidates with the least error."""
    W = W.view(-1, *h.shape)
    ends = torch.tensor(RANGE_FRACTIONS).tolist()  # float32
    smallest, largest = W.amin(-1), W.amax(-1)  # (rows, groups of a row)
    signed = kind.single and kind.low == 0
    if not signed:
        smallest, largest = smallest.clamp(max=0), largest.clamp(min=0)
    step, offset, least = torch.zeros_like(smallest), torch.zeros_like(smallest), smallest.double().fill_(torch.inf)

    def consider(s: Tensor, o: Tensor, possible: Tensor) -> None:
        error = error_of(kind, W, h, s, o)
        better = possible & (error < least)
        for kept, each in ((step, s), (offset, o), (least, error)):
            kept.copy_(torch.where(better, each, kept))

    if kind.low < 0:
        reach = torch.maximum(-smallest, largest).double()
        for end in ends:
            for sign in (-1, 1):
                s = (sign * end * reach / -kind.low).float()
                consider(s, torch.zeros_like(s), s != 0)
        return step.flatten(), offset.flatten()
    middle = 0.5 * (smallest + largest) if signed else torch.zeros_like(smallest)
    for lower in ends:
        bottom = middle + lower * (smallest - middle)
        for upper in ends:
            s = (middle + upper * (largest - middle) - bottom) / kind.high
            consider(s, -bottom, s > 0)
    return step.flatten(), torch.where(least == torch.inf, -smallest, offset).flatten()


def blocks_in_torch(
    kind: BlockFormat, W: Tensor, h: Tensor, step: Tensor, offset: Tensor, ds: Tensor, dmins: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the stored numbers of blocks: (blocks,) `d` and `dmin`, (blocks, groups) int32 `sc` and `m`.

    First the best pair of candidates `d` and `dmin`, with the integers nearest to the steps and offsets of the groups;
    then the best integers of each group within `RADIUS`.

    Args:
        kind: Type of the blocks.
        W: (blocks, groups, g) weights.
        h: (blocks of a row, groups, g) weights of errors.
        step, offset: (blocks, groups) real-valued steps and offsets.
        ds, dmins: (blocks, candidates) candidates for `d` and `dmin`, not 0.
    """
    low, high = kind.sc
    W, weight = W.view(-1, *h.shape), h  # (rows, blocks of a row, groups, g)
    step, offset = step.view(W.shape[:3]), offset.view(W.shape[:3])
    ds, dmins = (each.view(*W.shape[:2], 1, -1) for each in (ds, dmins))

    def multiple(d: Tensor) -> Tensor:
        """Return the integers whose multiples of `d` are nearest to the steps, never 0."""
        real = step / d
        whole = real.round().clamp(low, high)
        return torch.where(whole == 0, torch.where(real < 0, -1.0 if low < 0 else 1.0, 1.0), whole)

    def share(dmin: Tensor) -> Tensor:
        """Return the integers whose multiples of `dmin` are nearest to the offsets."""
        return (offset / dmin).round().clamp(0, kind.m)

    def error(d: Tensor, sc: Tensor, dmin: Tensor, m: Tensor) -> Tensor:
        return error_of(kind, W, weight, d.double() * sc, dmin.double() * m)

    d, dmin = ds[..., 0].clone(), dmins[..., 0].clone()  # (rows, blocks of a row, 1)
    least = torch.full_like(d, torch.inf, dtype=torch.float64)
    for a in ds.unbind(-1):
        for b in dmins.unbind(-1):
            total = error(a, multiple(a), b, share(b)).sum(-1, keepdim=True)
            better = total < least
            for kept, each in ((d, a), (dmin, b), (least, total)):
                kept.copy_(torch.where(better, each, kept))
    center, near = multiple(d), share(dmin)
    sc, m, best = (
        torch.zeros_like(center),
        torch.zeros_like(center),
        torch.full_like(center, torch.inf, dtype=torch.float64),
    )
    for i in range(-RADIUS, RADIUS + 1):
        for k in range(-RADIUS, RADIUS + 1) if kind.m else (0,):
            one, other = center + i, near + k
            possible = (one != 0) & (one >= low) & (one <= high) & (other >= 0) & (other <= kind.m)
            found = error(d, one, dmin, other)
            better = possible & (found < best)
            for kept, each in ((sc, one), (m, other), (best, found)):
                kept.copy_(torch.where(better, each, kept))
    return d.flatten(), dmin.flatten(), sc.int().flatten(), m.int().flatten()


def search(
    kind: BlockFormat,
    W: Tensor,
    h: Tensor,
    storage: torch.dtype,
    *,
    search_groups: Callable[..., tuple[Tensor, Tensor]] = groups_in_torch,
    search_blocks: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = blocks_in_torch,
) -> dict[str, Tensor]:
    """Return the stored numbers of all blocks by name, as in `SuperGrid`, one after another.

    Args:
        kind: Type of the blocks.
        W: (n, g) weights of the groups, float32; the groups of a block follow each other.
        h: (groups of a row, g) weights of errors.
        storage: Dtype in which steps and offsets of blocks are stored.
        search_groups, search_blocks: The functions above, or their compiled forms.
    """
    step, offset = search_groups(kind, W, h)
    if kind.single:
        one = torch.ones_like(step, dtype=torch.int32)
        parts = {"d": rounded(step, storage), "sc": one}
        return parts | ({"dmin": offset.to(storage).float(), "m": one} if kind.m else {})
    groups = kind.columns // kind.group
    step, offset = step.view(-1, groups), offset.view(-1, groups)
    fractions = torch.tensor(SC_FRACTIONS, device=W.device)
    ds = rounded(step.abs().amax(1, keepdim=True) / (max(kind.sc) * fractions).round(), storage)  # (blocks, candidates)
    dmins = ds[:, :1].clone()
    if kind.m:
        dmins = rounded(offset.amax(1, keepdim=True) / (kind.m * fractions).round(), storage)
    inputs = W.view(-1, groups, kind.group), h.view(-1, groups, kind.group), step, offset, ds, dmins
    d, dmin, sc, m = search_blocks(kind, *inputs)
    return {"d": d, "sc": sc} | ({"dmin": dmin, "m": m} if kind.m else {})

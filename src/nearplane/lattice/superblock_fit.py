"""Steps on two levels, from the weights by search. They are rounded to what is stored before anything is measured with them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice.number_formats import BlockType
from nearplane.lattice.superblock import SuperGrid
from nearplane.lattice.superblock_search import search_blocks, search_groups

ENDS = tuple(1 - 0.65 * i / 17 for i in range(18))  # fractions of the range at which groups end
SHRUNK = (1.0, 0.97, 0.94, 0.9, 0.86, 0.8)  # of the largest integer, to which the largest step of a block is scaled
REACH = 2  # integers tried on either side of the nearest one
TINY = 2.0**-24  # the smallest number of 16-bit floating point


def fit_blocks(kind: BlockType, W: Tensor, importance: Tensor) -> SuperGrid:
    """Fit every block of `W` (out, in), in two searches: the groups' own steps and offsets, then what blocks can hold of them.

    Args:
        kind: of the blocks; it divides the columns.
        W: finite.
        importance: (in,) how much errors of a column count, not negative.

    Raises:
        NumericalError: a step or an offset is too large for 16-bit floating point.
    """
    out, columns = W.shape
    blocks, groups = columns // kind.columns, columns // kind.group
    weights = W.float().contiguous().cpu()
    spread = importance.to(weights).clamp(min=0)
    h = (spread / spread.mean().clamp(min=torch.finfo(torch.float32).tiny)).clamp(min=1e-6).view(groups, kind.group)
    step, offset = torch.zeros(2, out * groups).unbind()
    limits, ends = (float(kind.low), float(kind.high)), torch.tensor(ENDS).numpy()
    found = step.numpy(), offset.numpy()
    _shared(
        search_groups, (weights.view(-1, kind.group).numpy(), h.numpy(), *limits, ends, kind.single, *found), len(step)
    )
    if kind.single:
        one = torch.ones(len(step), dtype=torch.int32)
        parts = {"d": rounded(step), "sc": one}
        parts |= {"dmin": offset.half().float(), "m": one} if kind.m else {}
    else:
        parts = _stored(kind, weights, h, step, offset)
    if not all(bool(torch.isfinite(part).all()) for part in parts.values()):
        raise NumericalError("A step does not fit 16-bit floating point: the weights are too large for it.")
    counts = {"d": blocks, "dmin": blocks, "sc": groups, "m": groups}
    numbers: Any = {name: part.view(out, counts[name]).to(W.device) for name, part in parts.items()}
    group = torch.arange(columns, device=W.device) // kind.group
    return SuperGrid(**numbers, group=group, low=kind.low, high=kind.high)


def _stored(kind: BlockType, W: Tensor, h: Tensor, step: Tensor, offset: Tensor) -> dict[str, Tensor]:
    """Return the numbers of blocks of several groups, near the groups' own (n,) steps and offsets."""
    groups = kind.columns // kind.group
    step, offset = step.view(-1, groups), offset.view(-1, groups)
    shrunk, count = torch.tensor(SHRUNK), len(step)
    ds = rounded(step.abs().amax(1, keepdim=True) / (max(kind.sc) * shrunk).round())  # (blocks, candidates)
    dmins = rounded(offset.amax(1, keepdim=True) / (kind.m * shrunk).round()) if kind.m else ds[:, :1].clone()
    d, dmin = torch.zeros(2, count).unbind()
    sc, m = torch.zeros(2, count, groups, dtype=torch.int32).unbind()
    given = W.view(count, groups, kind.group).numpy(), h.view(-1, groups, kind.group).numpy()
    limits = float(kind.low), float(kind.high), kind.sc, kind.m, REACH
    arrays = (part.contiguous().numpy() for part in (step, offset, ds, dmins, d, dmin, sc, m))
    _shared(search_blocks, (*given, *limits, *arrays), count)
    return {"d": d, "sc": sc} | ({"dmin": dmin, "m": m} if kind.m else {})


def rounded(numbers: Tensor) -> Tensor:
    """Return numbers as 16-bit floating point holds them, in their dtype; never 0, infinite where they are too large."""
    short = numbers.half().to(numbers.dtype)
    return torch.where(short == 0, torch.where(numbers < 0, -TINY, TINY), short)


def _shared(kernel: Any, given: tuple[Any, ...], count: int) -> None:
    """Let threads share a kernel's work."""
    threads = torch.get_num_threads()
    share = -(-count // threads)
    with ThreadPoolExecutor(threads) as pool:
        for part in [pool.submit(partial(kernel, *given), a, min(a + share, count)) for a in range(0, count, share)]:
            part.result()

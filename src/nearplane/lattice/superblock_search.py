"""Search for steps on two levels from the weights, before a solve; `superblock_fit.py` refines them.

A kernel of the device searches (`kernels.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearplane.lattice.kernels import kernels_of
from nearplane.lattice.scale import refuse_infinite
from nearplane.lattice.superblock import SuperGrid
from nearplane.number_formats import BlockFormat


def fit_blocks(kind: BlockFormat, W: Tensor, importance: Tensor, storage: torch.dtype) -> SuperGrid:
    """Fit every block of `W` (out, in): search real steps and offsets of groups, then stored numbers close to them.

    Args:
        kind: Type of the blocks; its columns divide those of `W`.
        W: (out, in) finite weights.
        importance: (in,) weight of each column's errors, not negative.
        storage: Dtype in which steps and offsets of blocks are stored.

    Raises:
        NumericalError: A step or an offset is too large for this dtype.
    """
    out, columns = W.shape
    blocks, groups = columns // kind.columns, columns // kind.group
    weights = W.float().contiguous()
    spread = importance.to(weights).clamp(min=0)
    h = (spread / spread.mean().clamp(min=torch.finfo(torch.float32).tiny)).clamp(min=1e-6).view(groups, kind.group)
    parts = kernels_of(weights).blocks(kind, weights.view(-1, kind.group), h, storage)
    refuse_infinite(storage, *parts.values())
    counts = {"d": blocks, "dmin": blocks, "sc": groups, "m": groups}
    numbers: Any = {name: part.view(out, counts[name]) for name, part in parts.items()}
    group = torch.arange(columns, device=W.device) // kind.group
    return SuperGrid(**numbers, group=group, low=kind.low, high=kind.high)

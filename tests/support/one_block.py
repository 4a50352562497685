"""One block of columns as the kernels of the sweep and of the beam get it."""

from __future__ import annotations

import torch
from torch import Tensor

from nearplane.lattice.beam_cpu import beam_block
from nearplane.lattice.factor import Factor
from nearplane.lattice.grid import Weights
from strategies import Problem


def problem(b, out, *, groups=1, seed=0):
    """Targets, weights, steps, offsets, group of every column and the block's triangle, all float32."""
    g = torch.Generator().manual_seed(seed)
    target, W = torch.randn(2, b, out, generator=g)
    scale = torch.rand(groups, out, generator=g) * 0.3 + 0.1
    zero = torch.randint(0, 16, (groups, out), generator=g).float()
    group = torch.randint(0, groups, (b,), generator=g)
    U = (torch.randn(b, b, generator=g) / 8).triu(1) + torch.eye(b)
    return target, W, scale, zero, group, U


def swept(p: Problem, factor: Factor, beam: int, sweep=beam_block) -> tuple[Tensor, Tensor, Tensor]:
    """Sweep all columns as one block: chosen codes, parents and costs of the places."""
    W = p.W[:, factor.order]
    scale, zero = (part.expand(len(W), -1) for part in p.grid.columns(factor.order))
    cost = torch.full((len(W), beam), torch.inf, dtype=torch.float64)
    cost[:, 0] = 0
    d = factor.d.masked_fill(factor.dead[factor.order], 0)
    target = W[:, None].repeat(1, beam, 1)
    chosen, parent = sweep(target, Weights(W, scale, zero, p.grid.codebook), factor.U, d, cost)
    return chosen, parent, cost

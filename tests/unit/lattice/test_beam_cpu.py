"""The beam search compiled for the CPU is the algorithm of the torch form."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nearplane.lattice import kernels_torch
from nearplane.lattice.beam_cpu import beam_block
from nearplane.lattice.factor import Factor
from nearplane.lattice.grid import Weights
from strategies import ORDERS, Problem, problems
from threads import threads_of_torch


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


@given(problems(), st.sampled_from(ORDERS), st.integers(1, 9), st.integers(1, 3))
def test_both_forms_of_the_block_are_one_algorithm(p: Problem, order: str, beam: int, threads: int) -> None:
    factor = p.factor(order)
    plain = swept(p, factor, beam, kernels_torch.beam_block)
    with threads_of_torch(threads):
        compiled = swept(p, factor, beam)
    for one, other in zip(compiled, plain, strict=True):
        assert torch.equal(one, other)

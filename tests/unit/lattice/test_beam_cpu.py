"""The beam search compiled for the CPU is the algorithm of the torch form."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from nearplane.lattice import kernels_torch
from one_block import swept
from strategies import ORDERS, Problem, problems
from threads import threads_of_torch


@given(problems(), st.sampled_from(ORDERS), st.integers(1, 9), st.integers(1, 3))
def test_both_forms_of_the_block_are_one_algorithm(p: Problem, order: str, beam: int, threads: int) -> None:
    factor = p.factor(order)
    plain = swept(p, factor, beam, kernels_torch.beam_block)
    with threads_of_torch(threads):
        compiled = swept(p, factor, beam)
    for one, other in zip(compiled, plain, strict=True):
        assert torch.equal(one, other)

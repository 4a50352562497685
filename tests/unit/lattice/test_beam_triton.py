"""The beam in Triton, run by its interpreter on the CPU, and the launches of an attempt on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nearplane.lattice import beam_cpu, kernels
from nearplane.lattice.beam import k_best
from nearplane.lattice.factor import Factor
from nearplane.lattice.grid import Grid, Weights
from nearplane.lattice.kernels_torch import BEAM_BYTES
from pretended import Pretend, pretended
from pretended_cards import KIND, here
from triton_processes import DAILY, NIGHTLY, problems, triton_runs_here

WIDTH, BEAM = 4096, 8  # columns and rows of the layer in the test of launches, and its candidates


def check(counts: dict[str, int]) -> None:
    """Compare the results of random problems with the arithmetic that the torch form states."""
    found = problems("beam_problems", counts)
    assert {each["beam"] for each in found} == {1, 2, 3, 4}
    for each in found:
        assert each["wrong_values"] == each["unexcused"] == each["missing"] == each["targets_written"] == 0, each
        assert each["loss"] <= 1e-6, each
    assert sum(each["excused"] for each in found) < 0.1 * sum(each["rows"] for each in found)


@triton_runs_here
def test_interpreted_beams_keep_the_survivors_of_the_torch_form() -> None:
    """Other rows have a cost within 1e-5 of another one, or a target within 1e-5 of a step of a boundary."""
    check(DAILY)


@triton_runs_here
@pytest.mark.nightly
def test_interpreted_beams_keep_the_survivors_of_the_torch_form_in_many_problems() -> None:
    check(NIGHTLY)


def one_launch(target: Tensor, weights: Weights, *arrays: Tensor) -> tuple[Tensor, ...]:
    """Stand for the kernel of CUDA on the pretended GPU: one launch, computed by the kernel of the CPU."""
    here().launches += 1
    *parts, codebook = weights
    held = [array.held for array in (target, *parts, *arrays) if isinstance(array, Pretend)]
    found = beam_cpu.beam_paths(held[0], Weights(*held[1:4], codebook), *held[4:])
    return tuple(Pretend(part, 0) for part in found)


@triton_runs_here
def test_an_attempt_on_4096_columns_takes_at_most_400_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have no launches of their own: here they are few, in as many parts as 4,096 rows would be."""
    made = replace(kernels.KERNELS["cuda"](), beam=one_launch)
    monkeypatch.setitem(kernels.KERNELS, KIND, lambda: made)
    rows = 8
    with pretended() as gpu:
        U = torch.eye(WIDTH, dtype=torch.float64)
        U.diagonal(1).fill_(0.4)
        d, dead = torch.ones(WIDTH, dtype=torch.float64), torch.zeros(WIDTH, dtype=torch.bool)
        order = torch.arange(WIDTH)
        held = Factor(order=order, U=U, d=d, damp=0.0, shift=0.0, dead=dead)
        there = {name: Pretend(getattr(held, name), 0) for name in ("order", "U", "d", "dead")}
        scale = torch.ones(1, 1)
        grid = Grid(scale=scale, zero=0 * scale, group=0 * order, low=-8, high=7)
        W = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))
        found = k_best(Pretend(W, 0), grid.to("pretend:0"), replace(held, **there), memory=BEAM_BYTES * rows // WIDTH)
        launches = gpu.total.launches
    assert torch.equal(found.codes.held, k_best(W, grid, held, block=made.beam_block).codes)
    assert launches == 289

"""Steps that are multiples of a block's number: of every block, before and after the fit, which loses nothing."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from nearplane.lattice.polish import descend
from nearplane.lattice.scale import Steps
from nearplane.lattice.solvers import round_to_nearest
from nearplane.lattice.superblock import SuperGrid
from nearplane.lattice.superblock_fit import MultiplesFit, multiples
from nearplane.number_formats import TYPES

KIND = TYPES["iq4_xs"]


@given(st.integers(0, 1 << 30), st.sampled_from((1.0, 2.0**-12, 2.0**12)))
def test_steps_stay_multiples_and_the_fit_loses_nothing(seed: int, size: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    W = size * torch.randn(3, 512, generator=draw) * (1 + 5 * torch.rand(3, 512, generator=draw))
    W[:, 32:64] /= 100  # its step is far below the others
    X = torch.randn(600, 512, generator=draw)
    H = X.T @ X / len(X) + 0.01 * torch.eye(512)
    grid, fit_of = multiples(W, torch.ones(512), Steps(format=KIND, search="mse", storage=torch.float32))
    matrix = round_to_nearest(W, grid)
    fitted, _ = descend(W, matrix, H, sweeps=2, fit=fit_of(grid))
    assert isinstance(fit_of(grid), MultiplesFit)
    losses = []
    for each in (matrix, fitted):
        found = each.grid
        assert isinstance(found, SuperGrid)
        assert torch.equal(found.d, found.d.half().float())
        assert torch.equal(found.d, grid.d)
        assert found.sc.dtype == torch.int32
        assert int(found.sc.min()) >= 1
        assert int(found.sc.max()) <= KIND.sc[1]
        E = (W - each.decode()).double()
        losses.append(float(((E @ H.double()) * E).sum()))
    assert losses[1] < losses[0]

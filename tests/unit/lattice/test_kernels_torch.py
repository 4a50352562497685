"""What the torch forms add up is what the compiled ones do."""

import pytest
import torch

from nearplane.lattice.grid import Codebook
from nearplane.lattice.kernels_cpu import STRIP_ROWS, sweep_block
from nearplane.lattice.kernels_torch import Columns, Tally
from nearplane.lattice.kernels_torch import sweep_block as sweep_block_torch
from one_block import problem
from threads import threads_of_torch


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("limits", [(-3, 4), (None, None), (0, None)], ids=str)
def test_what_is_added_up_is_what_the_torch_form_adds_up(limits, moves):
    """Losses, or what moves changed of them, and targets beyond the limits; to sums that are begun."""
    target, W, scale, zero, group, U = problem(40, 2 * STRIP_ROWS + 5, groups=3)
    columns = Columns(W, scale, zero, group, Codebook(low=limits[0], high=limits[1]))
    d, found = torch.rand(40, generator=torch.Generator().manual_seed(1)) + 0.5, []
    for sweep, threads in ((sweep_block, 1), (sweep_block, 3), (sweep_block_torch, 1)):
        loss, outside = torch.full((len(W.T),), 2.0), torch.full((len(W.T),), 7, dtype=torch.int32)
        codes, E = torch.empty(W.shape, dtype=torch.int32), torch.empty_like(W)
        with threads_of_torch(threads):
            sweep(target, columns, U, codes, E, Tally(d, loss, outside, moves))
        found.append((codes, loss, outside))
    (codes, loss, outside), threaded, reference = found
    assert all(torch.equal(a, b) for a, b in zip((codes, loss, outside), threaded, strict=True))
    same_codes = (codes == reference[0]).all(0)
    assert float(same_codes.double().mean()) > 0.98
    torch.testing.assert_close(loss[same_codes], reference[1][same_codes], rtol=1e-3, atol=1e-3)
    assert torch.equal(outside[same_codes], reference[2][same_codes])
    assert bool((outside > 7).any()) == (limits != (None, None))

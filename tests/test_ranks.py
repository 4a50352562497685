"""On one process everything that ranks do is the identity."""

import torch

from nearplane.system.ranks import ALONE


def test_one_process_by_itself_changes_nothing():
    tensor = torch.arange(3.0)
    assert ALONE.world == 1
    assert ALONE.sum_exactly(tensor) is tensor

"""On one process everything that ranks do is the identity."""

import torch

from nearplane.system.ranks import ALONE


def test_one_process_by_itself_changes_nothing():
    tensor = torch.arange(3.0)
    assert (ALONE.rank, ALONE.world) == (0, 1)
    assert ALONE.sum_exactly(tensor) is tensor
    assert ALONE.agree("value") == ALONE.broadcast("value") == "value"
    assert ALONE.gather([1, 2]) == [1, 2]

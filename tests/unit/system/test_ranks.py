"""On one process everything that ranks do is the identity."""

import torch

from nearplane.system.ranks import ONE_PROCESS


def test_one_process_by_itself_changes_nothing():
    tensor = torch.arange(3.0)
    assert (ONE_PROCESS.rank, ONE_PROCESS.world) == (0, 1)
    assert ONE_PROCESS.sum_exactly(tensor) is tensor
    assert ONE_PROCESS.agree("value") == ONE_PROCESS.broadcast("value") == "value"
    assert ONE_PROCESS.gather([1, 2]) == [1, 2]

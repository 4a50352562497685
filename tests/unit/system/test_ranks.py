"""On one process everything that passes between ranks is the identity, and nobody is asked."""

import pytest
import torch

from nearplane.system.ranks import ONE_PROCESS, Ranks


def test_one_process_by_itself_changes_nothing():
    tensor = torch.arange(3)
    assert (ONE_PROCESS.rank, ONE_PROCESS.world, ONE_PROCESS.leads) == (0, 1, True)
    assert ONE_PROCESS.sum(tensor) is tensor
    assert ONE_PROCESS.broadcast(tensor) is tensor
    assert ONE_PROCESS.gather("value") == ["value"]
    assert ONE_PROCESS.share(5) == range(5)
    assert [*ONE_PROCESS.others] == []
    for alone in (ONE_PROCESS.receive, lambda: ONE_PROCESS.serve(None), lambda: ONE_PROCESS.ask(1, repr)):
        with pytest.raises(RuntimeError, match="one process"):
            alone()


def test_what_is_dealt_makes_up_all():
    for world in range(1, 6):
        ranks = Ranks()
        ranks.world = world
        for count in range(12):
            shares = ranks.shares(count)
            assert [each for share in shares for each in share] == [*range(count)]
            assert max(map(len, shares)) - min(map(len, shares)) <= 1

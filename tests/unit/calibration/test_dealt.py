"""How batches of windows are dealt to ranks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from nearplane.calibration.dealt import Dealt
from nearplane.calibration.windows import Windows
from nearplane.system.ranks import Ranks


class Rank(Ranks):
    def __init__(self, rank, world):
        self.rank, self.world = rank, world


@given(st.integers(1, 40), st.integers(0, 9), st.integers(1, 8), st.integers(1, 5))
def test_every_batch_enters_the_sums_of_one_rank(count, extra, size, world):
    tokens = torch.arange(count + extra)[:, None]
    windows = Windows(seqlen=1, fitted=tokens[:count], extra=tokens[count:] if extra else None)
    alone, whole = windows.dealt(size, Ranks())
    assert [int(x) for batch in alone for x in batch] == [*range(count + extra)]
    summed, seen, run, most = [], [], [], set()
    for rank in range(world):
        batches, dealt = windows.dealt(size, Rank(rank, world))
        assert len(batches) == len(dealt.numbers) == len(dealt.starts)
        run.append(sum(map(len, batches)))
        most.add(dealt.most)
        assert (dealt.windows, dealt.extra_windows, dealt.batches) == (count, extra, whole.batches)
        for place, (batch, number, start) in enumerate(zip(batches, dealt.numbers, dealt.starts, strict=True)):
            assert torch.equal(batch, alone[number])
            assert int(batch[0]) == start
            if place or not dealt.repeated:
                (summed if place < dealt.fitted else seen).append(number)
    assert sorted(summed + seen) == [*range(whole.batches)]
    assert seen == sorted(seen), "extra windows come in their order"
    assert len(summed) == whole.fitted
    assert most == {max(run)}, "all ranks decide by the same number"


def test_a_stream_of_one_process_has_all_batches():
    dealt = Dealt.of_one_process([1, 4, 2])
    assert [*dealt.numbers] == [0, 1, 2]
    assert [*dealt.starts] == [0, 1, 5]
    assert (dealt.fitted, dealt.windows, dealt.repeated) == (3, 7, False)

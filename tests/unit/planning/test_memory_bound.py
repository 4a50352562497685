"""The bound counts what lives, settings spare memory in a fixed order, and the first that fits is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nearplane.calibration.activations import Dealt
from nearplane.calibration.one_forward import MemorySetting
from nearplane.calibration.windows import extra_batch
from nearplane.planning.memory_bound import ALLOCATOR_FACTOR, Bound, bound, waits
from nearplane.planning.memory_limits import choose, settings
from nearplane.planning.parts import Extent
from nearplane.planning.shapes import Blocks, Group, Shapes, multiplications
from nearplane.system.device import Device
from nearplane.system.ranks import Ranks

MB = 1 << 20
GROUPS = (
    Group(layers=((512, 512),) * 3, alive=4 * MB, held=4 * MB),
    Group(layers=((512, 512),), alive=6 * MB, held=6 * MB, lost=((512, 512),)),
    Group(layers=((1024, 512),) * 2, alive=5 * MB, held=5 * MB),
    Group(layers=((512, 1024),), alive=9 * MB, held=9 * MB, lost=((512, 1024),)),
)
SHAPES = Shapes(
    blocks=(Blocks(count=4, weights=2_500_000, groups=GROUPS),),
    windows=30, extra=2, seqlen=512, hidden=512, vocabulary=1000, embeddings=512_000, ends=2_048_000, descents=4,
)  # fmt: skip
FREE = MemorySetting(batch=4, room=1 << 40, device=Device(torch.device("cpu")))


def test_what_waits_is_two_networks_at_a_stage_and_one_with_the_outputs_of_the_other_at_the_last() -> None:
    held, state = waits(SHAPES, SHAPES.blocks[0], FREE), SHAPES.state
    assert held == [32 * max(2 * state, 8 * MB), 32 * 12 * MB, 32 * 12 * MB, 32 * max(10 * MB, 9 * MB + state)]
    assert waits(SHAPES, SHAPES.blocks[0], replace(FREE, room=32 * 8 * MB)) == held[:1]
    assert waits(SHAPES, replace(SHAPES.blocks[0], pauses=False), FREE) == []


def test_the_bound_does_not_grow_with_depth_and_the_multiplications_do() -> None:
    deep = replace(SHAPES, blocks=(replace(SHAPES.blocks[0], count=40),))
    assert bound(deep, FREE, 100 * MB) == bound(SHAPES, FREE, 100 * MB)
    assert multiplications(deep) == pytest.approx(10 * multiplications(SHAPES))


def test_searching_steps_takes_time_for_each_weight_however_wide_its_layer_is() -> None:
    weights = sum(out * columns for group in GROUPS for out, columns in group.layers)
    searched = replace(SHAPES, searched=1000.0)
    assert multiplications(searched) - multiplications(SHAPES) == pytest.approx(4 * 1000 * weights)


def test_the_slack_is_over_what_is_resident_and_what_lives() -> None:
    with_libraries, without = bound(SHAPES, FREE, 500 * MB), bound(SHAPES, FREE, 0)
    assert with_libraries.bytes - without.bytes == pytest.approx(ALLOCATOR_FACTOR * 500 * MB, abs=1)
    waiting = max(waits(SHAPES, SHAPES.blocks[0], FREE))
    assert without.bytes > ALLOCATOR_FACTOR * (waiting + 2 * 4 * SHAPES.blocks[0].weights)


@pytest.mark.parametrize(
    "more",
    [
        {"windows": 60},
        {"seqlen": 1024, "hidden": 2048},
        {"beam": 64},
        {"vocabulary": 10**6, "backward": 4096},
        {"choosing": Extent(seen=10**5, batch=4096, scored=4096, points=3)},
        {"choosing": Extent(seen=10**4, batch=4096, scored=4096, points=3, compared=10**6)},
    ],
    ids=lambda more: " ".join(more),
)
def test_the_bound_grows_with_what_a_run_has_to_hold(more: dict[str, object]) -> None:
    least = replace(FREE, room=0)
    assert bound(replace(SHAPES, **more), least, 0).bytes > bound(SHAPES, least, 0).bytes


def test_inputs_of_experts_are_kept_for_as_many_as_fit() -> None:
    experts = replace(GROUPS[2], experts=8, routed=(16 * MB, 32 * MB))
    kind = replace(SHAPES.blocks[0], groups=(*GROUPS[:2], experts), pauses=False)
    shapes = replace(SHAPES, blocks=(kind,))
    rooms = [bound(shapes, replace(FREE, room=room), 0).bytes for room in (0, 512 * MB, 1024 * MB)]
    assert rooms == sorted(rooms)
    assert rooms[0] < rooms[-1]


def test_memory_is_spared_by_passes_then_on_disk_then_by_fewer_windows() -> None:
    tried = list(settings(SHAPES, FREE, batches=True))
    rooms = [setting.room for setting in tried]
    assert tried[0] == FREE
    assert rooms == sorted(rooms, reverse=True)
    passes = next(index for index, setting in enumerate(tried) if setting.room == 0)
    assert [(each.states == "disk", each.batch) for each in tried[passes:]] == [
        (False, 4),
        (True, 4),
        (True, 2),
        (True, 1),
    ]
    assert not any(each.states == "disk" for each in tried[:passes])
    assert {each.batch for each in settings(SHAPES, FREE, batches=False)} == {4}
    bounds = [bound(SHAPES, each, 0).bytes for each in tried]
    assert bounds[-1] == min(bounds) < bounds[0] / 2


def test_the_first_that_fits_is_chosen_and_else_the_least() -> None:
    bounds = [[Bound(setting=FREE, bytes=size, while_="running a block")] for size in (9, 7, 8, 5)]
    assert choose(bounds, {"host": 8}) == (bounds[1], None)
    assert choose(bounds, {"host": 100}) == (bounds[0], None)
    assert choose(bounds, {"host": 4}) == (bounds[3], bounds[3][0])


def test_on_a_gpu_hidden_states_move_to_the_host_before_the_disk() -> None:
    gpu = replace(FREE, device=Device(torch.device("cuda")))
    tried = [each for each in settings(SHAPES, gpu, batches=False) if each.room == 0]
    assert [each.states for each in tried] == ["device", "host", "disk"]
    on_gpu, on_host = ([bound(SHAPES, each, 0, place).live for each in tried] for place in ("device", "host"))
    states = 2 * SHAPES.all_windows * SHAPES.state
    assert on_gpu[0] - on_gpu[1] > states / 2
    assert on_host[1] - on_host[0] >= states
    assert on_host[2] == on_host[0]


@given(st.integers(1, 70), st.integers(0, 30), st.integers(1, 9), st.integers(1, 6))
def test_a_rank_has_no_more_windows_than_are_counted_for_it(windows: int, extra: int, batch: int, world: int) -> None:
    """And its hidden states take the less memory the more ranks there are."""
    fitted = [1, *(min(batch, windows - a) for a in range(1, windows, batch))]
    size = extra_batch(batch)
    others = [min(size, extra - a) for a in range(0, extra, size)]
    shapes = replace(SHAPES, windows=windows, extra=extra, ranks=world)
    ranks = Ranks()
    ranks.world = world
    most = Dealt.among(ranks, fitted, others, []).most
    assert most <= shapes.most_windows(batch) <= most + 2 * batch
    assert shapes.most_windows(batch) <= replace(shapes, ranks=1).most_windows(batch) == windows + extra


def test_what_a_rank_holds_falls_with_the_number_of_ranks() -> None:
    one, four = (bound(replace(SHAPES, windows=300, ranks=ranks), FREE, 0).live for ranks in (1, 4))
    assert four < one / 2


def test_a_setting_must_keep_within_both_limits() -> None:
    pairs = [
        [Bound(setting=FREE, place=place, bytes=size, while_="running a block") for place, size in sizes.items()]
        for sizes in ({"device": 9, "host": 1}, {"device": 5, "host": 4}, {"device": 4, "host": 6})
    ]
    assert choose(pairs, {"device": 8, "host": 8}) == (pairs[1], None)
    assert choose(pairs, {"device": 4, "host": 3}) == (pairs[1], pairs[1][1])

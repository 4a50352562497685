"""How far a run is, in lines of logging: not too often, not too seldom, and always at the end."""

import logging
import subprocess
import sys

import numba
import pytest

from nearplane.errors import RecipeError, is_of_caller
from nearplane.system.progress import Tracked, _Compiling, duration, phase, say_compiling, shown, silent


def lines(caplog, seconds, **words):
    """Work off items of so many seconds each, and return the lines."""
    now = 0.0
    times = iter(seconds)

    def items():
        nonlocal now
        for _ in seconds:
            now += next(times)
            yield None

    with caplog.at_level(logging.INFO, logger="nearplane"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("nearplane.system.progress.monotonic", lambda: now)
        assert len(list(Tracked(items(), "quantizing", len(seconds), **words))) == len(seconds)
    assert {(record.name, record.levelname) for record in caplog.records} == {("nearplane.system.progress", "INFO")}
    return [record.getMessage() for record in caplog.records]


def test_every_block_has_a_line_with_the_time_left(caplog):
    assert lines(caplog, [2.0] * 6, blocks=[2, 2, 2]) == [
        "quantizing: block 1 of 3, layer 2 of 6, 4.0 s, about 8.0 s left",
        "quantizing: block 2 of 3, layer 4 of 6, 8.0 s, about 4.0 s left",
        "quantizing: block 3 of 3, layer 6 of 6, 12 s",
    ]


def test_long_blocks_have_a_line_every_30_seconds(caplog):
    said = lines(caplog, [16.0] * 7, blocks=[7])
    assert [line.split(",")[1] for line in said] == [" layer 2 of 7", " layer 4 of 7", " layer 6 of 7", " layer 7 of 7"]
    assert said[0] == "quantizing: block 1 of 1, layer 2 of 7, 32 s"  # what is left is unknown until a block is done


def test_the_first_block_does_not_count_once_another_is_done(caplog):
    said = lines(caplog, [40.0, 10.0, 10.0, 30.0], blocks=[1] * 4)
    assert [line.partition("about ")[2] for line in said] == ["2 min 0 s left", "20 s left", "10 s left", ""]


def test_the_time_left_is_that_of_the_work_left_while_a_block_runs(caplog):
    said = lines(caplog, [16.0] * 9, blocks=[3, 3, 3])
    left = [(line.split(",")[1].strip(), line.partition("about ")[2]) for line in said]
    assert left == [
        ("layer 2 of 9", ""), ("layer 3 of 9", "1 min 36 s left"), ("layer 5 of 9", "1 min 4 s left"),
        ("layer 6 of 9", "48 s left"), ("layer 8 of 9", "16 s left"), ("layer 9 of 9", ""),
    ]  # fmt: skip


def test_the_time_left_is_that_of_the_work_that_is_left(caplog):
    """A last block with ten times the work takes ten times as long, and inside a block each layer is a part of it."""
    said = lines(caplog, [10.0] * 4 + [50.0] * 2, blocks=[2, 2, 2], work=[1.0, 1.0, 5.0])
    assert [line.partition("about ")[2] for line in said] == ["2 min 0 s left", "1 min 40 s left", "50 s left", ""]
    caplog.clear()
    said = lines(caplog, [0.0, 40.0, 400.0], blocks=[1, 1, 1], work=[1.0, 1.0, 10.0], there=1)
    assert [line.partition("about ")[2] for line in said] == ["6 min 40 s left", ""]


def test_work_behind_the_last_item_counts(caplog):
    said = lines(caplog, [10.0] * 4, blocks=[1] * 4, work=[2.0] * 4, after=3.0)
    assert [line.partition("about ")[2] for line in said] == ["45 s left", "35 s left", "25 s left", ""]


def test_a_resumed_run_counts_from_where_it_began(caplog):
    said = lines(caplog, [0.0, 0.0, 40.0, 40.0], blocks=[1] * 4, there=2)
    assert said == ["quantizing: block 3 of 4, 40 s, about 40 s left", "quantizing: block 4 of 4, 1 min 20 s"]


def test_what_follows_the_last_item_is_seen():
    """The predictions of both networks are compared there, and files written."""
    tracked = Tracked(range(2), "quantizing", 2, blocks=[1, 1])
    assert [tracked.line().partition(",")[0] for _ in tracked] == ["block 1 of 2", "block 2 of 2"]
    assert tracked.line() == "block 2 of 2, 0.0 s, finishing"


def test_short_blocks_share_a_line_a_second(caplog):
    said = lines(caplog, [0.125] * 32, blocks=[2] * 16)
    assert [line.split(",")[0] for line in said] == [f"quantizing: block {number} of 16" for number in (4, 8, 12, 16)]


def test_what_is_no_block_has_a_line_every_30_seconds(caplog):
    assert [line.split(",")[0] for line in lines(caplog, [7.5] * 10)] == [
        "quantizing: 4 of 10", "quantizing: 8 of 10", "quantizing: 10 of 10",
    ]  # fmt: skip


def test_what_is_done_soon_has_no_line_where_none_is_wanted(caplog):
    with caplog.at_level(logging.INFO, logger="nearplane"):
        assert [*Tracked(range(10), "checking", 10, short=False)] == [*range(10)]
    assert caplog.messages == []
    assert [line.split(",")[0] for line in lines(caplog, [16.0] * 3, short=False)] == [
        "quantizing: 2 of 3", "quantizing: 3 of 3",
    ]  # fmt: skip


def test_items_that_are_blocks_are_called_so(caplog):
    assert lines(caplog, [40.0, 40.0], blocks=[1, 1]) == [
        "quantizing: block 1 of 2, 40 s, about 40 s left",
        "quantizing: block 2 of 2, 1 min 20 s",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.6, "1 min 0 s"), (125, "2 min 5 s"), (12_000, "3 h 20 min")],
)
def test_times_are_short(seconds, words):
    assert duration(seconds) == words


def test_the_time_in_which_kernels_are_compiled_is_no_speed_of_a_run(caplog, monkeypatch):
    """One function may be compiled for another."""
    now, compiling = 0.0, _Compiling()
    monkeypatch.setattr("nearplane.system.progress.monotonic", lambda: now)
    monkeypatch.setattr("nearplane.system.progress._compiling", compiling)

    def layers():
        nonlocal now
        for number in range(4):
            if number == 0:
                compiling.start()
                now += 20.0
                compiling.start()
                now += 5.0
                compiling.end()
                now += 5.0
                compiling.end()
            now += 10.0
            yield number

    with caplog.at_level(logging.INFO, logger="nearplane"):
        assert [*Tracked(layers(), "quantizing", 4, blocks=[1] * 4)] == [0, 1, 2, 3]
    compiled, *said = caplog.messages
    assert compiled.startswith("compiling kernels")
    assert [line.partition(", ")[2] for line in said] == [
        "40 s, about 30 s left", "50 s, about 20 s left", "1 min 0 s, about 10 s left", "1 min 10 s",
    ]  # fmt: skip


def test_compiling_is_said_once_and_only_where_it_happens(caplog):
    say_compiling()
    say_compiling()
    with caplog.at_level(logging.INFO, logger="nearplane"):
        for add in (1, 2, 3):
            assert numba.njit(lambda x, add=add: x + add)(1) == 1 + add
    assert sum("compiling kernels for this processor" in line for line in caplog.messages) <= 1
    code = (
        "import logging, numba; from nearplane.system.progress import say_compiling\n"
        "logging.basicConfig(level=logging.INFO); say_compiling(); print(numba.njit(lambda x: x + 1)(1))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "2\n"
    assert run.stderr.count("compiling kernels for this processor") == 1


@pytest.mark.parametrize(
    "display", [lambda items: [*items][1:], lambda items: [*items] * 2, lambda items: [next(items)]]
)
def test_a_display_passes_on_every_item_once(display):
    """Windows or layers that it left out were not measured, without a word."""
    with pytest.raises(RecipeError, match=r"progress passed on \d items of 'a loop', not each of them once"):
        list(shown(lambda items, label, total: display(items), [1, 2], "a loop", 2))


def test_an_error_of_the_display_is_told_from_one_of_the_work():
    def failing():
        yield 1
        raise ValueError("of the work")

    def displayed(items, label, total):
        yield from items
        raise ValueError("of the display")

    with pytest.raises(ValueError, match="of the work") as work:
        list(shown(displayed, failing(), "", 1))
    with pytest.raises(ValueError, match="of the display") as display:
        list(shown(displayed, [1], "", 1))
    assert (is_of_caller(work.value), is_of_caller(display.value)) == (False, True)


@pytest.mark.parametrize(("seconds", "said"), [(4.9, []), (12.0, ["opening the model took 12 s"])])
def test_a_long_activity_without_parts_has_a_line(seconds, said, caplog):
    """Displays see it from its start, with the time since then."""
    now, seen = 0.0, []

    def display(items, label, total):
        for item in items:
            yield item
            seen.append((label, total, items.line()))
        seen.append("ended")

    with caplog.at_level(logging.INFO, logger="nearplane"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("nearplane.system.progress.monotonic", lambda: now)
        with phase(display, "opening the model"):
            now += seconds
    assert [record.getMessage() for record in caplog.records] == said
    assert seen == [("opening the model", 1, duration(seconds)), "ended"]
    with phase(silent, "opening the model"):
        pass


def test_an_error_in_an_activity_ends_its_display():
    ended = []

    def display(items, label, total):
        try:
            yield from items
        finally:
            ended.append(label)

    with pytest.raises(ValueError, match="no"), phase(display, "opening the model"):
        raise ValueError("no")
    assert ended == ["opening the model"]

"""All parts are worked on once, by several threads; what fails in one of them is raised."""

from __future__ import annotations

from threading import Barrier, get_ident

import pytest
import torch

from nearplane.loading import torch_threads
from nearplane.loading.torch_threads import in_threads

WAIT = 30  # seconds


@pytest.fixture(params=["torch's threads", "a pool"], autouse=True)
def three_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch take three threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    if request.param == "a pool":
        monkeypatch.setattr(torch_threads, "_openmp", lambda: None)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_every_part_is_worked_on_once(count: int) -> None:
    parts: list[int] = []
    in_threads(lambda a, b: parts.extend(range(a, b)), count)
    assert sorted(parts) == list(range(count))


def test_threads_work_at_the_same_time() -> None:
    """No share ends before three have begun, each in a thread of its own."""
    meeting, seen = Barrier(3), set[int]()

    def work(a: int, b: int) -> None:
        if get_ident() not in seen:
            seen.add(get_ident())
            meeting.wait(WAIT)

    in_threads(work, 300)
    assert len(seen) == 3


def test_a_failure_is_raised_also_from_another_thread() -> None:
    meeting, main = Barrier(3), get_ident()

    def work(a: int, b: int) -> None:
        if a < 150:  # the first three of six shares
            meeting.wait(WAIT)
            if get_ident() != main:
                raise MemoryError("no room for a share")

    with pytest.raises(MemoryError, match="no room for a share"):
        in_threads(work, 300)

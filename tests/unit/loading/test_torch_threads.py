"""All parts are worked on once, by as many threads as torch takes."""

from __future__ import annotations

import ctypes
import sys
from threading import Barrier, get_ident
from typing import Any

import numpy as np
import pytest
import torch
from numba.np.numpy_support import carray

from nearplane.loading import torch_threads
from nearplane.loading.torch_threads import fields_of, in_threads, integers_at, native, next_share

OPENMP = torch_threads._openmp
THREADS = 3
WAIT = 30  # seconds
FIELDS = fields_of("times")


@pytest.fixture(params=["torch's threads", "a pool"], autouse=True)
def three_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch take three threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: THREADS)
    if request.param == "a pool":
        monkeypatch.setattr(torch_threads, "_openmp", lambda: None)


@native
def count(task: Any) -> None:  # pragma: no cover
    """Count how often every part is worked on."""
    numbers = carray(task, 4).view(FIELDS)[0]
    times = carray(integers_at(numbers.times), numbers.parts)
    first = next_share(task)
    while first < numbers.parts:
        for part in range(first, min(first + numbers.share, numbers.parts)):
            times[part] += 1
        first = next_share(task)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("parts", [0, 1, 2, 7, 100_000])
def test_every_part_is_worked_on_once(parts: int, alone: bool) -> None:
    times = np.zeros(parts, np.int32)
    in_threads(count, [times.ctypes.data], parts, alone=alone)
    assert (times == 1).all()


def test_threads_work_at_the_same_time() -> None:
    """Each waits for the two others."""
    meeting, seen = Barrier(THREADS), set[int]()

    def work(task: int) -> None:
        meeting.wait(WAIT)
        seen.add(get_ident())

    in_threads(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work), [], 100, alone=False)
    assert len(seen) == THREADS
    assert get_ident() in seen


@pytest.mark.skipif(sys.platform != "linux", reason="a pool of threads is used elsewhere")
def test_torch_brings_an_openmp_that_can_be_called() -> None:
    """Else its threads and those of a pool would take each other's time."""
    assert "OpenMP" in torch.__config__.parallel_info()
    assert OPENMP() is not None

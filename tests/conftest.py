"""Settings of hypothesis and threads, and a seeded generator. No default dtype is set and no global seed is touched."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from nearplane.system.repeatable import repeatable_products

repeatable_products()  # as the verbs do: MKL reads its mode when it first computes

settings.register_profile(
    "default", max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "nightly", max_examples=250, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
torch.set_num_threads(1)  # matrices are tiny: with more threads than free cores the tests take six times as long


pytest_plugins = ["cpu_table"]


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later garbage collection: it is a million objects, and none of them goes."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def generator() -> torch.Generator:
    """Return a generator that every test starts from the same seed."""
    return torch.Generator().manual_seed(0)

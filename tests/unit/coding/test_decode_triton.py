"""The decoder in Triton: run by its interpreter on tensors of the pretended GPU, with the CPU's as the reference."""

from __future__ import annotations

import pytest

from triton_processes import DAILY, NIGHTLY, problems, triton_runs_here

SEEN = {"pairs", "bytes", "packed bytes", "patches", "several chunks"}


def check(counts: dict[str, int]) -> None:
    """Compare what was decoded, and what was refused, with the CPU."""
    batches = problems("decode_problems", counts)
    assert set().union(*(batch["seen"] for batch in batches)) == SEEN
    assert any(batch["refused"] for batch in batches)
    for batch in batches:
        assert batch["wrong"] == 0, batch
        assert batch["refused_alike"], batch
        assert batch["decoding"] == (0 if batch["refused"] else batch["launches"]), batch


@triton_runs_here
def test_interpreted_kernels_decode_the_integers_of_the_cpu() -> None:
    """Up to three matrices of all kinds, together by one launch; damaged ones are refused by name."""
    check(DAILY)


@triton_runs_here
@pytest.mark.nightly
def test_interpreted_kernels_decode_the_integers_of_the_cpu_in_many_batches() -> None:
    check(NIGHTLY)

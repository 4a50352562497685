"""What does not end in time is stopped."""

from __future__ import annotations

import signal

import pytest

from nearplane import FormatError, RecipeError
from nearplane.formats.layer_format import matches
from nearplane.system.patterns import has_match


def test_a_match_that_does_not_end_in_time_is_stopped(monkeypatch):
    """Each letter doubles the time of this pattern: a quarter of a second for 22."""
    monkeypatch.setattr("nearplane.system.time_limit.SECONDS", 0.01)
    assert has_match("(a|a)*b", "aab")
    with pytest.raises(
        RecipeError, match=r"'\(a\|a\)\*b' cannot be tried on the name a+: it does not end within 0\.01 seconds"
    ):
        has_match("(a|a)*b", 22 * "a")
    with pytest.raises(FormatError, match="quantization_config: The regular expression"):
        matches("(a|a)*b", 22 * "a")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)

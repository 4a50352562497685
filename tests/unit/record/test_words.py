"""Sentences that the summary and the report share."""

from __future__ import annotations

import pytest

from nearplane.record.words import shortage


@pytest.mark.parametrize(
    ("windows", "samples", "tokens", "longer"),
    [(1, 1, "256", False), (1, 128, "256", True), (3, 64, "768", True)],
)
def test_too_few_tokens_are_said_with_how_many_are_enough(
    windows: int, samples: int, tokens: str, longer: bool
) -> None:
    sentence = shortage(windows, 256, samples, "down_proj", 256)
    assert sentence is not None
    assert sentence.startswith(f"{tokens} calibration tokens are {windows} for each of the 256 inputs of down_proj; ")
    assert "Use --samples 4 or more (windows of 256 tokens)." in sentence
    assert ("pass a longer text" in sentence) == longer


def test_of_enough_tokens_nothing_is_said() -> None:
    assert shortage(4, 256, 64, "down_proj", 256) is None

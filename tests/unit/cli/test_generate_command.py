"""What the command shows of two texts."""

from __future__ import annotations

import pytest

from nearplane.cli.generate_command import first_difference


@pytest.mark.parametrize(
    ("text", "other", "said"),
    [
        (" a list.", " a list.", "── both texts are the same"),
        (" a list", " a line", "── the same for 5 characters, then 'list' instead of 'line'"),
        (" a list", " a list of", "── the same for 7 characters, then 'list' instead of 'list of'"),
        ("a\x1b", "b", "── the same for 0 characters, then 'a\\x1b' instead of 'b'"),
    ],
)
def test_the_first_difference_is_shown_from_the_beginning_of_its_word(text: str, other: str, said: str) -> None:
    assert first_difference(text, other) == said

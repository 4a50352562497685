"""The grammar of mixes, and the order of their windows."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import islice, product
from pathlib import Path

import pytest

from nearplane.calibration.mix import check_shares, order_of_windows, turns
from nearplane.calibration.text_files import check_text, texts_of
from nearplane.errors import CalibrationError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.txt", {}),
        ("owner/name:config:split", {}),
        ("owner/name:2", {}),  # a config, as for every single data set
        ("a.jsonl:2,b.txt:1", {"a.jsonl": "2", "b.txt": "1"}),
        ("a.txt, b.txt", {"a.txt": "1", "b.txt": "1"}),
        ("a.txt:.5,b.txt:2.", {"a.txt": "1/2", "b.txt": "2"}),
        ("owner/name:config:split:2,a.txt", {"owner/name:config:split": "2", "a.txt": "1"}),
        ("owner/name:config:split,c4:3", {"owner/name:config:split": "1", "c4": "3"}),
        ("C:\\texts\\a.txt:2,C:\\texts\\b.txt", {"C:\\texts\\a.txt": "2", "C:\\texts\\b.txt": "1"}),
    ],
)
def test_a_number_at_the_end_of_a_part_is_its_weight(text: str, expected: dict[str, str]) -> None:
    assert {each.name: each.weight for each in texts_of(text)} == {name: Fraction(w) for name, w in expected.items()}


def test_a_path_that_exists_is_no_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt,b.txt").write_text("abc")
    assert texts_of("a.txt,b.txt") == ()


def test_a_long_text_in_place_of_its_file_is_no_mix() -> None:
    """Else the message would be about a part of it, and not that texts are passed as a list."""
    assert texts_of("Once upon a time, " * 300) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.txt:0,b.txt:1", r"the weight of a\.txt is '0'; expected a positive number"),
        ("a.txt:-1,b.txt:1", r"the weight of a\.txt is '-1'"),
        ("a.txt:x,b.txt:1", r"the weight of a\.txt is 'x'"),
        ("a.txt:nan,b.txt:1", r"the weight of a\.txt is 'nan'"),
        ("a.txt:1e9,b.txt:1", r"the weight of a\.txt is '1e9'"),
        ("a.txt:1,", "has an empty text"),
        ("a.txt:2", r"gives a weight to a single text\. Leave out :2"),
        ("c4:2", r"gives a weight to a single text\. Leave out :2"),
    ],
)
def test_what_is_wrong_with_a_mix_is_said(text: str, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        texts_of(text)


def test_a_text_that_is_twice_in_a_mix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under two names, and within a folder."""
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for name in ("a.txt", "texts/b.txt"):
        Path(name).write_text("abc")
    Path("link.txt").symlink_to("a.txt")
    check_text("a.txt,texts")
    for mix in ("a.txt:1,a.txt:2", "a.txt,./a.txt", "a.txt,link.txt", "texts:2,texts/b.txt"):
        with pytest.raises(CalibrationError, match=r"twice\. Name it once, with a larger weight"):
            check_text(mix)


def test_a_text_without_a_window_is_named() -> None:
    check_shares(texts_of("a.txt:15,b.txt:1"), 16)
    with pytest.raises(CalibrationError, match=r"b\.txt gets none of the 16 calibration windows"):
        check_shares(texts_of("a.txt:100,b.txt:1"), 16)


@pytest.mark.parametrize("weights", [*product([1, 2, 5], [1, 3], [1, 7]), (1,) * 7, (50, 1, 1, 1), (3, 1)])
def test_every_beginning_has_the_proportion_of_the_weights(weights: tuple[int, ...]) -> None:
    """After any number of windows, each text has its share, rounded up or down."""
    given: Counter[int] = Counter()
    for windows, turn in enumerate(islice(turns([*map(Fraction, weights)]), 200), 1):
        given[turn] += 1
        for text, weight in enumerate(weights):
            assert abs(given[text] - Fraction(weight * windows, sum(weights))) < 1


def test_extra_windows_are_of_every_text_and_the_order_goes_on_behind_them() -> None:
    weights = [Fraction(5), Fraction(1)]
    order = [*islice(order_of_windows(weights, 12, 4), 30)]
    plain = [*islice(turns(weights), 26)]
    assert order[:12] == plain[:12]
    assert order[12:16] == [0, 0, 0, 1]
    assert order[16:] == plain[12:]

"""Bytes in words: three digits and the unit that fits; what is printed is understood again."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearplane import RecipeError
from nearplane.system.sizes import bytes_in, check_room, size_text


@pytest.mark.parametrize(
    ("many", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.00 KB"),
        (9_994, "9.99 KB"),
        (9_996, "10.0 KB"),
        (99_960, "100 KB"),
        (412_345, "412 KB"),
        (999_499, "999 KB"),
        (999_500, "1.00 MB"),
        (1_250_000, "1.25 MB"),
        (3_104_000_000, "3.10 GB"),
        (12_345_000_000_000_000, "12,345 TB"),
    ],
)
def test_a_size_is_printed_in_three_digits_with_the_unit_that_fits(many, text):
    assert size_text(many) == text


@given(st.integers(1000, 10**14))
def test_a_size_that_is_printed_is_within_half_a_percent_when_it_is_typed_again(many):
    assert bytes_in(size_text(many)) == pytest.approx(many, rel=0.0051)


@pytest.mark.parametrize(
    ("text", "many"),
    [
        ("3.1GB", 3_100_000_000),
        ("2 MiB", 2 << 20),
        ("3kiB", 3 << 10),
        ("3 kB", 3000),
        ("350KB", 350_000),
        ("17", 17),
        ("150kb", 150_000),
        ("150 kB", 150_000),
        ("1.5gb", 1_500_000_000),
        ("2mib", 2 << 20),
        ("9 b", 9),
    ],
)
def test_a_size_is_understood_with_every_unit(text, many):
    assert bytes_in(text) == many


@pytest.mark.parametrize("text", ["", "KB", "3 apples", "-3KB", "0", "1e3", "3,5GB", "1\u212aB", "nanGB", "infinity"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(RecipeError, match="expected a number of bytes or one with a unit"):
        bytes_in(text)


def test_a_folder_that_does_not_fit_on_its_disk_is_refused(tmp_path: Path) -> None:
    """What a stopped run has written there is not needed again."""
    out = tmp_path / "new" / "out"
    needed = shutil.disk_usage(tmp_path).free + 10**12
    with pytest.raises(RecipeError, match=r"out needs about .* TB of disk space, but only .* are free there"):
        check_room(out, needed)
    assert not out.parent.exists()
    check_room(out, 1000)
    (tmp_path / "new" / "out.unfinished").mkdir(parents=True)
    with (tmp_path / "new" / "out.unfinished" / "shard").open("wb") as file:
        file.truncate(2 * 10**12)  # takes no room
    check_room(out, needed)


@pytest.mark.parametrize(("joined", "more"), [(0, 0), (7 * 10**8, 7 * 10**8), (10**12, 5 * 10**9)])
def test_the_largest_file_needs_room_twice_while_it_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined: int, more: int
) -> None:
    free = 10**10
    monkeypatch.setattr("shutil.disk_usage", lambda folder: shutil._ntuple_diskusage(free, 0, free))
    check_room(tmp_path / "out", free - more, joined=joined)
    with pytest.raises(RecipeError, match=r"needs about 10\.0 GB of disk space, but only 10\.0 GB are free"):
        check_room(tmp_path / "out", free - more + 1, joined=joined)

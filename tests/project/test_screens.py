"""Every page on a telephone, a laptop and a large screen in a real browser: no table ends beyond it, unless it scrolls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import chromium, cut_off
from nearplane.verbs.compare import ORIGINAL_METHOD, Row
from nearplane.verbs.compare_page import write_page
from nearplane.verbs.next_choices import NextChoice
from nearplane.verbs.report import write_report
from reported import GRID, saved

ROOT = Path(__file__).parents[2]
WIDTHS = (390, 1280, 1920)
SITE = ("calculator.html", "results/real-tables.html", "choosing-bits.html", "index.html")
LONG = "a/rather-long-name-of-a-model-with-its-size-and-kind-Instruct-2027"
ROWS = [
    Row(model=LONG, method=ORIGINAL_METHOD, rate=16.0, bytes=10**11, perplexity=9.0, kl=0.0, written="One two three."),
    Row(model=LONG, method="nearplane-grid", asked=4.125, rate=4.127, bytes=10**10, perplexity=9.1, kl=0.01, seconds=12345.6,
        note="groups of 64, as 576 inputs have no groups of 128", written="One two.", choices=(NextChoice("One two three."),)),
]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def test_what_is_cut_off_is_seen(browser: Any, tmp_path: Path) -> None:
    """Else the tests below could not fail."""
    table = f"<table><tr>{'<td>one_word_of_many_letters</td>' * 20}</tr></table>"
    kinds = {"scroll": "overflow-x: auto", "plain": "", "hidden": "overflow: hidden"}
    for name, style in kinds.items():
        (tmp_path / f"{name}.html").write_text(f'<!doctype html><body><div style="{style}">{table}</div>')
    found = {name: cut_off(browser, (tmp_path / f"{name}.html").as_uri(), 1280) for name in kinds}
    assert [len(each["cut"]) for each in found.values()] == [0, 1, 1]
    assert [each["wide"] for each in found.values()] == [False, True, False]


@pytest.mark.parametrize("width", WIDTHS)
def test_no_table_of_a_page_is_cut_off(browser: Any, width: int, tmp_path: Path) -> None:
    report = write_report(saved(GRID, tmp_path / "out"))
    write_page(ROWS, tmp_path / "compare.html", prompt="One")
    for page in (report, tmp_path / "compare.html"):
        found = cut_off(browser, page.as_uri(), width)
        assert found["tables"] > 0
        assert (found["cut"], found["wide"]) == ([], False), page


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SITE)
def test_no_table_of_the_site_is_cut_off(browser: Any, name: str, width: int) -> None:
    page = ROOT / "build" / "site" / name
    if not page.is_file():
        pytest.skip("the site is not built: make docs")
    found = cut_off(browser, page.as_uri(), width)
    assert found["tables"] > 0
    assert (found["cut"], found["wide"]) == ([], False)

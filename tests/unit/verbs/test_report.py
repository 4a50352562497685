"""Where a report is written, and what it never replaces."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nearplane import FormatError, RecipeError
from nearplane.record.report.page import render
from nearplane.verbs.report import write_report
from reported import CODED, GRID, saved


def test_the_page_lies_beside_the_checkpoint_and_never_in_it(tmp_path, monkeypatch):
    out = saved(GRID, tmp_path / "out")
    assert write_report(out) == tmp_path / "out-report.html"
    assert write_report(out, tmp_path / "new" / "page.html").is_file()
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "one").symlink_to(out)
    assert write_report(tmp_path / "links" / "one") == tmp_path / "links" / "one-report.html"
    monkeypatch.chdir(out)
    assert write_report(Path(".")) == tmp_path / "out-report.html"
    for page in (
        out / "page.html",
        Path("page.html"),
        out / "deep" / "page.html",
        tmp_path / "other" / ".." / "out" / "p.html",
    ):
        with pytest.raises(RecipeError, match="checkpoint"):
            write_report(out, page)
    assert [path.name for path in out.iterdir()] == ["nearplane.json"]


def test_a_file_that_is_there_is_not_overwritten_unless_asked(tmp_path):
    out = saved(GRID, tmp_path / "out")
    (tmp_path / "thesis.html").write_text("mine")
    with pytest.raises(RecipeError, match=r"thesis\.html exists already.*--overwrite"):
        write_report(out, tmp_path / "thesis.html")
    assert (tmp_path / "thesis.html").read_text() == "mine"
    assert write_report(out, tmp_path / "thesis.html", overwrite=True).read_text(encoding="utf-8") == render(GRID)


def test_the_default_page_is_replaced_if_it_is_a_report(tmp_path):
    out = saved(GRID, tmp_path / "out")
    page = write_report(out)
    assert write_report(saved(CODED, tmp_path / "out")).read_text(encoding="utf-8") == render(CODED)
    page.write_text("mine")
    with pytest.raises(RecipeError, match=r"not a report of nearplane.*--overwrite"):
        write_report(out)
    assert page.read_text() == "mine"


@pytest.mark.skipif(sys.platform != "linux", reason="sets a limit on file sizes as Linux has it")
def test_a_page_that_the_disk_has_no_room_for_is_one_sentence_and_leaves_what_was_there(tmp_path):
    out = saved(GRID, tmp_path / "out")
    page = write_report(out)
    before = page.read_bytes()
    program = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); from nearplane.cli.app import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", program, "report", out], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(rf"nearplane: {page} could not be written \(.*\)\. Free some space [^\n]*\n", result.stderr)
    assert page.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out-report.html"]


def test_only_pages_are_written(tmp_path):
    out = saved(GRID, tmp_path / "out")
    (tmp_path / "folder.html").mkdir()
    for name in ("model.safetensors", "folder.html", "page"):
        with pytest.raises(RecipeError, match="html"):
            write_report(out, tmp_path / name)
    with pytest.raises(FormatError, match=r"nearplane\.json"):
        write_report(tmp_path, tmp_path / "page.html")

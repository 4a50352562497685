"""The guide: its commands are ones that the command line accepts, and links between its pages lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearplane.cli.app import app
from nearplane.cli.quantize_command import refuse_mixed

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
GUIDE = [page for page in PAGES if page.parent != DOCS / "results"]  # commands of results have letters for many values
FENCED = re.compile(r"^( *)```.*?^\1```$", re.M | re.S)


def commands(page: Path) -> list[str]:
    """Return the commands of nearplane in the console blocks of a page, comments and continued lines resolved."""
    blocks = re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("nearplane ")]


SHOWN = [pytest.param(command, id=f"{page.stem}: {command[:60]}") for page in GUIDE for command in commands(page)]


@pytest.mark.parametrize("command", SHOWN)
def test_the_command_line_accepts_every_command_that_is_shown(command: str) -> None:
    """It is parsed, not run: neither a model nor a network is needed."""
    words = shlex.split(command.partition(" > ")[0], comments=True)[1:]
    if words[0] == "quantize":
        refuse_mixed(words[1:])
    app.parse_args(words, exit_on_error=False, print_error=False)


def test_the_quick_start_shows_every_step() -> None:
    shown = {command.split()[1] for command in commands(DOCS / "quick-start.md")}
    assert {"demo", "inspect", "quantize", "report", "verify", "evaluate", "generate", "export"} <= shown


def test_the_help_and_the_quick_start_list_the_same_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    section = (DOCS / "quick-start.md").read_text().partition("## Exit codes")[2].partition("##")[0]
    listed = {code for cell in re.findall(r"^\| ([\d, ]+) \|", section, re.M) for code in cell.split(", ")}
    assert listed == {"0", "1", "2", "3", "4", "130", "141", "143"}
    for words in (["--help"], ["verify", "--help"]):
        with pytest.raises(SystemExit):
            app(words)
        assert set(re.findall(r"\d+", capsys.readouterr().out.partition("Exit codes:")[2])) == listed


def anchors(page: Path) -> set[str]:
    """Return what links to the headings of a page end in, as GitHub makes it."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.M)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)) for heading in headings)
    return {heading.lower().replace(" ", "-") for heading in plain}


def dead_links(page: Path) -> Iterator[str]:
    """Yield the relative links of a page that lead to no file, or to no heading of a page."""
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", FENCED.sub("", page.read_text()))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, heading = link.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (heading and file.suffix == ".md" and heading not in anchors(file)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_pages_lead_to_files_and_headings(page: Path) -> None:
    dead = [*dead_links(page)]
    if not (DOCS / "results").is_dir():
        dead = [link for link in dead if "results/" not in link]
    assert dead == []


def test_the_index_lists_every_page() -> None:
    listed = set(re.findall(r"\]\(([\w-]+\.md)", (DOCS / "index.md").read_text()))
    there = {page.name for page in DOCS.glob("*.md")} - {"index.md", "results.md"}
    assert there <= listed

"""The site: what its check refuses, and the pages that are made from the code."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import nearplane
from nearplane.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]
GOOD = {
    "index.html": '<h1>One</h1><a href="two.html#part">two</a><img src="p.svg" alt="a curve that falls to zero">',
    "two.html": '<h1>Two</h1><h2 id="part">Part</h2><a href="index.html">back</a>',
}
FAULTS = {  # what is put into index.html: what is said of it
    '<a href="three.html">x</a>': "leads to no file",
    '<a href="two.html#parts">x</a>': "leads to no heading",
    '<a href="#nowhere">x</a>': "leads to no heading",
    '<i id="a"></i><i id="a"></i>': "the anchor a stands twice",
    '<img src="p.svg" alt="a picture">': "say what the picture shows",
    '<img src="p.svg">': "say what the picture shows",
    "<h1>More</h1>": "2 headings of the first level",
    '<script src="https://example.org/x.js"></script>': "loaded from another server",
    '<link rel="stylesheet" href="https://example.org/x.css">': "loaded from another server",
}


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    """Yield the modules that check the site and that make its pages."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import site_check
    import site_pages

    yield site_check, site_pages
    for name in ("site_check", "site_pages", "licences"):
        sys.modules.pop(name, None)


def faults(check: ModuleType, folder: Path, pages: dict[str, str]) -> list[str]:
    """Return the faults of a site of these pages and one picture."""
    for name, text in {**pages, "p.svg": "<svg/>"}.items():
        (folder / name).write_text(text)
    return [*check.site_faults(folder, {file: check.Page(file) for file in sorted(folder.glob("*.html"))})]


def test_a_good_site_has_no_faults(tools: tuple[ModuleType, ModuleType], tmp_path: Path) -> None:
    assert faults(tools[0], tmp_path, GOOD) == []


@pytest.mark.parametrize(("added", "said"), FAULTS.items())
def test_a_fault_is_found(tools: tuple[ModuleType, ModuleType], tmp_path: Path, added: str, said: str) -> None:
    (fault,) = faults(tools[0], tmp_path, {**GOOD, "index.html": GOOD["index.html"] + added})
    assert fault.startswith("index.html: ")
    assert said in fault


def test_a_page_that_the_index_does_not_lead_to_is_found(tools: tuple[ModuleType, ModuleType], tmp_path: Path) -> None:
    (fault,) = faults(tools[0], tmp_path, {**GOOD, "three.html": "<h1>Three</h1>"})
    assert fault.startswith("three.html: not in the list of pages")


def test_pages_made_from_the_code_have_every_command_name_and_page(
    tools: tuple[ModuleType, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "docs"
    monkeypatch.setattr(sys, "argv", ["site_pages.py", str(out)])
    tools[1].main()
    commands, api, licences, llms = (
        (out / name).read_text() for name in ("commands.md", "api.md", "licences.md", "llms.txt")
    )
    assert all(f"\n## nearplane {each.__name__}\n" in commands for each in COMMANDS)
    assert all(f"\n### {name}\n" in api for name in nearplane.__all__)
    assert "\n| torch | " in licences
    nav = str(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])
    pages = [page.relative_to(out).as_posix() for page in out.rglob("*.md")]
    assert [page for page in pages if repr(page) not in nav or page.replace(".md", ".html") not in llms] == []


def test_a_signature_is_shown_as_it_is_typed(tools: tuple[ModuleType, ModuleType]) -> None:
    def short(a: int, *, b: str = "x") -> bool: ...

    assert tools[1].signature("short", short) == "nearplane.short(a: int, *, b: str = 'x') -> bool"

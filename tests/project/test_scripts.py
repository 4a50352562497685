"""Every script of benchmarks, tools and examples is imported and says what it does."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "tools", "examples")
NAMED_FILE = re.compile(rf"`([\w/]+\.py)\b|(?<![\w/.-])((?:{'|'.join(FOLDERS)}|tests|src/nearplane)/[\w/]+\.py)\b")
OLD_VERSION = re.compile(r"```console\n(?:(?!```).)*?git checkout .*?```", re.DOTALL)
SCRIPTS = sorted(
    path.relative_to(ROOT)
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)
OTHERS = {
    "gptqmodel",
    "llmcompressor",
    "auto_round",
    "optimum",
    "llama_cpp",
    "constriction",
}  # in environments of their own


@pytest.fixture
def as_from_a_shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Leave paths, variables and modules beside the scripts as they were: all run in this process, which is much faster."""
    modules, environment = set(sys.modules), dict(os.environ)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield monkeypatch
    os.environ.clear()
    os.environ.update(environment)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(
            tuple(f"{ROOT / p.parent}/" for p in SCRIPTS)
        ):
            del sys.modules[name]


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_script_is_imported_and_says_what_it_does(
    script: Path, as_from_a_shell: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that read no arguments are imported only."""
    path = ROOT / script
    helps = "argparse" in path.read_text()
    sys.path.insert(0, str(path.parent))
    as_from_a_shell.setattr(sys, "argv", [str(path), "--help"])
    try:
        if not helps:
            runpy.run_path(str(path), run_name="imported")
            return
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(path), run_name="__main__")
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in OTHERS:
            raise
        pytest.skip(f"needs {error.name}, which is installed in an environment of its own")
    assert not end.value.code
    assert "usage:" in capsys.readouterr().out


def test_the_page_of_files_is_up_to_date(as_from_a_shell: pytest.MonkeyPatch) -> None:
    as_from_a_shell.setattr(sys, "argv", ["files_page.py", "--check"])
    runpy.run_path(str(ROOT / "tools" / "files_page.py"), run_name="__main__")


def test_the_table_of_programs_is_up_to_date(as_from_a_shell: pytest.MonkeyPatch) -> None:
    as_from_a_shell.setattr(sys, "argv", ["runtimes_page.py", "--check"])
    runpy.run_path(str(ROOT / "tools" / "runtimes_page.py"), run_name="__main__")


def test_files_that_docs_and_docstrings_name_are_there() -> None:
    """The log tells of files that were, as commands do behind a checkout; the page of files has a test of its own."""
    there = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if ".venv" not in path.parts]
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name not in ("log.md", "files.md")]
    pages += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "pyproject.toml")]
    pages += [path for folder in ("src", *FOLDERS) for path in (ROOT / folder).rglob("*.py")]
    missing = {
        f"{page.relative_to(ROOT)}: {name}"
        for page in pages
        for name in (found[1] or found[2] for found in NAMED_FILE.finditer(OLD_VERSION.sub("", page.read_text())))
        if not any(f"/{path}".endswith(f"/{name}") for path in there)
    }
    named = {("extending", "NAME"), ("extending", "NAME_request"), ("architecture", "NAME")}
    assert not missing - {f"docs/{page}.md: verbs/{name}.py" for page, name in named}

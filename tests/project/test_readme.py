"""What the documentation shows, runs."""

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import nearplane
import nearplane.demo
from checkpoints import save_part_of_the_demo
from nearplane.cli.app import COMMANDS, app

ROOT = Path(__file__).parents[2]
QUICK_START = ROOT / "docs" / "quick-start.md"
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS)
def test_python_in_the_readme_runs(code, tmp_path, monkeypatch, capsys):
    """On a part of the demo model."""
    monkeypatch.setattr(nearplane.demo, "MODEL", save_part_of_the_demo(tmp_path / "demo", neurons=128))
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert 0 < float(capsys.readouterr().out.split()[-1]) < 1


@pytest.mark.nightly
@pytest.mark.parametrize("code", BLOCKS)
def test_python_in_the_readme_runs_in_a_process_of_its_own(code, tmp_path):
    """As it stands there."""
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert 0 < float(result.stdout.split()[-1]) < 1


def test_the_example_of_one_layer_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "one_layer.py"), run_name="__main__")
    nearest, plane = (float(line.split("error")[1].split()[0]) for line in capsys.readouterr().out.splitlines()[:2])
    assert plane < nearest


def test_the_figure_of_the_demo_has_the_figures_of_its_table():
    """The figure was of an older version than the table."""
    rows = re.findall(
        r"^  .*(?:round-to-nearest|nearest-plane|k-best) .*?MB +(\S+) ", QUICK_START.read_text(), re.MULTILINE
    )
    drawn = re.findall(r"<!-- (\d\d\.\d\d) -->", (ROOT / "docs" / "demo.svg").read_text())
    assert len(rows) == 8
    assert sorted(drawn) == sorted(f"{float(perplexity):.2f}" for perplexity in rows)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140


def test_every_file_names_the_same_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    first = re.search(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert (cited["version"], str(cited["date-released"])) == first.groups()
    assert version == cited["version"]


def test_every_command_in_the_readme_exists(capsys):
    """And every flag that it shows."""
    text = (ROOT / "README.md").read_text()
    commands = [each.__name__ for each in COMMANDS]
    assert set(re.findall(rf"nearplane ({'|'.join(commands)})\b", text))
    known = "".join(help_of(words, capsys) for words in ([], *([command] for command in commands)))
    shown = set(re.findall(r"--[a-z][a-z-]+", "\n".join(re.findall(r"```console\n(.*?)```", text, re.DOTALL))))
    assert {flag for flag in shown if flag not in known} == set()


def help_of(words, capsys):
    """Return what a command says of itself."""
    app([*words, "--help"], exit_on_error=False, result_action="return_value")
    return capsys.readouterr().out

"""What the documentation shows, runs."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import nearplane
import nearplane.demo
from checkpoints import save_part_of_the_demo
from nearplane.cli.commands import COMMANDS
from nearplane.cli.quantize_command import quantize

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS)
def test_python_in_the_readme_runs(code, tmp_path, monkeypatch, capsys):
    """On a part of the demo model."""
    monkeypatch.setattr(nearplane.demo, "MODEL", save_part_of_the_demo(tmp_path / "demo", neurons=128))
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert "perplexity" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize("code", BLOCKS)
def test_python_in_the_readme_runs_in_a_process_of_its_own(code, tmp_path):
    """As it stands there."""
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "perplexity" in result.stdout


def test_the_example_of_one_layer_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "one_layer.py"), run_name="__main__")
    nearest, plane = (float(line.split("error")[1].split()[0]) for line in capsys.readouterr().out.splitlines()[:2])
    assert plane < nearest


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140


def test_every_command_in_the_readme_exists():
    """And every flag that it shows."""
    text = (ROOT / "README.md").read_text()
    commands = "|".join(each.__name__ for each in (quantize, *COMMANDS))
    help_of = {}
    for command in ("", *commands.split("|")):
        words = [sys.executable, "-m", "nearplane", *command.split(), "--help"]
        help_of[command] = subprocess.run(words, capture_output=True, text=True, check=False)
    for command in set(re.findall(rf"nearplane ({commands})\b", text)):
        assert help_of[command].returncode == 0
    shown = set(re.findall(r"--[a-z][a-z-]+", "\n".join(re.findall(r"```console\n(.*?)```", text, re.DOTALL))))
    known = "".join(run.stdout for run in help_of.values())
    assert {flag for flag in shown if flag not in known} == set()

"""What the documentation shows, runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS)
def test_python_in_the_readme_runs(code, tmp_path):
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "perplexity" in result.stdout


def test_the_example_of_one_layer_runs(tmp_path):
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "one_layer.py")], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    nearest, plane = (float(line.split("error")[1].split()[0]) for line in result.stdout.splitlines()[:2])
    assert plane < nearest


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


def test_every_command_in_the_readme_exists():
    """And every flag that it shows."""
    text = (ROOT / "README.md").read_text()
    for command in set(
        re.findall(r"nearplane (quantize|evaluate|compare|export|inspect|verify|report|geometry|demo)\b", text)
    ):
        assert (
            subprocess.run(
                [sys.executable, "-m", "nearplane", command, "--help"], capture_output=True, check=False
            ).returncode
            == 0
        )
    shown = set(re.findall(r"--[a-z][a-z-]+", "\n".join(re.findall(r"```console\n(.*?)```", text, re.DOTALL))))
    known = "".join(
        subprocess.run(
            [sys.executable, "-m", "nearplane", *c.split(), "--help"], capture_output=True, text=True, check=False
        ).stdout
        for c in ("", "quantize", "evaluate", "compare", "export", "inspect", "verify", "report", "geometry", "demo")
    )
    assert {flag for flag in shown if flag not in known} == set()

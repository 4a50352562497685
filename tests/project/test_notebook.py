"""The notebook in examples runs from its first cell to its last, and holds nothing of the machine it was written on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import nearplane.demo
from checkpoints import save_part_of_the_demo

NOTEBOOK = Path(__file__).parents[2] / "examples" / "walk_through.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def run(capsys: pytest.CaptureFixture[str]) -> str:
    """Run all cells in one namespace, and return what they print."""
    names = {"__name__": "__main__"}
    for number, code in enumerate(CODE):
        exec(compile(code, f"cell {number}", "exec"), names)
    return capsys.readouterr().out


def check(printed: str) -> None:
    """Check what the cells print: a certificate whose figures agree, less loss than rounding to nearest, and a GGUF."""
    expected, most = map(float, re.findall(r"expected (\S+), at most (\S+)$", printed, re.MULTILINE)[0])
    assert most == pytest.approx(3 * expected, rel=1e-3)
    kl = dict(re.findall(r"^(nearest|solved|tuned) +perplexity .*, KL ([\d.]+)$", printed, re.MULTILINE))
    assert float(kl["solved"]) < float(kl["nearest"])
    assert float(kl["tuned"]) < float(kl["nearest"])
    assert Path("notebook-out/gguf/model.gguf").stat().st_size > 100_000


def test_its_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a part of the demo model."""
    monkeypatch.setattr(nearplane.demo, "MODEL", save_part_of_the_demo(tmp_path / "demo", blocks=1))
    monkeypatch.chdir(tmp_path)
    check(run(capsys))


@pytest.mark.nightly
def test_its_cells_run_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    check(run(capsys))


def test_it_holds_no_output_and_is_a_notebook() -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CELLS if "outputs" in cell)
    assert len(CODE) == len([cell for cell in CELLS if "outputs" in cell])
    assert all(cell["cell_type"] in ("code", "markdown") and cell["id"] and cell["metadata"] == {} for cell in CELLS)
    assert all(line == line.rstrip() and len(line) <= 120 for code in CODE for line in code.splitlines())

"""The tables of the papers are made to their end with the models that are here, and are not made twice."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "reproduce"
TASKS = ("winogrande", "truthfulqa")


def run(script, *words):
    result = subprocess.run(
        [sys.executable, str(FOLDER / script), *map(str, words)],
        capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    return result.returncode, result.stdout, result.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("script", ["qwen3.py", "lecture.py"])
def test_every_cell_gets_a_finite_figure_once(script, tmp_path):
    """Tasks need lm-eval; without it their cells say so, and the exit code is 3."""
    asked = tuple(task for task in TASKS if script == "qwen3.py" and importlib.util.find_spec("lm_eval") is None)
    code, said, errors = run(script, "--keep", tmp_path, "--offline")
    assert code == (3 if asked else 0), errors
    _, *lines = (tmp_path / "cells.jsonl").read_text().splitlines()
    cells = [json.loads(line) for line in lines]
    assert cells
    for cell in cells:
        if cell["key"][3] in asked:
            assert "lm_eval" in cell["reason"]
        else:
            assert math.isfinite(cell["value"]), cell
    if script == "qwen3.py":
        assert len({tuple(cell["key"]) for cell in cells}) == len(cells)
        assert (tmp_path / "figure2.svg").read_text().startswith("<?xml")
        assert [number for number in range(1, 6) if f"### Table {number}:" in said] == [1, 2, 3, 4, 5]
    if not asked:
        assert "[1/" not in run(script, "--keep", tmp_path, "--offline")[1]


@pytest.mark.nightly
def test_the_equivalence_and_the_bound_hold_on_real_layers():
    code, said, errors = run("birnick.py", "--inputs", 2, "--damps", 1e-3, 1)
    assert code == 0, errors
    rows = [line.split(" | ") for line in said.splitlines() if line.startswith("| demo")]
    assert len(rows) == 2
    for row in rows:
        assert (row[2], row[3]) == ("100.000 %", "100.0 %")

"""The page on which readers choose a way that fits: its sizes are those that `nearplane suggest` computes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from nightly import daily

ROOT = Path(__file__).parents[2]
KNOWN = json.loads((ROOT / "docs" / "calculator.json").read_text())
SMALL = ["Qwen/Qwen3-0.6B", "google/gemma-3-1b-it"]


@pytest.fixture
def calculator(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Yield the module that makes the page."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import calculator_page

    yield calculator_page
    sys.modules.pop("calculator_page", None)


@pytest.mark.parametrize("name", daily(KNOWN["models"], SMALL))
def test_the_sizes_are_those_of_suggest(calculator: ModuleType, name: str) -> None:
    again = json.loads(calculator.as_text([name]))
    assert again["models"] == {name: KNOWN["models"][name]}
    assert (again["modes"], again["contexts"]) == (KNOWN["modes"], KNOWN["contexts"])


def test_the_page_has_every_model_and_way(calculator: ModuleType) -> None:
    page = calculator.page()
    assert list(KNOWN["models"]) == list(calculator.MODELS)
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == 1 + len(KNOWN["modes"])
    assert all(row.count("|") == len(KNOWN["models"]) + 2 for row in rows)


def test_the_table_of_the_readme_has_the_same_figures() -> None:
    model = KNOWN["models"]["meta-llama/Llama-3.1-8B"]
    taken = {
        mode["options"]: (mode["loss"][0], sizes) for mode, sizes in zip(KNOWN["modes"], model["sizes"], strict=True)
    }
    rows = re.findall(r"^\|.*?\| `(--[^`]+)`.*\| (\S+) GB \| (\S+) \|$", (ROOT / "README.md").read_text(), re.M)
    assert len(rows) == 7
    names = {"--bits 4 --format mlx --group-size 64": "--bits 4 --group-size 64 --format mlx"}
    for options, size, ratio in rows:
        loss, (weights, _) = taken[names.get(options, options)]
        assert float(size) == round(weights / 1e9, 2)
        assert float(ratio) == pytest.approx(loss, abs=0.005)

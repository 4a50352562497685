"""Tables of the papers: what stands in a cell, what a stopped run keeps, and that no figure of a paper is left out."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nearplane import RecipeError

FOLDER = Path(__file__).parents[2] / "benchmarks" / "reproduce"


@pytest.fixture(scope="module")
def scripts():
    """Import the scripts as they import each other, and forget them afterwards: their names are common words."""
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(FOLDER))
    yield SimpleNamespace(
        **{
            name: importlib.import_module(name)
            for name in ("kept_cells", "methods", "runs", "paper_tables", "qwen3", "lecture")
        }
    )
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER.parent)):
            del sys.modules[name]


def test_a_cell_shows_both_figures_marks_a_deviation_and_says_why_there_is_none(scripts):
    Key, Cell = scripts.kept_cells.Key, scripts.kept_cells.Cell
    keys = [Key("here", "gptq-huffman", bits, "wikitext2") for bits in (4.125, 3.125, 2.125)]
    known = {
        keys[0]: Cell(key=keys[0], value=9.9),
        keys[1]: Cell(key=keys[1], value=12.0, error=0.25),
        keys[2]: Cell(key=keys[2], reason="no memory"),
    }
    paper = {key._replace(model="Qwen"): value for key, value in zip(keys, (9.88, 10.4, 13.97), strict=True)}
    table = scripts.paper_tables.Table(title="T", rows={"a": [*keys, None]}, columns=["4", "3", "2", "none"])
    lines = scripts.paper_tables.markdown(table, known.get, paper, {"here": "Qwen"}).splitlines()
    assert lines[4] == "| a | 9.900 (9.880, 1) | 12.000 +- 0.25 (10.400, 1.15) ! | failed [1] (13.970) | - |"
    assert lines[-1] == "[1] no memory"


def test_finished_cells_are_kept_failed_and_torn_ones_are_measured_anew(scripts, tmp_path):
    Key, Cell, Cells = scripts.kept_cells.Key, scripts.kept_cells.Cell, scripts.kept_cells.Cells
    keys = [Key("demo", "nearplane", bits, "c4") for bits in (4.0, 3.0, 2.0)]
    cells = Cells(tmp_path, {"windows": 8})
    cells.add(Cell(key=keys[0], value=2.5, bytes=7))
    cells.add(Cell(key=keys[1], reason="not fetched"))
    with (tmp_path / scripts.kept_cells.CELLS_FILE).open("a") as file:
        file.write(json.dumps({"key": keys[2], "value": 3.0})[:-4])
    again = Cells(tmp_path, {"windows": 8})
    assert again.missing(keys) == keys[1:]
    again.add(Cell(key=keys[2], value=3.0))
    assert Cells(tmp_path, {"windows": 8}).get(keys[2]).value == 3.0
    with pytest.raises(RecipeError, match="windows differ"):
        Cells(tmp_path, {"windows": 9})


def test_every_figure_of_a_paper_has_a_place_in_a_table(scripts):
    subjects = scripts.qwen3.online_subjects(scripts.qwen3.PAPER_MODELS, None)
    keys = {key for table in scripts.qwen3.tables_of(subjects).values() for key in table.keys}
    assert scripts.paper_tables.published("chen").keys() <= keys
    assert scripts.paper_tables.published("labonne").keys() <= set(scripts.lecture.table_of(scripts.lecture.GPT2).keys)


def test_a_model_that_is_not_there_is_a_reason_in_its_cells_and_the_run_goes_on(scripts, tmp_path):
    subject = scripts.qwen3.online_subjects([str(tmp_path / "absent")], 1)[0]
    keys = [scripts.kept_cells.Key(subject.name, "original", None, measure) for measure in ("wikitext2", "c4")]
    cells = scripts.kept_cells.Cells(tmp_path / "kept", {})
    scripts.runs.run([subject], keys, cells, tmp_path, "cpu")
    assert all("absent" in cells.get(key).reason for key in keys)

"""Records of version 2: what their recipes asked for is read as today's schemes, and what is offered no more is kept by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import forgery
from nearplane import FormatError, GridScheme, RateScheme, RecipeError
from nearplane.older_records import of_before, translated_record
from nearplane.record import RunRecord, read_record
from nearplane.report import write_report
from nearplane.summary import layer_table
from nearplane.verify import verify

DATA = Path(__file__).parent / "data" / "version2"


def change(recipe: dict[str, Any], changes: dict[str, Any]) -> None:
    """Put other values into the rule or the rate of a recipe, whichever has them."""
    for part in (recipe["rule"], recipe["rate"]):
        part |= {name: value for name, value in changes.items() if name in part}


def read(format: str, changes: dict[str, Any]) -> RunRecord:
    """Return the record in a committed checkpoint with other values in its recipe."""
    data = json.loads((DATA / format / "nearplane.json").read_text())
    change(data["recipe"], changes)
    return RunRecord.from_json(json.dumps(data))


def test_a_rule_without_a_rate_is_a_scheme_of_a_grid() -> None:
    options = {
        "bits": 3, "group_size": 32, "symmetric": False, "order": "pivoted", "solver": "k-best", "beam": 4, "polish": 1,
        "rounds": 0, "factor": "qr", "scale": "minmax", "damp": "auto", "sweep_damp": 0.2, "correct": False,
    }  # fmt: skip
    record = read("gptq", options)
    assert record.recipe.scheme == GridScheme(**options)
    assert record.removed == {}
    assert record.recipe.calibration.samples == 10


def test_a_rule_with_a_rate_is_a_scheme_of_that_rate() -> None:
    """What it said of grids meant nothing: 128 was the default group size."""
    options = {
        "rate": None, "size": "1MB", "method": "hptq", "coder": "huffman", "rows": "equal", "include_head": True,
        "order": "natural", "solver": "obq", "beam": None, "damp": 0.1, "correct": False,
    }  # fmt: skip
    record = read("nearplane", options | {"group_size": 128, "bits": 4, "symmetric": True, "scale": "mse"})
    assert record.recipe.scheme == RateScheme(**options)
    assert record.removed == {}


def test_rounding_to_nearest_is_read() -> None:
    options = {"solver": "round-to-nearest", "beam": None, "polish": 0, "rounds": None}
    assert read("gptq", options).recipe.scheme.solver == "round-to-nearest"
    assert read("nearplane", options).recipe.scheme.solver == "round-to-nearest"


@pytest.mark.parametrize(
    ("format", "changes", "removed"),
    [
        ("compressed-tensors", {"groups": "current"}, {"groups": "current"}),
        ("gptq", {"scale": "hessian"}, {"scale": "hessian"}),
        ("gptq_v2", {"order": "reversed"}, {"order": "reversed"}),
        ("nearplane", {"shrink": True, "gains": "both"}, {"shrink": "true", "gains": "both"}),
        ("nearplane", {"coder": "zstd"}, {"coder": "zstd"}),
        ("nearplane", {"polish": 2, "rounds": 1}, {"polish": "2", "rounds": "1"}),
    ],
)
def test_options_that_are_no_more_are_kept_by_name(format, changes, removed) -> None:
    record, plain = read(format, changes), read(format, {})
    assert record.removed == removed
    assert record.recipe == plain.recipe
    assert RunRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    ("format", "changes"),
    [
        ("gptq", {"groups": "current"}),
        ("gptq_v2", {"order": "reversed"}),
        ("nearplane", {"shrink": True, "gains": "both"}),
    ],
)
def test_what_was_made_with_them_is_shown_and_checked_but_not_measured_again(tmp_path, format, changes) -> None:
    folder = Path(shutil.copytree(DATA / format, tmp_path / "out"))
    data = json.loads((folder / "nearplane.json").read_text())
    change(data["recipe"], changes)
    for layer in data["layers"]:
        layer["order"] = changes.get("order", layer["order"])
    forgery.sign(folder, RunRecord.from_json(json.dumps(data)))
    assert verify(folder).faults == ()
    assert len(list(layer_table(read_record(folder))[2])) == 14
    assert write_report(folder, tmp_path / "page.html").is_file()
    name, value = next(iter(read_record(folder).removed.items()))
    with pytest.raises(RecipeError, match=rf"no longer has \({name} {value}.*Leave out --against"):
        verify(folder, against=str(DATA / "original"), calibration=DATA / "text.txt")


def test_a_record_of_today_is_left_as_it_is() -> None:
    data = json.loads(read("nearplane", {}).to_json())
    assert "rule" not in data["recipe"]
    assert translated_record(data) is data


@pytest.mark.parametrize("recipe", [None, [], "a", 3])
def test_what_is_no_recipe_is_left_to_be_refused(recipe) -> None:
    assert translated_record({"recipe": recipe}) == {"recipe": recipe}


@pytest.mark.parametrize(
    ("part", "wrong", "said"),
    [
        ("rule", None, "rule of recipe is null, expected an object"),
        ("rate", [1], r"rate of recipe is \[1\], expected an object"),
        ("rule", {"bits": "3"}, 'bits of scheme of recipe is "3"'),
        ("rule", {"bitz": 3}, "bitz of scheme of recipe is no field"),
        ("rate", {"rate": 99}, "rate is 99; expected 0.5 to 7"),
    ],
)
def test_nonsense_in_a_recipe_of_before_is_refused_by_name(part, wrong, said) -> None:
    data = json.loads((DATA / "gptq" / "nearplane.json").read_text())
    data["recipe"][part] = wrong
    with pytest.raises(FormatError, match=said):
        RunRecord.from_json(json.dumps(data))


def test_gates_of_before_are_told_from_another_model() -> None:
    assert "as a.gate, which now stay as they are" in of_before({"b.gate": 1, "a.gate": 1})
    assert of_before({"a.gate": 1, "a.proj": 32}) == of_before({}) == ""

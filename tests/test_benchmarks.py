"""The guard against slower code: what it calls slower, and that its baselines are those of its cases."""

import importlib.util
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("check", BENCHMARKS / "check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_more_than_fifteen_percent_above_the_baseline_is_slower(check):
    baseline = {"run": 100.0, "matrix": 10.0}
    assert check.slower({"run": 114.9, "matrix": 5.0}, baseline, check.LOSS) == []
    assert check.slower({"run": 115.1, "matrix": 11.4}, baseline, check.LOSS) == ["run"]


def test_a_case_without_baseline_is_refused(check):
    with pytest.raises(SystemExit, match=r"new stand.*--write"):
        check.slower({"new": 1.0}, {}, check.LOSS)


def test_every_processor_has_a_baseline_of_every_case(check, tmp_path):
    known = json.loads((BENCHMARKS / "baselines.json").read_text())
    assert known
    for baselines in known.values():
        assert baselines.keys() == check.cases(tmp_path).keys()
        assert all(ratio > 0 for ratio in baselines.values())

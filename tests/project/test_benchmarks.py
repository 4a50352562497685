"""The guards and the measurement of a GPU: what is called slower or different, and what a card that is pretended prints."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretended_kernels import compiled

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "guard"


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


@pytest.fixture(scope="module")
def fingerprint():
    spec = importlib.util.spec_from_file_location("fingerprint", BENCHMARKS / "fingerprint.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result(tensor="F32 (2,) 0", loss=0.5, width=4, **more):
    layer = {"name": "q_proj", "loss": loss, "order": "natural", "seconds": 1.0}
    record = {"recipe": {"scheme": {"bits": width, "factor": "qr"}}, "layers": [layer], "files": {"a": "0"}, **more}
    files = {"config.json": {"hidden_size": 4, "quantization_config": {"written_by": "nearplane 0"}}}
    return {"written": {"tensors": {"q_proj": tensor}, "files": files, "records": {"nearplane.json": record}}}


def test_times_versions_deleted_fields_and_empty_ones_do_not_count(fingerprint, capsys):
    more = dict(
        seconds=3.0, peak_memory=1, versions={"torch": "2"}, profiles=[1], pace={"limit": 1}, removed={}, tuning=None
    )
    assert fingerprint.compared("rate 3", result(), result(**more), []) == "same"
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(tensor="F32 (2,) 1"), "tensors: q_proj: "),
        (dict(loss=0.5000000000000001), "layers: q_proj: loss: 0.5 -> 0.5000000000000001"),
        (dict(width=3), "record: nearplane.json: recipe: scheme: bits: 4 -> 3"),
        (dict(stored="fp8"), 'record: nearplane.json: stored: (not there) -> "fp8"'),
    ],
)
def test_whatever_else_differs_is_told_by_its_key(fingerprint, capsys, change, said):
    assert fingerprint.compared("rate 3", result(), result(**change), []) == "DIFFERENT"
    assert said in capsys.readouterr().out
    part = said.split(":")[0]
    assert fingerprint.compared("rate 3", result(), result(**change), [part]) == "same"


@pytest.mark.parametrize(
    ("name", "error", "verdict"),
    [
        ("size", "RecipeError: method is not a keyword of quantize(). Did you mean order?", "gone"),
        ("size", "RecipeError: solver is 'obq'; expected one of nearest-plane, k-best.", "gone"),
        ("--memory", 'nearplane ended with code 1: Unknown option: "--memory"', "gone"),
        ("size", "RecipeError: --size 3MB is too little.", "DIFFERENT"),
        ("size", "KeyError: 'obq'", "DIFFERENT"),
    ],
)
def test_a_run_that_is_refused_as_its_option_was_removed_is_gone(fingerprint, name, error, verdict):
    assert fingerprint.compared(name, result(), {"error": error}, []) == verdict


def test_a_run_that_the_first_side_does_not_make_proves_nothing(fingerprint):
    failed = {"error": "RecipeError: --format gguf needs the package gguf"}
    assert fingerprint.compared("gguf q4_k_m", failed, failed, []) == "BROKEN"


def test_names_of_runs_are_names_of_runs(fingerprint):
    groups = ("PLAIN", "EXPERTS", "TUNED", "COMMANDS", "COMPARED", "KILLED")
    assert len(fingerprint.RUNS) == sum(len(getattr(fingerprint, group)) for group in groups)
    assert fingerprint.RUNS.keys() >= fingerprint.QUICK
    assert len({fingerprint.file_of("x", name) for name in fingerprint.RUNS}) == len(fingerprint.RUNS)


@pytest.fixture(scope="module")
def gpu():
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("gpu", BENCHMARKS.parent / "gpu.py")
    module = sys.modules["gpu"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path[:] = path
        for name in ("gpu", "gpu_parts", "gpu_serve", "stages"):
            sys.modules.pop(name, None)


def lines(gpu, capsys, *words):
    """Return the cells of each line of the table."""
    with compiled():
        gpu.main(["--tiny", *words])
    heads, rule, *rows = capsys.readouterr().out.splitlines()
    assert heads == f"| {' | '.join(gpu.HEADS)} |"
    assert set(rule) == {"|", "-"}
    return [dict(zip(gpu.HEADS, (cell.strip() for cell in row.strip("|").split("|")), strict=True)) for row in rows]


@pytest.mark.nightly
def test_a_card_is_measured_in_one_table_of_every_part(gpu, capsys):
    """The card is pretended, and its times mean nothing; that all parts run, are named and are compared does."""
    rows = lines(gpu, capsys)
    assert [row for row in rows if "FAILED" in row["note"]] == []
    assert {row["part"] for row in rows} >= {*gpu.PARTS, "codes", "demo", "peak of memory"}
    codes = [row for row in rows if row["part"] == "codes"]
    assert len(codes) == len(gpu.SCHEMES)
    assert all(row["note"].startswith("ok") for row in codes)
    for mode in gpu.MODES:
        parts = {row["part"]: row for row in rows if row["of"] == f"tiny, {mode}"}
        assert all(float(parts[part]["times"]) > 0 for part in ("sending", "forwards", "moments", "factor", "sweep"))
        assert 0 < float(parts["peak of memory"]["times"]) <= 1


def test_what_fails_is_a_line_and_the_table_goes_on(gpu, capsys, monkeypatch):
    def fails(*_args, **_keywords):
        raise RuntimeError("no kernel\nimage | here")

    monkeypatch.setattr(gpu, "_solved", fails)
    monkeypatch.setattr(gpu, "_disk", fails)
    rows = lines(gpu, capsys, "--only", "card", "codes")
    failed = [row for row in rows if row["note"] == "FAILED: RuntimeError: no kernel image / here"]
    assert [row["part"] for row in failed] == ["card"] + ["codes"] * len(gpu.SCHEMES)


def test_codes_that_differ_are_called_failed(gpu, capsys, monkeypatch):
    solved = gpu._solved

    def off(W, H, scheme):
        matrix, record = solved(W, H, scheme)
        return gpu.QuantizedMatrix(codes=matrix.codes + (W.device.type != "cpu"), grid=matrix.grid), record

    monkeypatch.setattr(gpu, "_solved", off)
    monkeypatch.setattr(gpu, "SCHEMES", {"4 bits": gpu.SCHEMES["4 bits"]})
    assert lines(gpu, capsys, "--only", "codes")[-1]["note"].startswith("FAILED: at least 99.9 % equal")


SERVED = """
import time
import torch
from gpu_parts import TINY
from gpu_serve import served
from packed_on_device import kernels
from pretended import pretended
from pretended_triton import interpreted

def seconds(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began

with pretended(), interpreted(), kernels(True):
    for row in served(torch.device("pretend:0"), TINY, seconds, 1e9):
        print(row.note.rpartition(" ")[2], row.measured > 0, row.beside > 0)
"""


@pytest.mark.nightly
def test_what_serving_takes_is_measured_with_right_results():
    paths = [str(BENCHMARKS.parent / "speed"), str(Path(__file__).parents[1] / "support"), *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SERVED], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["ok True True"] * 6

"""Rows of the tables of quality: which are pairs, how a ratio and its error are made, what a stopped run leaves."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "quality"


@pytest.fixture
def rows(monkeypatch):
    spec = importlib.util.spec_from_file_location("rows", FOLDER / "rows.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "rows", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def command(rows, monkeypatch):
    """Return a function that runs `tables.py`."""
    spec = importlib.util.spec_from_file_location("tables", FOLDER / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["tables.py", *map(str, words)])
        module.main()

    return run


def row(kl, calibration=0, tool="nearplane", setting="4", **more):
    about = {"model": "demo", "sha": "a", "text": f"t{calibration}", "tool": tool, "setting": setting}
    about |= {"commit": "c", "version": f"{tool} 1"}
    figures = {
        "calibration": calibration,
        "kl": kl,
        "original": 9.5,
        "bits": 4.125,
        "weights": 9,
        "cpu": 2.0,
        "perplexity": 9.6,
    }
    return about | figures | more


def failed(calibration, **more):
    return {name: value for name, value in row(0.0, calibration, **more).items() if name != "kl"} | {"error": "E: no"}


def test_the_ratio_is_a_geometric_mean_with_the_error_of_the_logarithms(rows):
    it = rows.ratio([1.0, 2.0, 4.0], [1.1, 2.0, 4.4])
    step = math.log(1.1)
    assert it.value == pytest.approx(math.exp(2 * step / 3))
    assert it.error == pytest.approx(it.value * step / 3)  # the deviation of (1, 0, 1) is 1 / sqrt(3)
    assert it.count == 3
    assert rows.ratio([1.1, 2.0, 4.4], [1.0, 2.0, 4.0]).value == pytest.approx(1 / it.value)


def test_two_errors_of_at_most_a_percent_and_a_half_need_four_times_the_calibrations_for_twice_the_error(rows):
    assert rows.Estimate(value=0.5, error=0.5 * 0.0075, count=10).needed == 10
    assert rows.Estimate(value=0.5, error=0.5 * 0.015, count=10).needed == 40
    assert rows.Estimate(value=0.5, error=None, count=1).needed is None


def test_rows_of_other_windows_or_weights_and_failed_ones_are_no_pairs(rows):
    old = [row(1.0), row(1.0, 1), row(1.0, 2), row(1.0, 3)]
    new = [row(0.5), row(0.5, 1, text="other"), row(0.5, 2, sha="b"), failed(3)]
    it = rows.paired(old, new)["demo", "4"]
    assert (it.value, it.count, it.error) == (0.5, 1, None)


def test_a_line_that_was_half_written_is_measured_again(rows, tmp_path):
    path = tmp_path / "rows.jsonl"
    assert rows.read(path) == []
    rows.append(path, row(1.0))
    path.write_text(path.read_text() + json.dumps(row(2.0, 1))[:40])
    assert [each["kl"] for each in rows.read(path)] == [1.0]
    rows.append(path, row(3.0, 1))
    rows.append(path, row(4.0))  # measured once more: the last one counts
    assert sorted(each["kl"] for each in rows.read(path)) == [3.0, 4.0]


def test_no_two_processes_measure_the_same(rows, tmp_path):
    with (
        rows.claimed(tmp_path / "rows.jsonl", "demo 4") as mine,
        rows.claimed(tmp_path / "rows.jsonl", "demo 4") as other,
    ):
        assert (mine, other) == (True, False)
    with rows.claimed(tmp_path / "rows.jsonl", "demo 4") as again:
        assert again


def test_a_change_is_judged_by_its_ratio_and_error(rows, command, tmp_path, capsys):
    for calibration, kl in enumerate((1.0, 1.1, 0.9)):
        rows.append(tmp_path / "old.jsonl", row(kl, calibration))
        rows.append(tmp_path / "new.jsonl", row(0.9 * kl, calibration))
    command("compare", tmp_path / "old.jsonl", tmp_path / "new.jsonl")
    assert "| demo | 4 | 0.9000 | 0.0000 | 3 | yes |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has no row of nearplane"):
        command("compare", tmp_path / "old.jsonl", tmp_path / "new.jsonl", "--tools", "nearplane", "GPTQModel")


def test_the_table_has_the_ratio_to_the_best_peer_over_common_calibrations(rows, command, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    for calibration in range(4):
        rows.append(path, row(0.001, calibration))
    for calibration in range(2):
        rows.append(path, row(0.004, calibration, tool="GPTQModel"))
        rows.append(path, row(0.002, calibration, tool="llm-compressor"))
    kinds = {"python": 0.002, "web": 0.004}
    rows.append(path, row(0.003, setting="2", kinds=kinds))
    rows.append(path, row(0.006, setting="2", tool="llm-compressor", kinds={"python": 0.002, "web": 0.010}))
    rows.append(path, row(0.1, 9, setting="q2_k", tool="llama.cpp", weights=8))
    rows.append(path, failed(0, setting="2", tool="GPTQModel"))
    command("show", "--rows", path)
    out = capsys.readouterr().out
    assert (
        "| 4 bits | 4.125 | 0.00100 ± 0.00000 (4) | 0.00400 ± 0.00000 (2) | 0.00200 ± 0.00000 (2) | - | **0.500** ± 0.000 |"
        in out
    )
    assert "| 2 bits | **1.000** | **0.400** |" in out
    assert "as many weights: {'nearplane': 9, 'GPTQModel': 9, 'llm-compressor': 9, 'llama.cpp': 8}" in out
    assert "demo, GPTQModel, 2, calibration 0: E: no" in out


def test_the_page_of_formats_compares_with_the_best_observer_and_says_which_target_is_missed(
    rows, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "rows.jsonl"
    spec = importlib.util.spec_from_file_location("formats", FOLDER / "formats.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "formats", module)
    spec.loader.exec_module(module)
    for calibration in range(2):
        rows.append(path, row(0.45, calibration, setting="nvfp4", tool="nearplane, two_sided=True"))
        rows.append(path, row(0.5, calibration, setting="nvfp4"))
        rows.append(path, row(0.4, calibration, setting="nvfp4", tool="nearplane tuned, 5 x tokens"))
        rows.append(path, row(0.7, calibration, setting="nvfp4", tool="llm-compressor, mse, 5 x tokens"))
        rows.append(path, row(1.0, calibration, setting="nvfp4", tool="llm-compressor"))
        rows.append(path, row(0.8, calibration, setting="nvfp4", tool="llm-compressor, mse"))
        rows.append(path, row(0.4, calibration, setting="mlx4"))
    rows.append(path, row(1.0, setting="mlx4", tool="mlx_lm"))  # it uses no calibration: one row stands beside two
    rows.append(path, row(0.6, setting="fp8", tool="nearplane, activations=fp8", computed=0.7))
    monkeypatch.setattr(module, "ROWS", path)
    module.main()
    out = capsys.readouterr().out
    assert "| nvfp4 | solved / llm-compressor | 0.70 | **0.625** ± 0.000 | reached |" in out
    assert "| mlx4 | solved / mlx_lm | 0.35 | **0.400** ± 0.000 | **missed** on demo |" in out
    assert "| mlx5 | solved / mlx_lm | 0.35 | - | not measured |" in out
    assert "| demo | nvfp4 | 0.500 ± 0.000 (2) | 0.450 ± 0.000 (2) | **0.900** ± 0.000 | 2 s, 2 s |" in out
    more = "| demo | nvfp4 | 0.700 ± 0.000 (2) | 0.450 ± 0.000 (2) | 0.400 ± 0.000 (2) | **0.571** ± 0.000 | **0.889** ± 0.000 |"
    assert more in out
    assert "| demo | fp8 | fp8 | 0.700 (1) | 0.600 (1) | - |" in out


def real(tool, setting, wikitext2, c4, model="smollm2", **more):
    """A row of a published model, with KL on two texts."""
    texts = {
        text: {"kl": kl, "kl_999": 9 * kl, "perplexity": 30.5, "original": 30.0}
        for text, kl in (("wikitext2", wikitext2), ("c4", c4))
    }
    sizes = {"sha": model, "samples": 64, "bytes": 113_000_000, "written": 113_200_000, "peak": 1_500_000_000}
    return row((wikitext2 + c4) / 2, tool=tool, setting=setting, model=model, texts=texts, **(sizes | more))


@pytest.fixture
def real_rows(rows, tmp_path):
    """A file with rows of a published model and its control, in which one ranking turns."""
    path = tmp_path / "rows.jsonl"
    for setting, control in (("4", 0.3), ("nvfp4", 0.1)):
        rows.append(path, real("nearplane", setting, 0.1, 0.2))
        rows.append(path, real("llm-compressor", setting, 0.2, 0.4))
        rows.append(path, real("GPTQModel", setting, 0.3, 0.3))
        rows.append(path, real("nearplane", setting, 0.2, 0.2, model="smollm2-noise"))
        rows.append(path, real("llm-compressor", setting, control, 0.25, model="smollm2-noise"))
    rows.append(path, real("llama.cpp", "q4_k_m", 0.05, 0.06, types={"Q5_0": 0.66, "Q4_K": 0.34}, bits=5.2))
    rows.append(path, real("nearplane", "4", 0.05, 0.06, samples=168, text="other"))
    rows.append(path, failed(0, tool="mlx_lm"))
    return path


def module_of(name, path, monkeypatch):
    """Return a module of the folder, which reads rows from a file."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROWS", path)
    return module


def test_the_page_of_published_models_names_the_best_peer_of_each_text_and_rankings_that_turn_in_the_control(
    real_rows, monkeypatch, capsys
):
    module_of("real_tables", real_rows, monkeypatch).main()
    out = capsys.readouterr().out
    best = (
        "**0.500** (llm-compressor) | **0.667** (llm-compressor) | **0.667** (GPTQModel) | **0.800** (llm-compressor)"
    )
    assert f"| 4 bits | {best} | stays |" in out
    assert "| nvfp4 | **0.500** (llm-compressor) | **2.000** (llm-compressor) |" in out
    assert "| turns / stays |" in out
    assert "Q5_0 66 %, Q4_K 34 %" in out
    assert "| 0.200 (1); 1.80 | 0.400 (1); 3.60 | 0.300 (1); 2.70 | - |" in out
    assert "### smollm2 with 168 windows" in out
    assert "demo, mlx_lm, 4, calibration 0: E: no" in out


def test_the_ladder_is_ordered_by_bytes_and_is_drawn(real_rows, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    module_of("real_tables", real_rows, monkeypatch)
    ladder = module_of("ladder", real_rows, monkeypatch)
    monkeypatch.setattr(ladder, "FIGURE", real_rows.with_name("ladder.svg"))
    ladder.main()
    out = capsys.readouterr().out
    first, *_ = [line for line in out.splitlines() if line.startswith("| 113")]
    assert first == "| 113.0 | q4_k_m † | llama.cpp | 0.05 | 0.45 | 30.5 | 0.06 | 0.54 | 30.5 | 1 |"
    assert real_rows.with_name("ladder.svg").read_text().startswith("<?xml")

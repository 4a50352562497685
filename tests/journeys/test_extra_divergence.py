"""The KL on the extra windows, which every summary has, is that of an evaluation, and is measured again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nearplane
from checkpoints import save_part_of_the_demo
from killing import stopped_behind
from nearplane.calibration import extra_divergence as module
from nearplane.calibration.windows import calibration_windows
from nearplane.demo import CALIBRATION
from nearplane.models.model import open_model
from nearplane.record.record_file import read_record
from nearplane.system.device import Device
from nearplane.system.paths import RECORD

FAST = {"calibration": str(CALIBRATION), "samples": 16, "seqlen": 64, "device": "cpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a part of the demo's model."""
    return save_part_of_the_demo(tmp_path_factory.mktemp("models") / "small", blocks=3)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"bits": 3}, 1e-3),
        ({"rate": 2.5}, 1e-3),
        ({"grid": "nvfp4"}, 1e-3),
        ({"grid": "q4_k_m"}, 0.2),  # heads that are quantized, too, are not counted
        ({"rate": 2.5, "include_head": True}, 0.5),
        ({"bits": 3, "correct": False}, 1e-3),
        ({"grid": "int8", "correct": False, "activations": "int8"}, 1e-3),
        ({"rate": 2.5, "correct": False, "include_embeddings": True}, 0.3),
    ],
)
def test_it_is_that_of_an_evaluation(options: dict[str, object], tolerance: float, model: Path, tmp_path: Path) -> None:
    """Of the finished files, on the same windows."""
    record = nearplane.quantize(model, tmp_path / "out", **options, **FAST)
    windows = calibration_windows(open_model(str(model)), record.recipe, None, Device.named("cpu"))
    assert windows.extra is not None
    evaluation = nearplane.evaluate(
        tmp_path / "out", windows.extra, against=model, activations="activations" in options
    )
    evaluation = evaluation.computed or evaluation
    assert record.extra_kl == pytest.approx(evaluation.kl, rel=tolerance)
    assert record.extra_kl > 1e-4


def test_parts_of_any_size_give_the_same(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = nearplane.quantize(model, tmp_path / "whole", bits=3, **FAST)
    monkeypatch.setattr(module, "COMPARED_LOGITS", 7 * 1000)
    parts = nearplane.quantize(model, tmp_path / "parts", bits=3, **FAST)
    assert parts.extra_kl == pytest.approx(whole.extra_kl, rel=1e-5)


@pytest.mark.parametrize("options", [{"solver": "round-to-nearest"}, {"samples": 1, "seqlen": 512}])
def test_it_is_missing_where_nothing_can_be_compared(options: dict[str, object], model: Path, tmp_path: Path) -> None:
    """No network runs, or there is no extra window: nothing about it is in the record."""
    text = tmp_path / "text.txt"
    text.write_text(CALIBRATION.read_text()[: 2_000 if "samples" in options else 100_000])
    record = nearplane.quantize(model, tmp_path / "out", bits=3, **FAST | {"calibration": str(text)} | options)
    assert record.extra_kl is None
    assert "extra_kl" not in (tmp_path / "out" / RECORD).read_text()


def test_verify_measures_it_again(model: Path, tmp_path: Path) -> None:
    """Another value in the record is a fault."""
    record = nearplane.quantize(model, tmp_path / "out", bits=3, **FAST)
    assert nearplane.verify(tmp_path / "out", against=str(model)).faults == ()
    forged = replace(read_record(tmp_path / "out"), extra_kl=record.extra_kl * 0.9)
    (tmp_path / "out" / RECORD).write_text(forged.in_folder(record.folder - len(record.to_json().encode())).to_json())
    faults = nearplane.verify(tmp_path / "out", against=str(model)).faults
    assert any(f"the KL on the extra windows is {record.extra_kl:.9g}" in fault.what for fault in faults)


def test_a_stopped_run_has_the_same(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was stopped behind its last block."""
    whole = nearplane.quantize(model, tmp_path / "whole", bits=3, **FAST)
    for blocks in (1, 3):
        out = tmp_path / f"stopped{blocks}"
        stopped_behind(blocks, model, out, monkeypatch, bits=3, **FAST)
        assert nearplane.quantize(model, out, bits=3, **FAST).extra_kl == whole.extra_kl


@pytest.mark.parametrize("correct", [True, False])
def test_tuning_measures_it_again(correct: bool, model: Path, tmp_path: Path) -> None:
    """The record of the tuned checkpoint has the KL of the tuned network, also where the original ran on these windows alone."""
    solved = nearplane.quantize(model, tmp_path / "out", bits=3, correct=correct, **FAST)
    tuned = nearplane.tune(tmp_path / "out", tmp_path / "tuned", against=str(model), samples=60, steps=40)
    assert tuned.extra_kl is not None
    assert tuned.extra_kl != solved.extra_kl
    assert nearplane.verify(tmp_path / "tuned", against=str(model)).faults == ()
    assert json.loads((tmp_path / "tuned" / RECORD).read_text())["extra_kl"] == tuned.extra_kl
    assert torch.isfinite(torch.tensor(tuned.extra_kl))

"""Small committed checkpoints of record version 2 stay readable for ever; data/version2/README.md has their story."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import forgery
import nearplane
from nearplane import cli
from nearplane.evaluate import load_dense
from nearplane.formats.stored import read_matrices
from nearplane.record import read_record
from nearplane.report import write_report
from nearplane.verify import verify

DATA = Path(__file__).parent / "data" / "version2"
FORMATS = ("compressed-tensors", "gptq", "gptq_v2", "nearplane")
ELSEWHERE = 0.01  # tolerance for figures that another processor measured, see docs/certificates.md


@pytest.fixture(params=FORMATS)
def checkpoint(request) -> Path:
    return DATA / request.param


def test_the_record_is_read_as_version_2(checkpoint):
    record = read_record(checkpoint)
    assert json.loads((checkpoint / "nearplane.json").read_text())["version"] == record.version == 2
    assert record.recipe.format == checkpoint.name
    assert (len(record.layers), record.windows, record.tokens) == (14, 10, 640)
    assert all(0 < layer.loss < layer.nearest_loss for layer in record.layers)


def test_inspect_shows_it(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["nearplane", "inspect", str(checkpoint)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    said = capsys.readouterr().out
    assert "original quantized by" in said
    assert "10 windows of 64 tokens" in said


def test_report_shows_it(checkpoint, tmp_path):
    page = write_report(checkpoint, tmp_path / "page.html").read_text()
    assert "calibrated on 640 tokens (10 windows of 64)" in page
    assert "model.<wbr>layers.<wbr>1.<wbr>mlp.<wbr>down_<wbr>proj" in page or "model.layers.1.mlp.down_proj" in page


def test_verify_finds_its_files_whole(checkpoint):
    found = verify(checkpoint)
    assert found.faults == ()
    assert found.layers == 14


def test_verify_measures_every_loss_again(checkpoint):
    found = verify(
        checkpoint, against=str(DATA / "original"), calibration=DATA / "text.txt", tolerance=ELSEWHERE, device="cpu"
    )
    assert found.faults == ()
    assert found.measured


def test_verify_finds_a_loss_that_was_altered(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    record = read_record(folder)
    altered = record.layers[5]
    layers = [replace(layer, gamma=layer.gamma * 1.05) if layer is altered else layer for layer in record.layers]
    forgery.sign(folder, replace(record, layers=tuple(layers)))
    assert verify(folder).faults == ()
    found = verify(
        folder, against=str(DATA / "original"), calibration=DATA / "text.txt", tolerance=ELSEWHERE, device="cpu"
    )
    assert [fault.where for fault in found.faults] == [altered.name]
    assert "gamma is " in found.faults[0].what


def test_it_is_read_with_the_values_that_its_codes_stand_for(checkpoint):
    network, _ = load_dense(checkpoint, torch.device("cpu"))
    matrices = dict(read_matrices(checkpoint))
    assert matrices.keys() == {layer.stored for layer in read_record(checkpoint).layers}
    for name, matrix in matrices.items():
        assert torch.equal(network.get_submodule(name).weight, matrix.decode())


@pytest.mark.parametrize("format", ["compressed-tensors", "nearplane"])
def test_load_reads_it(format):
    tokens = torch.arange(20)[None]
    dense, _ = load_dense(DATA / format, torch.device("cpu"))
    with torch.inference_mode():
        loaded = nearplane.load(DATA / format, dtype=torch.float32, device="cpu")(tokens).logits
        torch.testing.assert_close(loaded, dense(tokens).logits)

"""A small committed checkpoint stays readable: data/golden/README.md says how it was written."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import forgery
import nearplane
from nearplane.cli import app as cli
from nearplane.formats.stored import read_matrices
from nearplane.record.record_file import read_record
from nearplane.verbs.evaluate import load_dense
from nearplane.verbs.verify import verify

DATA = Path(__file__).parents[1] / "data" / "golden"
GOLDEN = DATA / "rate"
AGAIN = dict(against=str(DATA / "original"), calibration=DATA / "text.txt", device="cpu")
ELSEWHERE = 0.01  # tolerance for figures that another processor measured, see docs/certificates.md


def test_the_record_is_read():
    record = read_record(GOLDEN)
    assert (len(record.layers), record.windows, record.tokens) == (14, 10, 640)
    assert all(0 < layer.loss < layer.nearest_loss for layer in record.layers)
    assert record.to_json() == (GOLDEN / "nearplane.json").read_text()


def test_inspect_shows_it(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["nearplane", "inspect", str(GOLDEN)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    said = capsys.readouterr().out
    assert "original quantized by" in said
    assert "10 windows of 64 tokens" in said


def test_report_shows_it(tmp_path):
    page = nearplane.write_report(GOLDEN, tmp_path / "page.html").read_text()
    assert "calibrated on 640 tokens (10 windows of 64)" in page
    assert "model.<wbr>layers.<wbr>1.<wbr>mlp.<wbr>down_<wbr>proj" in page or "model.layers.1.mlp.down_proj" in page


def test_verify_finds_its_files_whole():
    found = verify(GOLDEN)
    assert found.faults == ()
    assert (found.files, found.layers) == (len(list(GOLDEN.iterdir())), 14)


def test_verify_measures_every_loss_again():
    found = verify(GOLDEN, tolerance=ELSEWHERE, **AGAIN)
    assert found.faults == ()
    assert found.measured


def test_verify_finds_a_loss_that_was_altered(tmp_path):
    folder = Path(shutil.copytree(GOLDEN, tmp_path / "copy"))
    record = read_record(folder)
    altered = record.layers[5]
    layers = [replace(layer, gamma=layer.gamma * 1.05) if layer is altered else layer for layer in record.layers]
    forgery.sign(folder, replace(record, layers=tuple(layers)))
    assert verify(folder).faults == ()
    found = verify(folder, tolerance=ELSEWHERE, **AGAIN)
    assert [fault.where for fault in found.faults] == [altered.name]
    assert "gamma is " in found.faults[0].what


def test_load_gives_the_values_that_its_codes_stand_for():
    dense, _ = load_dense(GOLDEN, torch.device("cpu"))
    matrices = dict(read_matrices(GOLDEN))
    assert matrices.keys() == {layer.stored for layer in read_record(GOLDEN).layers}
    for name, matrix in matrices.items():
        assert torch.equal(dense.get_submodule(name).weight, matrix.decode())
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        loaded = nearplane.load(GOLDEN, dtype=torch.float32, device="cpu")(tokens).logits
        torch.testing.assert_close(loaded, dense(tokens).logits)

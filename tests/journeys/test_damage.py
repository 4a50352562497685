"""A checkpoint with one flipped bit: no command uses it as if it were sound."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import nearplane
from checkpoints import save_part_of_the_demo
from nearplane import FormatError
from nearplane.demo import CALIBRATION
from nearplane.formats.find_record import find_record
from nearplane.formats.stored import Stored
from nearplane.recipe.recipe import Calibration
from nearplane.system.paths import CONFIG, RECORD

FORMATS = {
    "compressed-tensors": {"bits": 4, "group_size": 32},
    "gptq": {"bits": 4, "group_size": 32, "format": "gptq"},
    "gguf": {"grid": "q4_0"},
    "nearplane": {"rate": 3.0},
}
CALLS: dict[str, Callable[[Path, Path, Path, Path], Any]] = {
    "load": lambda damaged, *_: nearplane.load(damaged),
    "load decoded": lambda damaged, *_: nearplane.load(damaged, dtype="float64"),
    "evaluate": lambda damaged, text, *_: nearplane.evaluate(damaged, text, samples=1, seqlen=16),
    "generate": lambda damaged, *_: nearplane.generate(damaged, "Once", tokens=1),
    "export": lambda damaged, _, __, new: nearplane.export(damaged, new),
    "tune": lambda damaged, _, model, new: nearplane.tune(damaged, new, against=model),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(CALIBRATION.read_text()[:8000])
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_part_of_the_demo(tmp_path_factory.mktemp("models") / "model", blocks=1, neurons=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, text: Path, model: Path) -> Callable[[str], Path]:
    """Return a function from a format to the folder of a checkpoint; do not change it."""
    folders: dict[str, Path] = {}

    def folder_of(format: str) -> Path:
        if format not in folders:
            folders[format] = tmp_path_factory.mktemp("out") / format
            nearplane.quantize(
                model, folders[format], calibration=text, samples=16, seqlen=64, order="natural", **FORMATS[format]
            )
        return folders[format]

    return folder_of


def damaged(folder: Path, copy: Path) -> Path:
    """Copy a checkpoint and flip one bit in the codes of a layer."""
    shutil.copytree(folder, copy)
    stored = Stored(copy)
    name = stored.names()[3]
    path, tensor = stored.file(name), next(iter(stored.tensors(name).values()))
    content, codes = bytearray(path.read_bytes()), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    content[content.index(codes) + len(codes) // 2] ^= 1
    path.write_bytes(content)
    return copy


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("call", CALLS)
def test_a_flipped_bit_is_refused(
    call: str, format: str, checkpoint: Callable[[str], Path], text: Path, model: Path, tmp_path: Path
) -> None:
    """35 of 44 flips were loaded as other weights, and a tuned copy of them passed `verify --against`."""
    folder, new = damaged(checkpoint(format), tmp_path / "damaged"), tmp_path / "new"
    with pytest.raises(FormatError, match=r"but nearplane\.json lists|has the checksum") as refusal:
        CALLS[call](folder, text, model, new)
    assert str(folder) in str(refusal.value)
    assert not new.exists()


@pytest.mark.parametrize("measured", [False, True])
def test_a_comparison_does_not_go_on_with_a_damaged_checkpoint(
    measured: bool, text: Path, model: Path, tmp_path: Path
) -> None:
    keep = tmp_path / "keep"
    settings = {"text": text, "calibration": Calibration(calibration=str(text), samples=16, seqlen=64), "samples": 1}
    list(nearplane.compare([model], [4], methods=["rtn-mse"], keep=keep, **settings))
    kept = json.loads((keep / "rows.json").read_text())
    kept["rows"] = kept["rows"][: 2 if measured else 1]  # else as if it had been stopped before it measured it
    (keep / "rows.json").write_text(json.dumps(kept))
    folder = keep / "model" / "rtn-mse-4"
    damaged(folder, tmp_path / "copy")
    shutil.rmtree(folder)
    shutil.move(tmp_path / "copy", folder)
    row = list(nearplane.compare([model], [4], methods=["rtn-mse"], keep=keep, **settings))[-1]
    assert "but nearplane.json lists" in row.note
    assert f"Or delete {folder} and repeat the command." in row.note
    assert row.perplexity is None


@pytest.mark.parametrize("file", [CONFIG, "tokenizer.json"])
def test_a_changed_file_beside_the_weights_is_refused(
    file: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint("compressed-tensors"), copy)
    (copy / file).write_text((copy / file).read_text() + " ")
    with pytest.raises(FormatError, match=f"{file} has the SHA-256 .* the file is damaged, was changed"):
        nearplane.load(copy)


def test_a_name_in_the_record_that_no_file_can_have_is_missing(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint("compressed-tensors"), copy)
    record = json.loads((copy / RECORD).read_text())
    record["files"]["a" * 1000], record["digest"] = "0" * 64, ""
    (copy / RECORD).write_text(json.dumps(record))
    with pytest.raises(FormatError, match=r"a is missing, but nearplane\.json lists"):
        nearplane.load(copy)


def test_settings_for_generation_may_be_edited(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint("compressed-tensors"), copy)
    (copy / "generation_config.json").write_text('{"temperature": 0.5}')
    assert nearplane.load(copy).generation_config.temperature == 0.5


def test_the_check_can_be_left_out(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    nearplane.load(damaged(checkpoint("compressed-tensors"), tmp_path / "damaged"), check=False)


def test_tune_refuses_a_record_that_contradicts_its_digest(
    checkpoint: Callable[[str], Path], text: Path, model: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint("compressed-tensors"), copy)
    record = json.loads((copy / RECORD).read_text())
    record["layers"][0]["loss"] *= 2
    (copy / RECORD).write_text(json.dumps(record))
    with pytest.raises(FormatError, match="its digest is"):
        CALLS["tune"](copy, text, model, tmp_path / "new")


def test_a_forged_hash_is_refused_by_the_digest_of_the_record(
    checkpoint: Callable[[str], Path], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint("compressed-tensors"), copy)
    record = json.loads((copy / RECORD).read_text())
    record["files"][CONFIG] = 64 * "0"
    (copy / RECORD).write_text(json.dumps(record))
    for call in (
        lambda: nearplane.load(copy),
        lambda: nearplane.evaluate(copy, text, samples=1, seqlen=16),
        lambda: nearplane.export(copy, tmp_path / "new"),
        lambda: find_record(copy),
    ):
        with pytest.raises(FormatError, match="was changed or is damaged: its digest is"):
            call()


@pytest.mark.parametrize("record", [True, False], ids=["with record", "without record"])
def test_packed_weights_are_not_taken_for_dense_ones(
    record: bool, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint("compressed-tensors"), copy)
    config = json.loads((copy / CONFIG).read_text())
    del config["quantization_config"]
    (copy / CONFIG).write_text(json.dumps(config))
    if not record:
        (copy / RECORD).unlink()
    expected = r"but nearplane\.json lists" if record else r"has no quantization_config, but .*weight_packed is packed"
    with pytest.raises(FormatError, match=expected):
        nearplane.export(copy, tmp_path / "new")


def test_nan_weights_are_not_exported(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint("compressed-tensors"), copy)
    (copy / RECORD).unlink()
    path = sorted(copy.glob("*.safetensors"))[0]
    tensors = load_file(path)
    next(tensor for name, tensor in tensors.items() if name.endswith("weight_scale"))[0, 0] = math.nan
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(FormatError, match="has steps or offsets that are NaN or Inf"):
        nearplane.export(copy, tmp_path / "new")

"""A model is calibrated on a mix of chats and of a text: quantized, stopped and resumed, verified and tuned."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from killing import contents, stopped_behind
from nearplane import CalibrationError, RecipeError
from nearplane.calibration.texts import read_windows
from nearplane.calibration.windows import calibration_windows
from nearplane.demo import CALIBRATION, HELD_OUT
from nearplane.models.model import open_model
from nearplane.record.record import RunRecord
from nearplane.record.summary import layer_table, summary
from nearplane.system.device import Device
from nearplane.tuning.checkpoint import windows_of
from nearplane.verbs.evaluate import load_dense
from nearplane.verbs.verify import verify

FAST = {"samples": 18, "seqlen": 32, "group_size": 16, "bits": 3, "device": "cpu", "positions": "equal"}
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny random Llama whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("model")
    config = config_of("llama", vocab_size=TEXT_VOCABULARY, num_hidden_layers=2, hidden_size=32, intermediate_size=96)
    random_model(config).float().save_pretrained(folder)
    add_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a mix of two windows of chats to one of a text."""
    folder, text = tmp_path_factory.mktemp("texts"), HELD_OUT.read_text()
    chats = (
        [{"role": "user", "content": text[n : n + 60]}, {"role": "assistant", "content": text[n + 60 : n + 300]}]
        for n in range(0, 60_000, 300)
    )
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (folder / "text.txt").write_text(CALIBRATION.read_text()[:40_000])
    return f"{folder / 'chats.jsonl'}:2,{folder / 'text.txt'}:1"


@pytest.fixture(scope="module")
def quantized(model: Path, mix: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunRecord]:
    out = tmp_path_factory.mktemp("out") / "checkpoint"
    return out, nearplane.quantize(model, out, calibration=mix, **FAST)


def apart(model: Path, mix: str) -> list[torch.Tensor]:
    """Return the windows of each text of the mix by itself."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    names = [part.rpartition(":")[0] for part in mix.split(",")]
    return [read_windows(tokenizer, name, samples=40, seqlen=32) for name in names]


def test_windows_alternate_by_weight_and_chats_go_through_the_template(model: Path, mix: str, quantized) -> None:
    _, record = quantized
    windows = calibration_windows(open_model(str(model)), record.recipe, None, Device.named("cpu"))
    chats, text = apart(model, mix)
    assert AutoTokenizer.from_pretrained(model).decode(chats[0]).startswith("<user>")
    assert torch.equal(windows.fitted[:6], torch.stack([chats[0], text[0], chats[1], chats[2], text[1], chats[3]]))
    assert torch.equal(windows.extra, torch.stack([chats[12], text[6]]))
    assert windows.digest() == record.text
    assert (record.windows, record.extra_windows, record.tokens) == (18, 2, 18 * 32)
    counts = [(each.weight, each.windows, each.extra_windows) for each in record.sources]
    assert counts == [(2, 12, 1), (1, 6, 1)]
    assert record.recipe.calibration.calibration == mix


def test_the_losses_of_a_text_are_those_on_its_extra_windows(
    model: Path, mix: str, quantized: tuple[Path, RunRecord]
) -> None:
    """Both networks run whole on the extra windows, with hooks on every layer."""
    out, record = quantized
    for number, (windows, first) in enumerate(zip(apart(model, mix), (12, 6), strict=True)):
        y, y_hat = (outputs_of(folder, windows[first : first + 1], record) for folder in (model, out))
        expected = []
        for layer in record.layers:
            lost = (y[layer.name] - y_hat[layer.name]).square().sum() / y[layer.name].square().sum()
            assert layer.extra_by_source[number] == pytest.approx(float(lost), rel=1e-4)
            expected.append(float(lost))
        assert record.lost(number) == pytest.approx(sum(expected) / len(expected), rel=1e-4)
    for lines in (summary(record, out), layer_table(record)[0]):
        assert any(line.startswith("lost share of a layer's output by text of the mix") for line in lines)


def outputs_of(folder: Path, windows: torch.Tensor, record: RunRecord) -> dict[str, torch.Tensor]:
    """Return the outputs of all quantized layers by name, without their biases."""
    seen: dict[str, torch.Tensor] = {}
    network = load_dense(folder, torch.device("cpu"))[0]
    for layer in record.layers:
        network.get_submodule(layer.name).register_forward_hook(
            lambda module, args, y, name=layer.name: seen.update(
                {name: y.double() - (0 if module.bias is None else module.bias.double())}
            )
        )
    with torch.no_grad():
        network(windows)
    return seen


def test_verify_measures_them_again_and_finds_others(model: Path, quantized, edited: Callable[..., Path]) -> None:
    out, record = quantized
    assert verify(out, against=str(model)).faults == ()
    layer = replace(record.layers[3], extra_by_source=(0.5, record.layers[3].extra_by_source[1]))
    faults = verify(
        edited(out, replace(record, layers=(*record.layers[:3], layer, *record.layers[4:]))), against=str(model)
    ).faults
    assert [fault.where for fault in faults] == [layer.name]
    assert "extra_by_source is (" in faults[0].what


@pytest.fixture
def edited(tmp_path: Path) -> Callable[[Path, RunRecord], Path]:
    """Return a function that copies a checkpoint with another record."""

    def copy(out: Path, record: RunRecord) -> Path:
        folder = tmp_path / "edited"
        folder.mkdir()
        for path in out.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        others = sum(path.stat().st_size for path in folder.iterdir() if path.name != "nearplane.json")
        (folder / "nearplane.json").write_text(record.in_folder(others).to_json())
        return folder

    return copy


@pytest.mark.nightly
def test_a_stopped_run_goes_on_to_the_same_bytes(
    model: Path, mix: str, quantized: tuple[Path, RunRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("nearplane.formats.journal_pages.MAX_JOURNAL_SHARE", float("inf"))
        stopped_behind(1, model, tmp_path / "out", patch, calibration=mix, **FAST)
    assert (tmp_path / "out.unfinished" / "journal").is_dir()
    nearplane.quantize(model, tmp_path / "out", calibration=mix, **FAST)
    assert contents(tmp_path / "out") == contents(quantized[0])


def test_tuning_reads_the_same_windows_and_then_more_in_proportion(model: Path, mix: str, quantized) -> None:
    opened, recipe = open_model(str(model)), quantized[1].recipe
    windows = windows_of(opened, recipe, None, Device.named("cpu"), 80, 32)
    assert torch.equal(windows[:20], calibration_windows(opened, recipe, None, Device.named("cpu")).tokens())
    chats, text = apart(model, mix)
    assert torch.equal(windows[20:23], torch.stack([chats[13], text[7], chats[14]]))
    with pytest.raises(RecipeError, match=r"windows of a mix of texts have the length of the run, 32 tokens"):
        windows_of(opened, recipe, None, Device.named("cpu"), 80, 16)


def test_a_text_that_is_too_short_for_its_share_is_named(model: Path, mix: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text(CALIBRATION.read_text()[:400])
    with pytest.raises(CalibrationError, match=r"short\.txt has \d windows, but the mix takes 7 from it"):
        nearplane.quantize(
            model, tmp_path / "out", calibration=f"{mix.split(':')[0]}:2,{tmp_path / 'short.txt'}", **FAST
        )
    assert not (tmp_path / "out").exists()

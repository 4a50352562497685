"""A run says its memory and time before and after its first block; --memory is kept, or refused with what works."""

import re
from itertools import count

import pytest
import torch

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from killing import contents, stopped_behind
from nearplane import RecipeError
from nearplane.calibration.one_forward import MemorySetting, default_batch
from nearplane.demo import CALIBRATION
from nearplane.planning.forecast import Forecast, forecast
from nearplane.planning.memory_limits import settings
from nearplane.record.record_file import read_record
from nearplane.system.device import Device
from nearplane.tuning.memory import Needed

CPU = Device(torch.device("cpu"))

TEXT = dict(samples=24, seqlen=40, device="cpu", bits=4, group_size=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    config = config_of("llama", vocab_size=TEXT_VOCABULARY, num_hidden_layers=3, tie_word_embeddings=False)
    random_model(config).float().save_pretrained(folder)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    nearplane.quantize(model, out, calibration=str(CALIBRATION), **TEXT)
    return out


@pytest.mark.parametrize("more", [True, False])
def test_a_run_says_what_it_takes_before_it_begins_and_after_the_first_block(
    more, model, tmp_path, caplog, monkeypatch
) -> None:
    """Its memory unless something earlier in the process took more."""
    peaks = count(10**9, 10**6 * more)
    monkeypatch.setattr("nearplane.system.device.Device.peak", lambda _: next(peaks))
    with caplog.at_level("INFO", "nearplane"):
        nearplane.quantize(model, tmp_path / "out", calibration=str(CALIBRATION), **TEXT)
    size = r"([\d.]+ [MG]B)"
    text = "\n".join(caplog.messages)
    before = re.search(
        rf"^quantizing takes at most {size} of memory \(while .*\) and at least .* for 960 calibration tokens and 120 extra ones",
        text,
        re.M,
    )
    after = re.search(rf"^the first block took .* and {size} of memory \(at most {size} expected\)$", text, re.M)
    assert before, text
    assert after if more else re.search(r"^the first block took [\d.]+ s$", text, re.M), text
    assert not more or before[1] == after[2]
    assert text.count("the first block took ") == 1


def test_a_long_run_says_what_makes_it_shorter(caplog) -> None:
    """By the work of its blocks, of which the first need not be like the others; a short one does not."""
    setting = MemorySetting(batch=1, room=0, device=CPU)
    known = Forecast(setting=setting, work=(1.0, 3.0, 3.0), samples=64, fewer=0.25)
    with caplog.at_level("INFO", "nearplane"):
        known.measured(1800.0, 0)
        known.measured(1800.0, 1)  # of a resumed run, which keeps its windows
        known.measured(60.0, 0)
        Forecast(setting=setting, work=(1.0, 3.0, 3.0), samples=64, fewer=0.9).measured(1800.0, 0)
        Forecast(setting=setting).measured(1800.0, 0)
    said = [line for line in caplog.messages if "--samples" in line]
    assert said == ["all blocks take about 3 h 30 min; with --samples 64 they take about 52 min 30 s, but more is lost"]


def test_work_is_known_of_every_block_and_falls_with_the_windows(model, tmp_path, monkeypatch) -> None:
    found: list[Forecast] = []

    def noted(*args):
        found.append(forecast(*args))
        return found[-1]

    monkeypatch.setattr("nearplane.planning.run.forecast", noted)
    monkeypatch.setattr("nearplane.planning.forecast.FEWER", 2)
    monkeypatch.setattr("nearplane.planning.forecast.ADVISED_TOKENS_PER_INPUT", 1)
    nearplane.quantize(model, tmp_path / "out", calibration=str(CALIBRATION), **TEXT)
    assert len(found[0].work) == 3
    assert min(found[0].work) == max(found[0].work) > 0
    assert 0 < found[0].fewer < 0.9


def test_a_limit_that_is_too_small_is_refused_with_one_that_works(model, tmp_path) -> None:
    with pytest.raises(RecipeError, match="is too small: the most economical settings need") as refused:
        nearplane.quantize(model, tmp_path / "out", calibration=str(CALIBRATION), memory="20MB", **TEXT)
    assert not (tmp_path / "out").exists()
    least = re.search(r"Use --memory ([\d.]+GB) or fewer --samples", str(refused.value))
    assert least is not None
    record = nearplane.quantize(model, tmp_path / "out", calibration=str(CALIBRATION), memory=least[1], **TEXT)
    assert read_record(tmp_path / "out").batch == record.batch


@pytest.mark.parametrize("memory", ["a lot", "0", "-3GB"])
def test_a_limit_that_is_no_size_is_refused(memory, model, tmp_path) -> None:
    with pytest.raises(RecipeError, match=r"memory is .*; expected a number of bytes"):
        nearplane.quantize(model, tmp_path / "out", calibration=str(CALIBRATION), memory=memory, **TEXT)


def test_where_memory_is_not_known_no_limit_is_taken(model, tmp_path) -> None:
    with pytest.raises(RecipeError, match="--memory cannot be used: the memory of this run cannot be predicted"):
        nearplane.quantize(model, tmp_path / "out", bits=4, group_size=16, solver="round-to-nearest", memory="8GB")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("room", "disk"),
    [
        pytest.param(0, False, id="passes", marks=pytest.mark.nightly),
        pytest.param(0, True, id="passes and a file"),
        pytest.param(1 << 30, True, id="pauses and a file", marks=pytest.mark.nightly),
    ],
)
def test_the_same_bytes_come_out_however_memory_is_spared(room, disk, model, whole, tmp_path, monkeypatch) -> None:
    """But for the number of windows that pass at a time. And a run that was stopped goes on the same way."""
    setting = MemorySetting(batch=8, room=room, device=CPU, states="disk" if disk else "device")
    monkeypatch.setattr("nearplane.planning.run.forecast", lambda *_: Forecast(setting=setting))
    monkeypatch.setattr("nearplane.formats.journal_pages.MAX_JOURNAL_SHARE", float("inf"))
    monkeypatch.setattr("nearplane.planning.journal.PAGE", 1 << 14)
    stopped_behind(2, model, tmp_path / "out", monkeypatch, calibration=str(CALIBRATION), **TEXT)
    nearplane.quantize(model, tmp_path / "out", calibration=str(CALIBRATION), **TEXT)
    weights = {name: data for name, data in contents(tmp_path / "out").items() if name.endswith(".safetensors")}
    assert weights == {name: data for name, data in contents(whole).items() if name.endswith(".safetensors")}
    assert read_record(tmp_path / "out").batch is None
    nearplane.verify(tmp_path / "out", against=model, calibration=str(CALIBRATION), device="cpu")


@pytest.mark.nightly
@pytest.mark.parametrize("batch", [2, 8], ids=["fewer", "as usual"])
def test_a_run_that_was_stopped_goes_on_with_as_many_windows_at_a_time(batch, model, tmp_path, monkeypatch) -> None:
    """Whatever limit it then has; and `verify` takes as many."""
    monkeypatch.setattr("nearplane.formats.journal_pages.MAX_JOURNAL_SHARE", float("inf"))
    options = dict(calibration=str(CALIBRATION), **TEXT)
    begun = Forecast(setting=MemorySetting(batch=batch, room=0, device=CPU))
    with monkeypatch.context() as patch:
        patch.setattr("nearplane.planning.run.forecast", lambda *_: begun)
        stopped_behind(1, model, tmp_path / "out", monkeypatch, **options)
    tried = []

    def noted(*args, **keywords):
        tried.extend(settings(*args, **keywords))
        return tried

    monkeypatch.setattr("nearplane.planning.forecast.settings", noted)
    record = nearplane.quantize(model, tmp_path / "out", memory="100GB", **options)
    assert {setting.batch for setting in tried} == {batch}
    assert record.batch == (None if batch == default_batch(TEXT["seqlen"]) else batch)
    nearplane.verify(tmp_path / "out", against=model, calibration=str(CALIBRATION), device="cpu")


def test_a_limit_of_tuning_is_checked_before_the_solve(model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("nearplane.tuning.memory.needed", lambda *_, **__: Needed(2**33, 2**33, 0, 0, 0))
    options = dict(calibration=str(CALIBRATION), memory="8GB", tune="network", **TEXT)
    with pytest.raises(RecipeError, match=r"--memory 8\.00 GB is too small: tuning needs up to"):
        nearplane.quantize(model, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_a_head_alone_at_a_rate_is_foreseen(model, tmp_path) -> None:
    options = dict(rate=3.0, samples=24, seqlen=40, device="cpu", ignore=(r"model\.layers\.",), include_head=True)
    record = nearplane.quantize(model, tmp_path / "out", calibration=str(CALIBRATION), **options)
    assert [layer.name for layer in record.layers] == ["lm_head"]

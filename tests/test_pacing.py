"""Memory and time are foreseen before a run, and a limit of memory is kept or refused with the least that works."""

import re
from dataclasses import replace

import pytest

import nearplane
from families import config_of, random_model
from killing import contents
from nearplane import RecipeError
from nearplane.demo import CALIBRATION, MODEL
from nearplane.foreseen import Blocks, Group, Way, Work, foresee, moments, waits, ways
from nearplane.pace import Pace
from nearplane.record import read_record
from nearplane.sizes import bytes_in
from nearplane.speed import Speed
from nearplane.walk import batch_of
from test_journal import stopped_behind

MB = 1 << 20
SPEED = Speed(
    product=1e-11, double=2e-11, search=1e-7, sweep=1e-7, descent=1e-7, certificate=1e-7, coding=1e-7, perturb=1e-7,
    touch=1e-10, threads=2,
)  # fmt: skip
GROUPS = (
    Group(layers=((512, 512),) * 3, alive=4 * MB),
    Group(layers=((512, 512),), alive=6 * MB, lost=((512, 512),)),
    Group(layers=((1024, 512),) * 2, alive=5 * MB),
    Group(layers=((512, 1024),), alive=9 * MB, lost=((512, 1024),)),
)
WORK = Work(
    blocks=(Blocks(count=4, weights=2_500_000, groups=GROUPS),),
    windows=30, extra=2, seqlen=512, hidden=512, vocabulary=1000, around=512_000, ends=2_048_000, descents=4,
)  # fmt: skip
FREE = Way(batch=4, room=1 << 40)
TEXT = dict(samples=24, seqlen=40, device="cpu", bits=4, group_size=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    config = config_of("llama", vocab_size=2048, num_hidden_layers=3, tie_word_embeddings=False)
    random_model(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((MODEL / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    nearplane.quantize(model, out, calibration=str(CALIBRATION), **TEXT)
    return out


def test_what_waits_is_two_networks_at_a_stage_and_one_with_the_outputs_of_the_other_at_the_last() -> None:
    held = waits(WORK, WORK.blocks[0], FREE)
    state = 4 * 512 * 512
    assert held == [32 * max(2 * state, 8 * MB), 32 * 12 * MB, 32 * 12 * MB, 32 * max(10 * MB, 9 * MB + state)]
    assert waits(WORK, WORK.blocks[0], replace(FREE, room=32 * 8 * MB)) == held[:1]
    assert waits(replace(WORK, blocks=(replace(WORK.blocks[0], pauses=False),)), WORK.blocks[0], FREE) == held
    assert waits(WORK, replace(WORK.blocks[0], pauses=False), FREE) == []


def test_the_peak_does_not_grow_with_depth_and_time_does() -> None:
    deep = replace(WORK, blocks=(replace(WORK.blocks[0], count=40),))
    shallow, deep = foresee(WORK, FREE, SPEED, 100 * MB), foresee(deep, FREE, SPEED, 100 * MB)
    assert deep.peak == shallow.peak
    assert deep.seconds > 5 * shallow.seconds
    assert deep.tokens == 32 * 512


def test_less_memory_takes_more_time() -> None:
    found = [foresee(WORK, way, SPEED, 0) for way in ways(WORK, FREE, batches=True)]
    least, most = min(found, key=lambda one: one.peak), max(found, key=lambda one: one.peak)
    assert most.peak == foresee(WORK, FREE, SPEED, 0).peak
    assert least.peak < most.peak / 2
    assert least.seconds > most.seconds
    assert {way.batch for way in ways(WORK, FREE, batches=False)} == {4}


def test_a_file_of_hidden_states_spares_them_all() -> None:
    apart = replace(FREE, room=0)
    running = [
        next(moment for moment in moments(WORK, way) if moment.name == "blocks run")
        for way in (apart, replace(apart, disk=True))
    ]
    assert running[0].activations - running[1].activations == 2 * (32 - 4) * WORK.state


def test_a_run_says_what_it_takes_before_it_begins(model, tmp_path, caplog) -> None:
    with caplog.at_level("INFO", "nearplane"):
        nearplane.quantize(model, tmp_path / "out", calibration=str(CALIBRATION), **TEXT)
    said = next(message for message in caplog.messages if "of memory at its most" in message)
    assert re.search(r"about [\d.]+ [MG]B of memory at its most, while .*, for 1,080 tokens$", said), said


def test_a_limit_that_is_too_little_is_refused_with_one_that_works(model, tmp_path) -> None:
    with pytest.raises(RecipeError, match="is too little") as refused:
        nearplane.quantize(model, tmp_path / "out", calibration=str(CALIBRATION), memory="20MB", **TEXT)
    assert not (tmp_path / "out").exists()
    least = re.search(r"--memory ([\d.]+GB)", str(refused.value).split(" is too little")[1])
    assert least is not None
    limit = 1.05 * bytes_in(least[1])  # this process holds more with every test
    record = nearplane.quantize(model, tmp_path / "out", calibration=str(CALIBRATION), memory=int(limit), **TEXT)
    assert record.pace is not None
    assert record.pace.foreseen < limit
    assert read_record(tmp_path / "out").pace == record.pace


@pytest.mark.parametrize("memory", ["a lot", "0", "-3GB"])
def test_a_limit_that_is_no_size_is_refused(memory, model, tmp_path) -> None:
    with pytest.raises(RecipeError, match=r"memory is .*; expected a number of bytes"):
        nearplane.quantize(model, tmp_path / "out", calibration=str(CALIBRATION), memory=memory, **TEXT)


def test_what_nobody_can_foresee_has_no_limit(model, tmp_path) -> None:
    with pytest.raises(RecipeError, match="--memory: what quantizing takes cannot be foreseen"):
        nearplane.quantize(model, tmp_path / "out", bits=4, group_size=16, solver="round-to-nearest", memory="8GB")


@pytest.mark.parametrize(
    ("room", "disk"), [(0, False), (0, True), (1 << 30, True)], ids=["passes", "passes and a file", "pauses and a file"]
)
def test_the_same_bytes_come_out_however_memory_is_spared(room, disk, model, whole, tmp_path, monkeypatch) -> None:
    """But for the number of windows that pass at a time. And whoever was stopped goes on the same way."""
    batch = 8
    pace = Pace(limit=1 << 30, foreseen=1 << 29, batch=batch, room=room, disk=disk)
    monkeypatch.setattr("nearplane.beginning.paced", lambda *_: pace)
    monkeypatch.setattr("nearplane.notebook.SHARE", float("inf"))
    monkeypatch.setattr("nearplane.journal.PAGE", 1 << 14)
    stopped_behind(2, model, tmp_path / "out", monkeypatch, calibration=str(CALIBRATION), **TEXT)
    nearplane.quantize(model, tmp_path / "out", calibration=str(CALIBRATION), **TEXT)
    weights = {name: data for name, data in contents(tmp_path / "out").items() if name.endswith(".safetensors")}
    assert weights == {name: data for name, data in contents(whole).items() if name.endswith(".safetensors")}
    record = read_record(tmp_path / "out")
    assert record.pace == pace
    assert record.repeated == ()
    nearplane.verify(tmp_path / "out", against=model, calibration=str(CALIBRATION), device="cpu")


@pytest.mark.parametrize("few", [Pace(limit=1 << 34, foreseen=1 << 29, batch=2, room=0), None], ids=["a limit", "none"])
def test_what_was_begun_with_some_windows_at_a_time_goes_on_with_as_many(few, model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("nearplane.notebook.SHARE", float("inf"))
    options = dict(calibration=str(CALIBRATION), **TEXT)
    with monkeypatch.context() as patch:
        patch.setattr("nearplane.beginning.paced", lambda *_: few)
        stopped_behind(1, model, tmp_path / "out", monkeypatch, **options)
    tried = []

    def all_ways(work, way, *, batches):
        tried.extend(ways(work, way, batches=batches))
        return tried

    monkeypatch.setattr("nearplane.pacing.ways", all_ways)
    record = nearplane.quantize(model, tmp_path / "out", memory="100GB", **options)
    batch = 2 if few is not None else batch_of(TEXT["seqlen"])
    assert {way.batch for way in tried} == {batch}
    assert record.pace is not None
    assert record.pace.batch == batch
    assert record.pace.limit == 100_000_000_000


def test_a_run_that_goes_on_without_a_limit_keeps_to_the_one_it_had(model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("nearplane.notebook.SHARE", float("inf"))
    options = dict(calibration=str(CALIBRATION), **TEXT)
    stopped_behind(1, model, tmp_path / "out", monkeypatch, memory="90GB", **options)
    record = nearplane.quantize(model, tmp_path / "out", **options)
    assert record.pace is not None
    assert record.pace.limit == 90_000_000_000


def test_tuning_keeps_to_no_limit(model, tmp_path) -> None:
    with pytest.raises(RecipeError, match="--memory limits what quantizing takes, and tuning takes what it needs"):
        nearplane.quantize(model, tmp_path / "out", calibration=str(CALIBRATION), memory="8GB", tune="network", **TEXT)


def test_a_head_alone_at_a_rate_is_foreseen(model, tmp_path) -> None:
    options = dict(rate=3.0, samples=24, seqlen=40, device="cpu", ignore=(r"model\.layers\.",), include_head=True)
    record = nearplane.quantize(model, tmp_path / "out", calibration=str(CALIBRATION), **options)
    assert [layer.name for layer in record.layers] == ["lm_head"]

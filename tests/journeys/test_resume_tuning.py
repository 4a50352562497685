"""Tuning that is stopped at any moment goes on when the same is asked again, and ends with the same bytes."""

import importlib
import math
import os
import shutil

import pytest

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from killing import check_goes_on, contents
from killing import stopped_behind as stopped_quantizing
from nearplane import FormatError, RecipeError
from nearplane.demo import CALIBRATION
from nearplane.tuning import loop
from nearplane.tuning.schedule import OpenEnded

TEXT = dict(samples=12, seqlen=40)
STEPS = 8
WAYS = {
    "steps": dict(bits=4, group_size=16),
    "codes": dict(bits=2, group_size=16, symmetric=False, format="gptq_v2"),
    "entropy-coded": dict(rate=2.0, allocate="uniform"),
    "llama.cpp": dict(grid="q4_0"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    random_model(config_of("llama", vocab_size=TEXT_VOCABULARY, num_hidden_layers=2)).float().save_pretrained(folder)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(CALIBRATION.read_text()[:20000])
    return path


@pytest.fixture(autouse=True)
def every_step(monkeypatch):
    """Keep every step, however quick it is."""
    monkeypatch.setattr("nearplane.formats.journal_pages.MAX_JOURNAL_SHARE", math.inf)


@pytest.fixture(scope="module")
def made(model, text, tmp_path_factory):
    """Return a function from a key of WAYS to what was solved, and what tuning made of it that nobody stopped."""
    folders = {}

    def folders_of(way):
        if way not in folders:
            place = tmp_path_factory.mktemp("made")
            nearplane.quantize(model, place / "solved", calibration=str(text), **TEXT, **WAYS[way])
            nearplane.tune(place / "solved", place / "tuned", against=model, calibration=text, steps=STEPS)
            folders[way] = place / "solved", place / "tuned"
        return folders[way]

    return folders_of


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("way", "many"),
    [("codes", 1), *((way, 12) for way in WAYS)],
)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_tuning_that_is_killed_goes_on_and_ends_with_the_same_bytes(made, model, text, tmp_path, way, many):
    solved, tuned = made(way)
    check_goes_on(
        lambda out: nearplane.tune(solved, out, against=model, calibration=text, steps=STEPS),
        contents(tuned),
        tmp_path,
        many,
    )


class StoppedError(Exception):
    """What ends a run in these tests."""


def stopped_behind(steps, monkeypatch, run):
    """Run until so many steps are done."""
    step = loop._Run.step

    def stepped(self, batches):
        if self.done == steps:
            raise StoppedError
        step(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "step", stepped)
        with pytest.raises(StoppedError):
            run()


def test_no_step_is_taken_twice(made, model, text, tmp_path, monkeypatch, caplog):
    solved, tuned = made("entropy-coded")

    def run():
        nearplane.tune(solved, tmp_path / "out", against=model, calibration=text, steps=STEPS)

    stopped_behind(5, monkeypatch, run)
    assert [p.name for p in (tmp_path / "out.unfinished" / "journal").glob("*.pt")] == ["standing-000005.pt"]
    taken, step = [], loop._Run.step

    def noted(self, batches):
        taken.append(self.done)
        step(self, batches)

    monkeypatch.setattr(loop._Run, "step", noted)
    with caplog.at_level("INFO", "nearplane"):
        run()
    assert taken[0] == 5
    assert "resuming after step 5 a tuning run that was stopped after" in caplog.text
    assert contents(tmp_path / "out") == contents(tuned)


@pytest.mark.parametrize(("way", "behind"), [("codes", 8), ("entropy-coded", 11)])
def test_training_that_ends_by_itself_goes_on_in_a_fall_as_elsewhere(
    made, model, text, tmp_path, monkeypatch, way, behind
):
    for name, value in (("FIRST_STEPS", 6), ("SHORTEST_STEPS", 8)):
        monkeypatch.setattr(f"nearplane.tuning.schedule.{name}", value)
    monkeypatch.setattr("nearplane.tuning.schedule.FALL_SHARE", 0.5)
    monkeypatch.setattr("nearplane.tuning.schedule.LEAST_GAIN", -1.0)
    falls_after_6_and_15 = OpenEnded(27)
    monkeypatch.setattr("nearplane.planning.tuning_cost.TuningCost.schedule", lambda *_: falls_after_6_and_15)
    solved, _ = made(way)

    def run(out):
        return nearplane.tune(solved, out, against=model, calibration=text, budget=3)

    assert [point.step for point in run(tmp_path / "whole").tuning.curve] == [0, 9, 21]
    stopped_behind(behind, monkeypatch, lambda: run(tmp_path / "out"))
    run(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.nightly
def test_tuning_that_is_told_something_else_does_not_go_on(made, model, text, tmp_path, monkeypatch):
    solved, tuned = made("codes")
    out = tmp_path / "out"

    def run(**words):
        nearplane.tune(solved, out, against=model, calibration=text, **{"steps": STEPS} | words)

    stopped_behind(3, monkeypatch, run)
    with pytest.raises(RecipeError, match=r"steps was .*, is 2"):
        run(steps=2)
    page = out.with_name("out.unfinished") / "journal" / "standing-000003.pt"
    kept = page.read_bytes()
    page.write_bytes(kept[:-200])
    with pytest.raises(FormatError, match=page.name):
        run()
    page.write_bytes(kept)
    run(overwrite=True, steps=2)
    shutil.rmtree(out)
    run()
    assert contents(out) == contents(tuned)


def test_what_another_run_left_is_refused_before_the_solve(model, text, tmp_path, monkeypatch):
    """It was refused by the tuning, when all was solved."""
    out, words = tmp_path / "out", dict(calibration=str(text), **TEXT, **WAYS["steps"])
    stopped_quantizing(1, model, out, monkeypatch, **words)
    with pytest.raises(RecipeError, match=r"out\.unfinished belongs to a stopped run"):
        nearplane.quantize(model, out, tune="network", **words)
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == ["out.unfinished"]


@pytest.mark.nightly
def test_a_run_that_quantizes_and_tunes_goes_on_with_either(model, text, tmp_path, monkeypatch):
    words = dict(calibration=str(text), tune="network", **TEXT, **WAYS["codes"])
    nearplane.quantize(model, tmp_path / "whole", **words)
    stopped_behind(4, monkeypatch, lambda: nearplane.quantize(model, tmp_path / "out", **words))
    monkeypatch.setattr(importlib.import_module("nearplane.verbs.quantize"), "walk", None)
    nearplane.quantize(model, tmp_path / "out", **words)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]

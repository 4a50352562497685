"""Quantizing and tuning in one run: the two verbs one after the other, and OUT.untuned between them an ordinary checkpoint."""

import re
import shutil
from dataclasses import replace

import pytest

import forgery
import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane import RecipeError
from nearplane.demo import CALIBRATION
from nearplane.record.record_file import read_record
from nearplane.system.output_folder import Unfinished
from nearplane.tuning.schedule import SHORTEST_STEPS

WORDS = dict(bits=4, group_size=16, samples=12, seqlen=32, device="cpu", tune="network")


class StoppedError(Exception):
    """What ends a run in these tests."""


def stopped(*args, **words):
    raise StoppedError


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(CALIBRATION.read_text()[:20000])
    return path


def save_model(folder, blocks):
    config = config_of("llama", vocab_size=TEXT_VOCABULARY, num_hidden_layers=blocks)
    random_model(config).float().save_pretrained(folder)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "llama", blocks=1)


@pytest.fixture(scope="module")
def ended(model, text, tmp_path_factory):
    """Return the folder in which a run that wrote `out` was stopped before it deleted what it had solved."""
    place = tmp_path_factory.mktemp("ended")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nearplane.verbs.then_tuned.shutil.rmtree", only_outside(place / "out.untuned"))
        with pytest.raises(StoppedError):
            nearplane.quantize(model, place / "out", calibration=str(text), **WORDS)
    assert names(place) == ["out", "out.untuned"]
    return place


def only_outside(folder):
    """Return a function that deletes all folders but one, at which it stops."""
    delete = shutil.rmtree
    return lambda path, *args, **words: stopped() if path == folder else delete(path, *args, **words)


@pytest.fixture
def place(ended, tmp_path):
    """Return a copy of it that may be changed."""
    return shutil.copytree(ended, tmp_path / "place")


@pytest.fixture
def solved(place):
    """Return what was solved, as a run leaves it that is stopped while it tunes."""
    shutil.rmtree(place / "out")
    return place / "out.untuned"


@pytest.fixture
def again(place, text, model):
    """Return a function that gives the command again."""

    def run(source=model, out=place / "out", **words):
        return nearplane.quantize(source, out, **({"calibration": str(text)} | WORDS | words))

    return run


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def weights(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_the_same_command_tunes_what_it_had_solved(ended, solved, again, monkeypatch):
    """And writes what it would have written, had nobody stopped it."""
    monkeypatch.setattr("nearplane.planning.solve_stage.solve_layer", stopped)
    again()
    assert weights(solved.parent / "out") == weights(ended / "out")
    assert names(solved.parent) == ["out"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda solved: (solved / "INCOMPLETE").touch(), r"out\.untuned is incomplete"),
        (lambda solved: (solved / "nearplane.json").unlink(), r"has no nearplane\.json"),
        (lambda solved: (solved / "nearplane.json").write_text("{"), r"nearplane\.json is not a record"),
        (
            lambda solved: forgery.sign(solved, replace(read_record(solved), source="x")),
            "its model or options differ",
        ),
        (lambda solved: shutil.copy(solved.parent / "tuned.json", solved / "nearplane.json"), "it is tuned already"),
    ],
)
def test_why_what_was_solved_is_not_tuned_is_said(ended, solved, again, change, said):
    shutil.copy(ended / "out" / "nearplane.json", solved.parent / "tuned.json")
    change(solved)
    before = names(solved)
    for overwrite in (False, True):
        with pytest.raises(RecipeError, match=rf"out\.untuned, where .*, is not from this command: .*{said}"):
            again(overwrite=overwrite)
    assert names(solved) == before


def test_another_recipe_is_refused(solved, again):
    with pytest.raises(RecipeError, match=r"its model or options differ\. Delete"):
        again(bits=3, group_size=32)


def until_the_second_block(items, label, total):
    for number, item in enumerate(items):
        if number > total // 2:
            raise StoppedError
        yield item


@pytest.mark.nightly
def test_overwrite_begins_a_solve_anew_that_was_stopped(place, solved, again, tmp_path, monkeypatch):
    """The sentence that refuses it names --overwrite."""
    source = save_model(tmp_path / "model", blocks=2)
    shutil.rmtree(solved)
    monkeypatch.setattr("nearplane.formats.journal_pages.MAX_JOURNAL_SHARE", float("inf"))
    with pytest.raises(StoppedError):
        again(source, bits=3, progress=until_the_second_block)
    assert names(place) == ["out.untuned.unfinished"]
    with pytest.raises(RecipeError, match="--overwrite to start again"):
        again(source)
    monkeypatch.setattr("nearplane.verbs.then_tuned.tune", stopped)
    with pytest.raises(StoppedError):
        again(source, overwrite=True)
    assert read_record(solved).recipe.scheme.bits == 4
    with pytest.raises(StoppedError):  # and is what the same command goes on with
        again(source)


def test_an_output_that_is_there_is_refused_and_nothing_is_deleted(place, again):
    before = weights(place / "out.untuned")
    with pytest.raises(RecipeError, match="out exists and is not empty"):
        again()
    assert weights(place / "out.untuned") == before


def test_one_run_alone_tunes(place, solved, again):
    with (
        Unfinished(place / "out"),
        pytest.raises(RecipeError, match=r"out is being written by another run: process .* Wait"),
    ):
        again()
    assert solved.exists()


@pytest.mark.parametrize("tune", ["none", "network"])
def test_an_output_that_holds_the_model_or_lies_in_it_is_refused_before_the_solve(place, again, model, tune):
    """With --overwrite the model would go with what it lies in."""
    within = shutil.copytree(model, place / "out" / "model")
    unfinished = shutil.copytree(model, place / "out.unfinished")
    for source, out in ((within, "out"), (unfinished, "out"), (within, "out/model/new"), (within, "out/model")):
        with pytest.raises(RecipeError, match=r"overlaps with|did not write it"):
            again(source, out=place / out, overwrite=True, progress=stopped, tune=tune)
    assert names(within) == names(unfinished) == names(model)


def test_tuning_that_gets_too_little_time_does_not_begin_and_says_what_would_do(model, text, tmp_path, caplog):
    asked = WORDS | {"calibration": str(text)}
    record = nearplane.quantize(model, tmp_path / "plain", **asked | {"tune": "auto=2"})
    assert record.tuning is None
    said = re.search(
        r"--tune auto=2 allows too little time, so that nothing is tuned: .* Use --tune auto=([\d.]+)\.", caplog.text
    )
    with pytest.raises(RecipeError, match=rf"--budget 2 is too small: .* Use --budget {said[1]}, or --steps"):
        nearplane.tune(tmp_path / "plain", tmp_path / "tuned", against=model, budget=2)
    record = nearplane.quantize(model, tmp_path / "out", **asked | {"tune": f"auto={said[1]}"})
    assert record.tuning.steps == SHORTEST_STEPS
    assert [point.step for point in record.tuning.curve] == [0, SHORTEST_STEPS]
    assert record.tuning.held_out < record.tuning.start
    assert nearplane.verify(tmp_path / "out", against=model).faults == ()
    assert names(tmp_path) == ["out", "plain"]


def test_a_stopped_run_whose_tuning_does_not_begin_is_resumed(text, tmp_path, monkeypatch, caplog):
    source, asked = save_model(tmp_path / "model", blocks=2), WORDS | {"calibration": str(text), "tune": "auto=0.1"}
    monkeypatch.setattr("nearplane.formats.journal_pages.MAX_JOURNAL_SHARE", float("inf"))
    with pytest.raises(StoppedError):
        nearplane.quantize(source, tmp_path / "out", progress=until_the_second_block, **asked)
    assert names(tmp_path) == ["model", "out.unfinished"]
    with caplog.at_level("INFO", "nearplane"):
        assert nearplane.quantize(source, tmp_path / "out", **asked).tuning is None
    assert "resuming" in caplog.text


@pytest.mark.parametrize("tune", ["auto=", "auto=0", "auto=nan", "auto=1e9", "often", "network=3"])
def test_times_that_are_none_are_refused(model, tmp_path, tune):
    with pytest.raises(RecipeError, match=r"expected none, network, auto, or auto=FACTOR"):
        nearplane.quantize(model, tmp_path / "out", tune=tune)

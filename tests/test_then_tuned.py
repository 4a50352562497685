"""Quantizing and tuning in one run: what is solved is tuned by the run that solved it, and gone when that is done."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import forgery
import nearplane
from families import config_of, random_model
from nearplane import RecipeError, then_tuned
from nearplane.alone import alone
from nearplane.demo import CALIBRATION, MODEL
from nearplane.record import read_record

WORDS = dict(bits=4, group_size=16, samples=12, seqlen=40, device="cpu", tune="network")


class StoppedError(Exception):
    """What ends a run in these tests."""


def stopped(*args, **words):
    raise StoppedError


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(CALIBRATION.read_text()[:20000])
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    random_model(config_of("llama", vocab_size=2048, num_hidden_layers=2)).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((MODEL / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def ended(model, text, tmp_path_factory):
    """Return the folder in which a run that wrote `out` was stopped before it deleted what it had solved."""
    place = tmp_path_factory.mktemp("ended")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nearplane.then_tuned._delete", stopped)
        with pytest.raises(StoppedError):
            nearplane.quantize(model, place / "out", calibration=str(text), **WORDS)
    assert names(place) == ["out", "out.untuned", "out.untuned.json"]
    return place


@pytest.fixture
def place(ended, tmp_path):
    """Return a copy of it that may be changed."""
    return shutil.copytree(ended, tmp_path / "place")


@pytest.fixture
def solved(place):
    """Return what was solved, beside it what it was solved for, as a run leaves it that is stopped while it tunes."""
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


def test_codes_are_not_tuned_against_weights_that_they_were_not_solved_for(solved, again, model, tmp_path, monkeypatch):
    """A fine-tuned model takes the place of the one that was solved, under its name."""
    same = shutil.copytree(model, tmp_path / "same" / "llama")
    monkeypatch.chdir(same.parent)
    forgery.sign(solved, replace(read_record(solved), source="llama"))
    monkeypatch.setattr("nearplane.then_tuned.tune", stopped)
    with pytest.raises(StoppedError):
        again("llama")
    tensors = load_file(same / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1.01
    save_file(tensors, same / "model.safetensors", {"format": "pt"})
    for overwrite in (False, True):
        with pytest.raises(
            RecipeError, match=r"did not leave it: .* another value of the model's model\.safetensors\."
        ):
            again("llama", overwrite=overwrite)
    assert names(solved.parent) == ["out.untuned", "out.untuned.json"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda solved: (solved / "INCOMPLETE").touch(), r"out\.untuned is incomplete"),
        (lambda solved: (solved / "nearplane.json").unlink(), r"holds no nearplane\.json"),
        (lambda solved: (solved / "nearplane.json").write_text("{"), r"nearplane\.json is not a record"),
        (lambda solved: Path(f"{solved}.json").unlink(), r"untuned\.json cannot be read \(there is none\)"),
        (
            lambda solved: forgery.sign(solved, replace(read_record(solved), versions={"torch": "0.1"})),
            "another value of version of torch",
        ),
        (lambda solved: forgery.sign(solved, replace(read_record(solved), device="cuda")), "another value of device"),
        (lambda solved: forgery.sign(solved, replace(read_record(solved), source="x")), "the name of the model"),
    ],
)
def test_why_what_was_solved_is_not_tuned_is_said(solved, again, change, said):
    change(solved)
    with pytest.raises(RecipeError, match=rf"out\.untuned is there, .* this command did not leave it: .*{said}"):
        again()


def test_another_recipe_is_named(solved, again):
    with pytest.raises(RecipeError, match=r"another value of bits, group_size\. Move it away"):
        again(bits=3, group_size=32)


def test_overwrite_begins_a_solve_anew_that_was_stopped(place, solved, again, monkeypatch):
    """The sentence that refuses it names --overwrite."""
    shutil.rmtree(solved)
    monkeypatch.setattr("nearplane.notebook.SHARE", float("inf"))

    def until_the_second_block(items, label, total):
        for number, item in enumerate(items):
            if number > total // 2:
                raise StoppedError
            yield item

    with pytest.raises(StoppedError):
        again(bits=3, progress=until_the_second_block)
    assert names(place) == ["out.untuned.json", "out.untuned.unfinished"]
    with pytest.raises(RecipeError, match="--overwrite to begin anew"):
        again()
    monkeypatch.setattr("nearplane.then_tuned.tune", stopped)
    with pytest.raises(StoppedError):
        again(overwrite=True)
    assert read_record(solved).recipe.scheme.bits == 4
    with pytest.raises(StoppedError):  # and is what the same command goes on with
        again()


def test_what_was_solved_is_deleted_by_the_next_run_where_one_was_stopped_before_it_could(place, again):
    with pytest.raises(RecipeError, match="out exists and is not empty"):
        again()
    assert names(place) == ["out"]


@pytest.mark.parametrize("many", range(7))
def test_what_is_half_deleted_is_deleted_by_the_next_run(place, again, monkeypatch, many):
    moments, unlink = [], Path.unlink

    def until(path, missing_ok=False):
        moments.append(path)
        if len(moments) > many:
            raise StoppedError
        unlink(path, missing_ok)

    (place / "out" / "nearplane.json").unlink()  # it does not tell by this
    shutil.copy(place / "out.untuned" / "nearplane.json", place / "kept.json")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", until)
        with pytest.raises(StoppedError):
            then_tuned._delete(place / "out.untuned")
    assert (place / "out.untuned").exists()
    with pytest.raises(RecipeError, match="out exists and is not empty"):
        again()
    assert names(place) == ["kept.json", "out"]


def test_what_another_run_solved_is_not_deleted(place, again):
    """The same command with --overwrite solves the same to the byte: it is told by the time that it took."""
    before = read_record(place / "out.untuned")
    forgery.sign(place / "out.untuned", replace(before, seconds=before.seconds + 1))
    with pytest.raises(RecipeError, match="out exists and is not empty"):
        again()
    assert names(place) == ["out", "out.untuned", "out.untuned.json"]


def test_one_run_alone_solves_and_tunes(place, solved, again):
    with (
        alone(Path(f"{solved}.lock"), "no"),
        pytest.raises(RecipeError, match=r"out is being written by another run\. Wait"),
    ):
        again()
    assert names(place) == ["out.untuned", "out.untuned.json"]


@pytest.mark.parametrize("tune", ["none", "network"])
def test_an_output_that_holds_the_model_or_lies_in_it_is_refused_before_the_solve(place, again, model, tune):
    """With --overwrite the model would go with what it lies in."""
    within = shutil.copytree(model, place / "out" / "model")
    unfinished = shutil.copytree(model, place / "out.unfinished")
    for source, out in ((within, "out"), (unfinished, "out"), (within, "out/model/new"), (within, "out/model")):
        with pytest.raises(RecipeError, match=r"is, holds or lies in|did not write it"):
            again(source, out=place / out, overwrite=True, progress=stopped, tune=tune)
    assert names(within) == names(unfinished) == names(model)

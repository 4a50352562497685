"""Two commands on one OUT at the same time: one succeeds, the other is refused, and nothing is mixed."""

import re
import time

import pytest

import nearplane
from children import command
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane.demo import CALIBRATION

REPETITIONS = [0, *(pytest.param(repetition, marks=pytest.mark.nightly) for repetition in range(1, 10))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    random_model(config_of("llama", vocab_size=TEXT_VOCABULARY, num_hidden_layers=2)).float().save_pretrained(folder)
    add_tokenizer(folder)
    return folder


@pytest.mark.parametrize("repetition", REPETITIONS)
def test_of_two_runs_on_one_folder_one_succeeds_and_the_other_is_refused(model, tmp_path, repetition):
    """The second begins up to a second after the first."""
    out = tmp_path / "out"
    words = ["quantize", model, out, "--calibration", CALIBRATION, "--bits"]
    more = ["--group-size", "16", "--samples", "24", "--seqlen", "60"]
    runs = []
    for bits in ("3", "4"):
        runs.append(command(*words, bits, *more))
        time.sleep(repetition % 4 / 4)
    codes, outputs, errors = zip(*(run.ended() for run in runs), strict=True)
    assert sorted(codes) == [0, 1], errors
    refused = " ".join(errors[codes.index(1)].split())
    assert f"{out} is being written by another run" in refused or f"{out} exists and is not empty" in refused
    assert "Traceback" not in refused
    assert re.search(r"; peak memory [\d.]+ [MG]B\n", outputs[codes.index(0)])
    last = errors[codes.index(0)].splitlines()[-1]
    assert re.fullmatch(r"quantizing: block 2 of 2, layer 14 of 14, [^,]+", last)  # a line, as there is no terminal
    found = nearplane.verify(out)
    assert found.faults == ()
    assert found.record.recipe.scheme.bits == (3, 4)[codes.index(0)]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

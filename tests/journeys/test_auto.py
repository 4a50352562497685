"""`nearplane auto`: from a model's name to a measured checkpoint, with what it says before and after."""

from __future__ import annotations

import io
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nearplane
from checkpoints import save_part_of_the_demo
from families import TEXT_VOCABULARY, add_tokenizer, config_of
from killing import contents
from model_types import save_type
from nearplane.cli.app import app
from nearplane.demo import CALIBRATION, HELD_OUT
from nearplane.errors import ModelError, RecipeError
from nearplane.record.record_file import read_record
from nearplane.verbs import auto as module
from nearplane.verbs import auto_way as way
from nearplane.verbs import suggest as suggesting
from nearplane.verbs.auto import choose, is_done
from nearplane.verbs.auto_request import AutoRequest

FEW = {"samples": 8, "seqlen": 128, "device": "cpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a part of the demo's model."""
    return save_part_of_the_demo(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, without the datasets package and without a GPU; return the folder."""
    monkeypatch.setenv("NEARPLANE_CACHE", str(tmp_path / "cache"))
    for each in (module, suggesting):
        monkeypatch.setattr(each, "hub_fault", lambda: "the datasets package is missing")
    monkeypatch.setattr(way, "_runtime_here", lambda: "llama.cpp")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize(
    ("asked", "options", "folder"),
    [
        ({}, {"grid": "q4_k_m"}, "small-q4_k_m"),
        ({"runtime": "vllm"}, {"bits": 4}, "small-int4"),
        ({"runtime": "vllm", "bits": 3}, {"bits": 3}, "small-int3"),
        ({"runtime": "sglang"}, {"bits": 4}, "small-int4"),
        ({"runtime": "gptqmodel"}, {"bits": 4, "format": "gptq"}, "small-int4-gptq"),
        ({"runtime": "nearplane", "bits": 3}, {"rate": 3.0}, "small-rate3"),
        ({"bits": 5}, {"grid": "q5_k_m"}, "small-q5_k_m"),
        ({"memory": "10MB", "runtime": "mlx"}, {"bits": 8, "group_size": 64, "format": "mlx"}, "small-mlx8"),
        ({"size": "500KB"}, {"size": "500KB"}, "small-500KB"),
        ({"size": "1MB", "runtime": "llama.cpp"}, {"size": "1MB", "format": "gguf"}, "small-1MB-gguf"),
        ({"size": "1MB", "runtime": "vllm"}, {"grid": "int8"}, "small-int8"),
        ({"size": "800KB", "runtime": "vllm"}, {"size": "800KB"}, "small-800KB-vllm"),
        ({"size": "680KB", "runtime": "vllm"}, {"bits": 3}, "small-int3"),
        ({"size": "800KB", "runtime": "mlx"}, {"size": "800KB"}, "small-800KB-mlx"),
        ({"memory": "1.8MB", "runtime": "mlx"}, {"served_memory": "1.8MB", "context": 1024}, "small-1.8MB-mlx"),
        ({"memory": "1.8MB", "runtime": "vllm"}, {"served_memory": "1.8MB", "context": 1024}, "small-1.8MB-vllm"),
        (
            {"memory": "1.6MB", "runtime": "llama.cpp"},
            {"served_memory": "1.6MB", "context": 1024},
            "small-1.6MB-llama.cpp",
        ),
        ({"memory": "1.7MB", "runtime": "vllm"}, {"bits": 3}, "small-int3"),
        ({"memory": "1.8MB", "runtime": "transformers"}, {"bits": 4, "format": "gptq"}, "small-int4-gptq"),
    ],
)
def test_the_way_suits_what_is_asked(asked: dict[str, Any], options: dict[str, Any], folder: str, model: Path) -> None:
    """A memory, a size, a number of bits or nothing, for each runtime."""
    choice = choose(AutoRequest(model, **asked, **FEW))
    named = {"runtime": asked["runtime"]} if "runtime" in asked else {}
    assert choice.options == options | named | {"calibration": "self", "samples": 8, "seqlen": 128}
    assert str(choice.out) == folder
    assert choice.text == "self"
    assert len(choice.lines) == 5


@pytest.mark.parametrize("memory", ["1GB", "900KB"])
def test_experts_get_a_way_that_names_its_program_where_it_needs_one(memory: str, tmp_path: Path) -> None:
    """Where nothing else is asked, and the type has no GGUF."""
    save_type(tmp_path / "experts", "phimoe", torch.bfloat16, vocab_size=TEXT_VOCABULARY, hidden_size=128)
    add_tokenizer(tmp_path / "experts")
    found = nearplane.suggest(tmp_path / "experts", memory)
    assert any("--runtime vllm" in row.options for row in found.rows)
    choice = choose(AutoRequest(tmp_path / "experts", memory=memory, **FEW))
    assert f"way: {found.fitting[0].options}," in choice.lines[0]


def test_from_a_model_to_a_measured_checkpoint(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its last line serves the result; the same command measures again what is complete, and writes the same figures."""
    words = [
        "auto",
        str(model),
        "--memory",
        "2MB",
        "--runtime",
        "vllm",
        "--context",
        "256",
        "--samples",
        "8",
        "--seqlen",
        "128",
    ]
    app([*words, "--device", "cpu", "--yes"], exit_on_error=False, result_action="return_value")
    said = capsys.readouterr().out.splitlines()
    assert any(line.startswith("KL(original || model)") for line in said), "the evaluation has a line for each figure"
    out = here / "small-int8"
    record, figures = read_record(out), here / "small-int8-evaluation.json"
    assert said[0] == "way: --grid int8, which loses least of what fits in 2.00 MB"
    assert said[1].startswith("calibration: 1,152 tokens of text that the network writes itself")
    assert record.tokens == 1024
    assert said[-1] == "use it: vllm serve small-int8"
    assert said[-2] == f"checkpoint: small-int8; report: {here / 'small-int8-report.html'}"
    evaluation = json.loads(figures.read_text())
    assert f"{evaluation['kl']:.5f} nats per token" in "\n".join(said)
    assert "KL" in (out / "README.md").read_text()
    before = contents(out)
    app([*words, "--device", "cpu", "--yes"], exit_on_error=False, result_action="return_value")
    assert contents(out) == before
    assert json.loads(figures.read_text())["kl"] == evaluation["kl"]
    assert nearplane.verify(out, against=str(model)).faults == ()


def test_a_memory_between_two_formats_is_filled_by_a_mix(model: Path, here: Path) -> None:
    """Weights and cache are within it; the folder is complete for this memory and context, and for no other."""
    asked = AutoRequest(
        model, memory="1.1MB", runtime="vllm", context=256, calibration=str(CALIBRATION), text=str(HELD_OUT), **FEW
    )
    done = nearplane.auto(asked)
    mix = done.record.mix
    assert mix is not None
    assert (mix.option, mix.context) == ("served-memory", 256)
    assert 1.0e6 < mix.spent <= 1.1e6
    assert len({layer.number_format.name for layer in done.record.layers}) > 1
    assert done.serve == "vllm serve small-1.1MB-vllm"
    for other, complete in (({}, True), ({"memory": "1.2MB"}, False), ({"context": 255}, False)):
        choice = choose(replace(asked, out=here / "elsewhere", **other))
        assert is_done(done.out, asked, choice.options) == complete


def test_the_commands_of_a_dry_run_do_the_same(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each step is another verb: the weights have the same bytes."""
    asked = AutoRequest(model, bits=4, runtime="vllm", calibration=str(CALIBRATION), text=str(HELD_OUT), **FEW)
    words = [str(model), "--bits", "4", "--runtime", "vllm", "--calibration", CALIBRATION, "--text", HELD_OUT]
    more = ["--samples", "8", "--seqlen", "128", "--device", "cpu", "--dry-run"]
    app(["auto", *map(str, words), *more], exit_on_error=False, result_action="return_value")
    commands = [line for line in capsys.readouterr().out.splitlines() if line.startswith("nearplane ")]
    assert commands == [*choose(asked).commands]
    assert "--seqlen 128 --json" in commands[1]
    assert not [*here.iterdir()]
    done = nearplane.auto(asked)
    by_auto = contents(done.out)
    assert done.evaluation.kl is not None
    assert done.serve == "vllm serve small-int4"
    for place in here.iterdir():
        place.rename(here.parent / place.name)
    app(shlex.split(commands[0])[1:], exit_on_error=False, result_action="return_value")
    weights = [name for name in by_auto if str(name).endswith(".safetensors")]
    assert weights
    assert {name: contents(done.out)[name] for name in weights} == {name: by_auto[name] for name in weights}


def test_it_asks_once_and_needs_a_terminal_for_that(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one --yes is needed; an answer but yes does nothing."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("no\n"))
    with pytest.raises(
        RecipeError, match=r"auto asks before it works, but its input is no terminal\. Add --yes, or --dry-run"
    ):
        app(["auto", str(model)], exit_on_error=False, result_action="return_value")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    app(["auto", str(model)], exit_on_error=False, result_action="return_value")
    assert capsys.readouterr().out.splitlines()[-1].endswith("nothing was done")
    assert not [*here.iterdir()]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"memory": "8GB", "bits": 4},
            r"--memory and --bits are given, each of which decides the number of bits. Keep one",
        ),
        ({"memory": "8GB", "size": "1GB"}, r"--memory and --size are given"),
        ({"memory": "10KB"}, r"Nothing fits in 10\.0 KB"),
        ({"context": 100}, r"--context counts in --memory, which is not given"),
        ({"bits": 7, "runtime": "vllm"}, r"--bits 7 is no way for vllm and this model. Use one of 2, 3, 4, 8"),
        ({"size": "10KB", "runtime": "vllm"}, r"--size 10KB: for vllm, the smallest has \d+ KB of weights"),
        ({"text": str(HELD_OUT), "calibration": str(HELD_OUT)}, r"--text and --calibration are both .*heldout.txt"),
        ({"bits": 9}, r"bits is 9; expected"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], said: str, model: Path, here: Path) -> None:
    with pytest.raises(RecipeError, match=said):
        nearplane.auto(model, **asked)
    assert not [*here.iterdir()]


def test_a_folder_in_use_is_refused(model: Path, here: Path) -> None:
    """One with other files, and a checkpoint of other options."""
    (here / "small-q4_k_m").mkdir()
    (here / "small-q4_k_m" / "notes.txt").write_text("mine")
    with pytest.raises(RecipeError, match=r"small-q4_k_m exists"):
        nearplane.auto(model)
    record = nearplane.quantize(model, here / "out", bits=4, solver="round-to-nearest")
    assert record.layers
    with pytest.raises(RecipeError, match=r"out exists"):
        nearplane.auto(model, here / "out", bits=4, runtime="vllm", **FEW)


def test_a_model_that_the_runtime_does_not_take_is_refused(here: Path) -> None:
    """Falcon has no GGUF."""
    config_of("falcon", hidden_size=96, num_attention_heads=4, vocab_size=96).save_pretrained(here / "falcon")
    with pytest.raises(
        RecipeError, match=r"None of these \d+ ways is possible for this model: .*nearplane writes a GGUF of"
    ):
        nearplane.auto(here / "falcon", runtime="llama.cpp")
    with pytest.raises(ModelError, match=r"nothing does not exist"):
        nearplane.auto(here / "nothing")


@pytest.mark.parametrize("name", ["small-int4-evaluation.json", "small-int4-report.html"])
def test_files_of_somebody_else_are_refused_before_the_work(name: str, model: Path, here: Path) -> None:
    (here / name).write_text('{"mine": 1}')
    with pytest.raises(RecipeError, match=rf"{name} exists and was not written by nearplane"):
        choose(AutoRequest(model, runtime="vllm", **FEW))
    assert (here / name).read_text() == '{"mine": 1}'

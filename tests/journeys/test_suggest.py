"""What `nearplane suggest` says before a run is what the run writes."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nearplane
from checkpoints import save_part_of_the_demo
from families import MOE, TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane.cli.app import app
from nearplane.errors import ModelError, RecipeError
from nearplane.formats.gguf.gguf_header import FILE, read_header
from nearplane.planning.modes import MODES
from nearplane.system.safetensors_files import ShardReader
from nearplane.verbs import suggest as module
from nearplane.verbs.suggest import GOOD_LOSS

SIZES = dict(
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=256,
    moe_intermediate_size=128,
    head_dim=16,
    vocab_size=TEXT_VOCABULARY,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of small models: with experts, with tied embeddings and with a head of its own."""
    folder = tmp_path_factory.mktemp("models")
    random_model(config_of("qwen3_moe", norm_topk_prob=True, **MOE | SIZES)).bfloat16().save_pretrained(
        folder / "experts"
    )
    add_tokenizer(folder / "experts")
    save_part_of_the_demo(folder / "tied")
    save_part_of_the_demo(folder / "untied", own_head=True)
    return {path.name: path for path in folder.iterdir()}


def without_weights(model: Path, place: Path) -> Path:
    """Return a copy of a model's folder that has config.json alone."""
    place.mkdir()
    shutil.copyfile(model / "config.json", place / "config.json")
    return place


def written_bytes(out: Path) -> int:
    """Return the bytes of all tensors of a checkpoint."""
    if (out / FILE).exists():
        return sum(info.size for info in read_header(out / FILE).tensors)
    reader = ShardReader(out)
    return sum(map(reader.nbytes, reader.names()))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("tied", "--bits 4"),
        ("untied", "--grid int8"),
        pytest.param("tied", "--grid nvfp4", marks=pytest.mark.nightly),
        ("experts", "--grid fp8"),
        ("untied", "--bits 3 --no-symmetric --format gptq_v2"),
        ("experts", "--bits 4"),
        ("tied", "--grid q4_k_m"),
        pytest.param("untied", "--grid q2_k", marks=pytest.mark.nightly),
        pytest.param("experts", "--grid q3_k_m", marks=pytest.mark.nightly),
        pytest.param("experts", "--bits 4 --group-size 64 --format mlx", marks=pytest.mark.nightly),
        ("tied", "--bits 3 --group-size 64 --format mlx"),
        ("tied", "--rate 2.125"),
    ],
)
def test_the_weights_take_what_was_said(model: str, words: str, models: dict[str, Path], tmp_path: Path) -> None:
    """To the byte on grids, and within 1 % at a rate, of which coding decides."""
    rows = nearplane.suggest(without_weights(models[model], tmp_path / "config"), "1GB").rows
    (row,) = [row for row in rows if row.options == words]
    assert not row.refused
    (mode,) = [mode for mode in MODES if mode.words == words]
    nearplane.quantize(models[model], tmp_path / "out", solver="round-to-nearest", **mode.options)
    size = written_bytes(tmp_path / "out")
    assert row.weights == (pytest.approx(size, rel=0.01) if "--rate" in words else size)


def test_memory_is_weights_and_cache_and_the_least_loss_is_first(models: dict[str, Path]) -> None:
    """Of 2 blocks with 2 heads of 64 numbers for keys and values each."""
    found = nearplane.suggest(models["tied"], "1.2MB", context=512)
    assert found.cache == 2 * 2 * (2 * 64) * 512 * 2
    as_stored = [row for row in found.rows if row.runtimes != ("nearplane",)]
    assert all((row.memory or 0) - (row.weights or 0) == found.cache for row in as_stored)
    assert all(row.fits == ((row.memory or 0) <= 1_200_000) for row in found.rows)
    assert 0 < len(found.fitting) < len(found.rows)
    losses = [row.loss.mean for row in found.rows]
    assert losses == sorted(losses)
    assert found.remedy == ""


@pytest.mark.parametrize("model", ["tied", "experts"])
def test_entropy_coded_weights_take_in_memory_about_what_was_said(
    model: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """More than in the file, and 16 bits for experts, which are decoded. Small layers add a step for every row and column."""
    found = nearplane.suggest(models[model], "1GB", runtime="nearplane", context=16)
    assert [row.options for row in found.rows] == ["--rate 3.125", "--rate 2.125", "--rate 1.5"]
    row = found.rows[1]
    nearplane.quantize(models[model], tmp_path / "out", rate=2.125, solver="round-to-nearest")
    network = nearplane.load(tmp_path / "out")
    storages = (each.untyped_storage() for each in (*network.parameters(), *network.buffers()))
    size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    assert row.memory is not None
    assert row.memory - (found.cache or 0) == pytest.approx(size, rel=0.1)
    assert size > 1.1 * (row.weights or 0)


def test_where_nothing_fits_what_would_is_said(models: dict[str, Path]) -> None:
    """And it does: the smallest that is about as good as 4 bits."""

    def good(memory: str, context: int) -> bool:
        found = nearplane.suggest(models["tied"], memory, context=context, runtime="mlx")
        return any(row.loss.mean <= GOOD_LOSS for row in found.fitting)

    found = nearplane.suggest(models["tied"], "900KB", context=1024, runtime="mlx")
    assert not found.fitting
    words = found.remedy.split()
    assert found.remedy.startswith(
        "Nothing fits in 900 KB: the smallest, --bits 2 --group-size 64 --format mlx, takes "
    )
    memory, context = words[words.index("--memory") + 1].rstrip(","), int(words[words.index("--context") + 1])
    assert "and loses 20 times as much as --bits 4 --group-size 64 --format mlx, 1.78 MB" in found.remedy
    assert good(memory, 1024)
    assert good("900KB", context)
    assert not good("900KB", context + 1)
    assert "--context" not in nearplane.suggest(models["tied"], 1000, context=1024).remedy


def test_what_quantize_refuses_is_not_suggested(tmp_path: Path) -> None:
    """Falcon has no GGUF, and its width is no multiple of 64."""
    config_of("falcon", hidden_size=96, num_attention_heads=4, vocab_size=96).save_pretrained(tmp_path)
    found = nearplane.suggest(tmp_path, "1GB")
    refused = {row.options: row.refused for row in found.rows if row.refused}
    assert "nearplane writes a GGUF of" in refused["--grid q4_k_m"]
    assert "not a multiple of the group size 64" in refused["--bits 4 --group-size 64 --format mlx"]
    assert "--bits 4" not in refused
    assert not any(row.fits for row in found.rows if row.refused)


def test_experts_in_gptq_are_not_suggested_for_transformers(models: dict[str, Path]) -> None:
    """It would fill them with random numbers; GPTQModel reads them."""
    found = nearplane.suggest(models["experts"], "1GB", runtime="transformers")
    assert not found.fitting
    assert found.remedy.startswith(
        "None of these 3 ways is possible for this model: transformers does not keep experts packed in int4-g128."
    )
    rows = {row.options: row for row in nearplane.suggest(models["experts"], "1GB").rows}
    assert rows["--bits 3 --no-symmetric --format gptq_v2"].runtimes == ("gptqmodel",)
    assert (rows["--bits 3"].fits, rows["--bits 3"].runtimes) == (True, ("vllm",))
    assert nearplane.suggest(models["experts"], "1GB", runtime="gptqmodel").fitting


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory": "lots"}, "--memory is 'lots'; expected a number of bytes"),
        ({"memory": "8GB", "context": 0}, "context is 0; expected a whole number, at least 1"),
        ({"memory": "8GB", "context": 2048}, r"--context is 2,048, but the maximum length of .* is 1,024 tokens"),
        ({"memory": "8GB", "runtime": "ollama"}, "runtime is 'ollama'; expected one of vllm, sglang, transformers"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], said: str, models: dict[str, Path]) -> None:
    with pytest.raises(RecipeError, match=said):
        nearplane.suggest(models["tied"], **options)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json cannot be read \(the file is missing\)"):
        nearplane.suggest(tmp_path, "8GB")


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    app(["suggest", *map(str, words)], exit_on_error=False, result_action="return_value")
    return capsys.readouterr().out


def test_the_command_prints_what_fits_and_how_to_make_it(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = models["tied"]
    out = printed(capsys, model, "--memory", "1.2MB", "--context", 512)
    assert "keys and values of 512 tokens take 524 KB" in out
    lines = out.splitlines()
    commands = [line.split() for line in lines if line.strip().startswith("nearplane quantize")]
    found = nearplane.suggest(model, "1.2MB", context=512)
    assert [shlex.join(words) for words in commands] == [row.command for row in found.fitting[:6]]
    assert f"of what fits, {found.fitting[0].options} loses least: " in out
    assert "too large:" not in out
    assert " more ways fit less well, are too large or are not possible for this model: see --all" in lines[-1]
    every = printed(capsys, model, "--memory", "1.2MB", "--context", 512, "--all")
    assert every.count("nearplane quantize") == len(found.fitting)
    assert "too large: --grid q8_0 (" in every
    data = json.loads(printed(capsys, model, "--memory", "1.2MB", "--context", 512, "--json"))
    assert {row["fits"] for row in data["rows"]} == {True, False}
    assert data["rows"][-1]["loss"]["models"] == 3


def test_nothing_that_fits_is_a_failure(models: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """With code 1 and the remedy on the error stream, also beside JSON."""
    for more in ((), ("--json",)):
        with pytest.raises(SystemExit) as ended:
            printed(capsys, models["tied"], "--memory", "1KB", *more)
        assert ended.value.code == 1
        assert capsys.readouterr().err.splitlines()[-1].startswith("nearplane: Nothing fits in 1.00 KB")


def test_the_commands_run_as_printed(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the datasets package is missing, the network writes the calibration text; the folder is named after both."""
    monkeypatch.setattr(module, "hub_fault", lambda: "the datasets package is missing")
    monkeypatch.setenv("NEARPLANE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (row,) = [row for row in nearplane.suggest(models["tied"], "1GB").rows if row.options == "--bits 4"]
    words = shlex.split(row.command)
    assert words == ["nearplane", "quantize", str(models["tied"]), "tied-int4", "--bits", "4", "--calibration", "self"]
    app([*words[1:], "--samples", "8", "--seqlen", "128"], exit_on_error=False, result_action="return_value")
    assert (tmp_path / "tied-int4" / "config.json").is_file()


def test_names_of_folders_are_unlike() -> None:
    """Each way has its own."""
    assert len({mode.name for mode in MODES}) == len(MODES)


def test_a_gguf_loses_what_the_types_in_it_lose(tmp_path: Path) -> None:
    """Rows of 64 get q4_0 instead of q2_k, which loses a tenth; those of 256 stay."""
    config_of("llama", **SIZES | {"vocab_size": 96, "tie_word_embeddings": True}).save_pretrained(tmp_path)
    rows = {row.options: row for row in nearplane.suggest(tmp_path, "1GB").rows}
    small, (mode,) = rows["--grid q2_k"], [mode for mode in MODES if mode.words == "--grid q2_k"]
    assert 0.1 < small.loss.mean / mode.loss.mean < 0.5
    assert "% of the weights are in rows that blocks of 256 do not divide: q4_0 instead of q2_k" in small.note
    assert rows["--bits 4"].note == ""
    assert rows["--grid q8_0"].note == ""


def test_a_cache_that_is_not_known_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of("llama")
    config.layer_types = ["linear_attention"] * 3
    config.save_pretrained(tmp_path)
    assert "keys and values of 64 tokens are not known and not counted" in printed(capsys, tmp_path, "--memory", "1GB")


def test_refusals_load_no_torch(tmp_path: Path) -> None:
    code = "import sys; from nearplane.cli.app import main; main()"
    check = f"{code.replace('main()', '')}\ntry: main()\nfinally: print('torch' in sys.modules)"
    for words in (("nowhere/at/all", "--memory", "8GB"), (tmp_path, "--memory", "8GB"), (tmp_path, "--memory", "x")):
        done = subprocess.run(
            [sys.executable, "-c", check, "suggest", *map(str, words)], capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (1, "False\n"), done.stderr

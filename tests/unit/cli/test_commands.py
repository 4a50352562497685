"""The command line: one clear sentence and exit code 1 for bad input, JSON for machines."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

import forgery
from nearplane.cli import app as cli
from nearplane.demo import CALIBRATION, HELD_OUT, MODEL
from nearplane.record.record_file import read_record
from nearplane.system.files import digest_of


def command(monkeypatch, capsys, *words):
    """Run the command line in this process: (exit code, what it printed, what it complained of)."""
    monkeypatch.setattr(sys, "argv", ["nearplane", *map(str, words)])
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    out, err = capsys.readouterr()
    return code, out, err


def test_quantize_evaluate_and_inspect_work_together(monkeypatch, capsys, tiny, tmp_path):
    model, _, text = tiny
    flags = ("--bits", 3, "--group-size", 32, "--samples", 4, "--seqlen", 40, "--calibration", text)
    code, out, _ = command(monkeypatch, capsys, "quantize", model, tmp_path / "out", *flags)
    assert code == 0
    assert "14 layers quantized" in out
    code, out, _ = command(monkeypatch, capsys, "evaluate", tmp_path / "out", "--text", HELD_OUT, "--samples", 4, "--seqlen", 40,
                           "--against", model, "--json")  # fmt: skip
    assert code == 0
    assert json.loads(out)["kl"] == json.loads(out)["statistics"]["kl"]["value"] > 0
    words = ("--samples", 4, "--seqlen", 40, "--against", model, "--plot", tmp_path / "kl.svg")
    code, out, _ = command(monkeypatch, capsys, "evaluate", tmp_path / "out", "--text", HELD_OUT, text, *words)
    assert code == 0
    assert (
        out.count("KL(original || model)") == out.count("protocol nearplane: 156 tokens scored in 4 windows of 40") == 2
    )
    assert "4-7: " in out
    assert (tmp_path / "kl.svg").read_text().count("</svg>") == 1
    for protocol, said in (("llama.cpp", "99.9% KLD  "), ("lm-eval", "word_perplexity  ")):
        words = ("--protocol", protocol, "--samples", 2, "--seqlen", 40)
        code, out, _ = command(
            monkeypatch, capsys, "evaluate", tmp_path / "out", "--text", text, "--against", model, *words
        )
        assert code == 0
        assert said in out
    code, out, _ = command(monkeypatch, capsys, "inspect", tmp_path / "out")
    assert code == 0
    assert "model.layers.1.mlp.down_proj" in out
    code, out, _ = command(monkeypatch, capsys, "inspect", tmp_path / "out", "--json")
    assert json.loads(out)["recipe"]["scheme"]["bits"] == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("quantize", "no/where/at/all", "{tmp}/out"), "does not exist"),
        (("quantize", MODEL, "{tmp}/out", "--calibration", "{tmp}/none.txt"), "none.txt"),
        (
            ("quantize", MODEL, "{tmp}/out", "--calibration", CALIBRATION, "--seqlen", "100000"),
            "maximum length of 1024 tokens",
        ),
        (("quantize", MODEL, "{tmp}/out", "--calibration", CALIBRATION, "--group-size", "100"), "the group size 100"),
        (("quantize", MODEL, "{tmp}/out", "--calibration", CALIBRATION, "--no-symmetric"), "gptq_v2"),
        (("quantize", MODEL, "{tmp}/out", "--calibration", CALIBRATION, "--bits", "9"), "2 to 8"),
        (("quantize", MODEL, "{tmp}", "--calibration", CALIBRATION), "not empty"),
        (
            ("quantize", MODEL, "{tmp}/out", "--calibration", CALIBRATION, "--ignore", "q_proj", "k_porj"),
            "Similar names: k_proj",
        ),
        (("evaluate", MODEL, "--text", "{tmp}/none.txt"), "none.txt"),
        (("evaluate", "{tmp}", "--text", HELD_OUT), "config.json"),
        (
            ("evaluate", MODEL),
            "evaluate needs --text with a text, --tasks with names of lm-eval's tasks, or --chat with",
        ),
        (("evaluate", MODEL, "--tasks", "a", "--samples", "2"), "--samples belongs to --text, which is not given"),
        (("evaluate", MODEL, "--text", HELD_OUT, "--limit", "2"), "--limit needs --tasks"),
        (("inspect", "{tmp}"), "nearplane.json"),
        (("verify", "{tmp}"), "nearplane.json"),
        (("quantize", MODEL, "{tmp}/out", "--calibration", CALIBRATION, "--max-loss", "0"), "between 0 and 1"),
        (("quantize", MODEL, "{tmp}/out", "--calibration", CALIBRATION, "--max-loss", "2"), "between 0 and 1"),
    ],
)
def test_bad_input_gets_one_clear_sentence(monkeypatch, capsys, tmp_path, words, said):
    (tmp_path / "something").write_text("here")
    code, out, err = command(monkeypatch, capsys, *(str(word).format(tmp=tmp_path) for word in words))
    assert code == 1
    assert out == ""
    assert said in " ".join(err.split())
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("quantize", "a", "b", "--bitz", "4"), "Unknown option: --bitz. Did you mean --bits?"),
        (("quantize", "a"), "quantize needs OUT. See nearplane quantize --help."),
        (("quantize", "a", "b", "c"), "quantize does not take c. See nearplane quantize --help."),
        (("compare", "a", "--bits", "4"), "compare needs --text with a value. See nearplane compare --help."),
    ],
)
def test_a_mistyped_command_line_ends_with_2_and_one_sentence(monkeypatch, capsys, words, said):
    assert command(monkeypatch, capsys, *words) == (2, "", f"nearplane: {said}\n")


@pytest.mark.parametrize(("flag", "bits"), [("3.5", 3.5), ("2.25", 2.25), ("4", 4), ("3.0", 3)])
def test_bits_of_the_command_line_are_those_that_were_typed(flag, bits):
    _, bound, _ = cli.app.parse_args(["quantize", "model", "out", "--bits", flag])
    found = bound.arguments["request"].asked().scheme.bits
    assert found == bits
    assert isinstance(found, int) == (bits == int(bits))


@pytest.mark.parametrize(
    "words",
    [("--ignore", "up_proj", "layers.0"), ("--ignore", "up_proj", "--ignore", "layers.0")],
    ids=["list", "twice"],
)
def test_several_patterns_may_be_ignored(words):
    _, bound, _ = cli.app.parse_args(["quantize", "model", "out", *words, "--bits", "3"])
    recipe = bound.arguments["request"].asked()
    assert recipe.ignore == ("up_proj", "layers.0")
    assert recipe.scheme.bits == 3


def test_the_shell_can_complete_commands_and_options(tmp_path):
    """As it is installed, in a home of its own."""
    words = [sys.executable, "-m", "nearplane", "--install-completion", "--shell", "bash"]
    subprocess.run(words, env=os.environ | {"HOME": str(tmp_path)}, check=True, capture_output=True)
    (script,) = (tmp_path / ".local").rglob("nearplane")
    completed = f"source {script}; COMP_WORDS=(nearplane q); COMP_CWORD=1; _nearplane; echo ${{COMPREPLY[@]}}"
    assert subprocess.run(["bash", "-c", completed], capture_output=True, text=True).stdout == "quantize\n"
    assert {"evaluate", "compare", "verify", "--group-size", "--ignore"} <= set(
        re.findall(r"[\w-]+", script.read_text())
    )


@pytest.mark.parametrize("verb", ["demo", "geometry"])
def test_a_folder_with_other_files_is_refused_and_stays_as_it_is(monkeypatch, capsys, tiny, tmp_path, verb):
    if verb == "geometry":
        pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("mine")
    for out, said in (
        (tiny[0], f"has files that nearplane {verb} did not write: config.json"),
        (tiny[1], f"has files that nearplane {verb} did not write: README.md, config.json"),
        (tmp_path / "file", "is not a folder that can be written"),
    ):
        names = sorted(path.name for path in out.parent.rglob("*"))
        code, printed, err = command(monkeypatch, capsys, verb, out)
        assert (code, printed) == (1, "")
        assert f"{out} {said}" in err
        assert sorted(path.name for path in out.parent.rglob("*")) == names


def test_verify_says_that_all_holds_in_one_line(monkeypatch, capsys, tiny):
    model, out, text = tiny
    code, printed, _ = command(monkeypatch, capsys, "verify", out)
    assert code == 0
    assert printed.endswith("layers checked: no faults; losses were not measured (this needs --against)\n")
    code, printed, _ = command(monkeypatch, capsys, "verify", out, "--against", model, "--calibration", text)
    assert code == 0
    assert printed.count("\n") == 1
    assert printed.endswith("14 layers checked: no faults; every loss was measured again\n")


def test_verify_prints_a_line_for_every_fault_and_ends_with_3(monkeypatch, capsys, tiny, tmp_path):
    model, out, _ = tiny
    shutil.copytree(out, tmp_path / "out")
    record = read_record(out)
    names = [layer.name for layer in record.layers[2:5]]
    for name in names:
        forgery.forge_layer(tmp_path / "out", name, "relative_loss", random.Random(0))
    (tmp_path / "out" / "extra.py").write_text("import os")
    code, printed, err = command(monkeypatch, capsys, "verify", tmp_path / "out")
    assert code == 3
    assert printed.splitlines()[0] == "extra.py: the record does not list this file"
    assert printed.splitlines()[-1].endswith(": 1 fault; losses were not measured (this needs --against)")
    assert len(printed.splitlines()) == 2
    code, printed, err = command(monkeypatch, capsys, "verify", tmp_path / "out", "--against", model)
    assert code == 3
    assert [line.partition(":")[0] for line in printed.splitlines()[:-1]] == ["extra.py", *names]
    assert printed.splitlines()[-1].endswith(": 4 faults; every loss was measured again")
    assert "Traceback" not in err
    code, printed, _ = command(monkeypatch, capsys, "verify", tmp_path / "out", "--json")
    assert code == 3
    assert json.loads(printed) == {
        "faults": [{"where": "extra.py", "what": "the record does not list this file"}],
        "asked": False,
        "measured": False,
    }


def test_verify_takes_a_tolerance(monkeypatch, capsys, tiny, tmp_path):
    model, out, _ = tiny
    shutil.copytree(out, tmp_path / "out")
    forgery.forge_layer(tmp_path / "out", read_record(out).layers[2].name, "relative_loss", random.Random(0))
    words = ("verify", tmp_path / "out", "--against", model)
    assert command(monkeypatch, capsys, *words)[0] == 3
    assert command(monkeypatch, capsys, *words, "--tolerance", 0.02)[0] == 0


def test_blocks_run_in_the_compute_dtype_and_verify_runs_them_in_it_again(monkeypatch, capsys, tiny, tmp_path):
    model, _, text = tiny
    words = ("quantize", model, tmp_path / "out", "--bits", 4, "--group-size", 32, "--calibration", text, "--samples", 4,
             "--seqlen", 40, "--device", "cpu", "--compute-dtype")  # fmt: skip
    code, _, err = command(monkeypatch, capsys, *words, "int8")
    assert code == 2
    assert "--compute-dtype" in err
    assert command(monkeypatch, capsys, *words, "bfloat16")[0] == 0
    assert read_record(tmp_path / "out").compute_dtype == "bfloat16"
    code, printed, _ = command(monkeypatch, capsys, "verify", tmp_path / "out", "--against", model)
    assert (code, printed.splitlines()[-1].partition("; ")[2]) == (0, "every loss was measured again")


def test_a_text_without_the_original_is_refused_in_one_sentence(monkeypatch, capsys, tiny):
    code, printed, err = command(monkeypatch, capsys, "verify", tiny[1], "--calibration", tiny[2])
    assert (code, printed) == (1, "")
    assert "--calibration needs --against" in err


def test_layers_that_lose_more_than_max_loss_are_named_and_the_command_ends_with_4(monkeypatch, capsys, tiny, tmp_path):
    """The checkpoint is written all the same."""
    model, out, text = tiny
    losses = sorted(layer.relative_loss for layer in read_record(out).layers)
    words = ("quantize", model, tmp_path / "out", "--bits", 3, "--group-size", 32, "--calibration", text, "--samples", 4,
             "--seqlen", 40)  # fmt: skip
    code, printed, _ = command(monkeypatch, capsys, *words, "--max-loss", (losses[-2] + losses[-1]) / 2)
    assert code == 4
    assert "with a relative loss above --max-loss" in printed
    assert read_record(tmp_path / "out").exceeding[0].name in printed
    assert command(monkeypatch, capsys, "verify", tmp_path / "out")[0] == 0
    assert command(monkeypatch, capsys, *words, "--overwrite", "--max-loss", 0.99)[0] == 0


def test_entropy_coded_layers_get_the_bits_that_max_loss_takes(monkeypatch, capsys, tiny, tmp_path):
    model, _, text = tiny
    words = ("quantize", model, tmp_path / "out", "--rate", 3, "--calibration", text, "--samples", 4, "--seqlen", 40)
    code, printed, _ = command(monkeypatch, capsys, *words, "--max-loss", 0.004)
    assert code == 0
    record = read_record(tmp_path / "out")
    assert max(layer.relative_loss for layer in record.layers) <= 0.004
    assert "needed more bits to keep --max-loss" in printed


ESCAPES = "\x1b[2J\x1b]0;owned\x07\u202e[red]x[/]\r\nall is well"


def test_names_in_files_cannot_steer_the_terminal(monkeypatch, capsys, tiny, tmp_path):
    """inspect printed the escapes of a record, and took its brackets for markup."""
    forgery_of = {"source": ESCAPES, "device": ESCAPES, "skipped": [[ESCAPES, ESCAPES]], "files": {ESCAPES: ESCAPES}}
    shutil.copytree(tiny[1], tmp_path / "out")
    path = tmp_path / "out" / "nearplane.json"
    data = json.loads(path.read_text())
    data |= forgery_of
    for layer in data["layers"]:
        layer |= {"name": f"{ESCAPES}{layer['name']}", "stored": ESCAPES}
    path.write_text(json.dumps(data).replace(data["digest"], digest_of(json.dumps(data))))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["format"] = ESCAPES
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    for words in (("inspect",), ("inspect", "--json"), ("verify",), ("report",), ("evaluate", "--text", HELD_OUT)):
        code, out, err = command(monkeypatch, capsys, words[0], tmp_path / "out", *words[1:])
        assert code == {"verify": 3, "evaluate": 1}.get(words[0], 0), err
        assert all(line.isprintable() for line in f"{out}{err}".split("\n")), words
        assert "all is well" not in f"{out}{err}".split("\n")
    page = (tmp_path / "out-report.html").read_text()
    assert "\x1b" not in page


REFUSED = {  # commands, with places of the fixture `refusals` in braces, and what they say
    "quantize nowhere out": "nowhere does not exist",
    "quantize {model} out --calibration nowhere.txt": "--calibration nowhere.txt does not exist",
    "quantize {model} out --processes 0": "--processes is 0; expected at least 1",
    "quantize {model} out --processes 100000": "each takes at least 240 MB, but only",
    "quantize {model} out --calibration /dev/zero": "/dev/zero is not a regular file, but a pipe, a device",
    "quantize {model} out --calibration {text}:2,nowhere.txt:1": "--calibration nowhere.txt does not exist",
    "quantize {model} out --calibration {text}:0,b.txt": "is '0'; expected a positive number",
    "quantize {model} out --calibration {text}:2": "gives a weight to a single text",
    "quantize {model} out --calibration {text},{text}:2": "twice. Name it once",
    "quantize {model} out --calibration pipe.txt": "pipe.txt is not a regular file, but a pipe",
    "quantize {model} full": "full exists and is not empty",
    "quantize {model} {model}/out": "overlaps with {model}",
    "quantize full out": "full/config.json cannot be read",
    "quantize {model} out --bits 99": "bits is 99.0; expected a number from 2 to 8",
    "quantize {model} out --bits 7 --format gptq": "all layers: gptq does not store int7-g128. Use --bits 2, 3, 4 or 8",
    "quantize {model} out --no-symmetric --format gptq": "gptq does not store int4-g128-asym",
    "quantize {model} out --no-symmetric --allocate slope": (
        "-asym from compressed-tensors (without --runtime, the rules of transformers hold). Use --symmetric"
    ),
    "quantize {model} out --grid nvfp4 --format gptq": "gptq does not store nvfp4. Use --bits 2, 3, 4 or 8",
    "quantize {model} out --bits 7 --format mlx": "mlx does not store int7-g128-min. Use --bits 2, 3, 4, 5",
    "quantize {model} out --group-size 16 --format mlx": "does not store int4-g16-min. Use --bits 2, 3,",
    "quantize {model} out --format awq": "awq does not store int4-g128. Use --no-sym",
    "quantize {model} out --grid q4_k --bits 3": "--grid q4_k determines how weights are stored; leave out one of them",
    "quantize {model} out --grid q4_k --rate 3": "but entropy-coded weights have no fixed grid",
    "quantize {model} out --grid fp8 --format gguf": "gguf does not store fp8. Use --bits 4, 5 or 8",
    "quantize {model} out --layer d=bits:7 --format gptq": "layers 'd': gptq does not store int7",
    "quantize {model} out --memory much": "memory is 'much'; expected",
    "quantize {model} out --layer d=bits:4,bits:5": "gives bits twice",
    "quantize {model} out --layer d=ignore:true": "ignore is True, which has the wrong type",
    "evaluate {model} --text nowhere": "--text nowhere does not exist. Pass a .txt or .jsonl file or a folder of them",
    "evaluate {model} --text wikitext3": "or a text by its name: wikitext2 or c4",
    "evaluate {model} --text {text} --samples 0": "samples is 0; expected a whole number, at least 1",
    "evaluate started --text {text}": "started is incomplete",
    "evaluate {model} --text {text} nowhere": "--text nowhere does not exist",
    "evaluate {model} --text {text} --protocol llama.cpp --seqlen 2": "--seqlen 2 is too short for --protocol llama.cpp",
    "evaluate {model} --text c4 --protocol llama.cpp": "--protocol llama.cpp needs running text, but c4 is read as crops",
    "evaluate {model} --text {text} --batch-size 2": "--batch-size needs --tasks with names of lm-eval's tasks",
    "evaluate {model} --text {text} --plot figure.svg": "--plot draws the KL to the original. Pass it with --against",
    "evaluate {model} --text {text} --against {model} --plot a.gif": "a.gif cannot be written as a figure; expected a name",
    "evaluate {model} --text {text} --device gpu": "device is 'gpu'; expected auto, cpu, cuda, or one of several GPUs",
    "quantize {model} new --device cuda:one": "device is 'cuda:one'; expected auto",
    "generate {model} hello --tokens 0": "tokens is 0 and temperature 0.0; expected at least 1 token",
    "generate {model} hello --seed -1": "seed is -1; expected a whole number from 0 to 18446744073709551615",
    "compare {model} --bits nan --text {text}": "bits[0] is nan; expected a finite number",
    "demo full": "full has files that nearplane demo did not write: file. Choose a new or empty folder",
    "tune {out} new --against nowhere": "nowhere does not exist",
    "tune full new --against {model}": "full has no nearplane.json",
    "tune {out} full --against {model}": "full exists and is not empty",
    "tune {out} {out}/new --against {model}": "overlaps with {out}",
    "tune {out} new --against {model} --steps 0": "steps is 0; expected a whole number, at least 1",
    "verify full": "full has no nearplane.json",
    "verify {out} --tolerance nan": "tolerance is nan; expected a number from 0 to 1",
    "export {out} full": "full exists and is not empty. Empty it or choose another folder",
    "export nowhere new": "nowhere does not exist",
    "generate full hello": "full/config.json cannot be read",
    "quantize {model} loop": "output: 'loop' is a link that leads back to itself",
    "export {out} loop": "output: 'loop' is a link that leads back to itself",
    "tune {out} loop --against {model}": "output: 'loop' is a link that leads back to itself",
    "inspect {long}": "has 300 letters and is too long for a path. Pass the path of a file or folder.",
    "verify {long}": "has 300 letters and is too long for a path. Pass",
    "export {long} new": "has 300 letters and is too long for a path. Pass",
    "export {out} {long}": "has 300 letters and is too long for a path. Pass",
    "tune {long} new --against {model}": "has 300 letters and is too long for a path. Pass",
    "tune {out} {long} --against {model}": "has 300 letters and is too long for a path. Pass",
    "quantize {model} {long}": "has 300 letters and is too long for a path. Pass",
    "report {long}": "has 300 letters and is too long for a path. Pass",
    "quantize {model} full --overwrite": "full exists and is not empty. It has neither",
    "quantize {model} new --group-size 48": "model.layers.0.mlp.down_proj has 64 inputs, not a multiple of the group size 48. Use "
    "--group-size 32, none, or a divisor of 32, or",
    "quantize {model} new --grid int4-g48": "model.layers.0.mlp.down_proj has 64 inputs, not a multiple of the group size 48",
    "quantize {model} full/file": "full/file is a file. Choose another folder",
    "export {out} full/file": "full/file is a file. Choose another folder",
}
ADAPTED = (  # commands that read a folder in which peft saved an adapter
    "quantize adapted new",
    "quantize {model} adapted --overwrite",
    "evaluate adapted --text {text}",
    "evaluate {model} --text {text} --against adapted",
    "compare adapted --bits 4 --text {text}",
    "generate adapted hello",
    "generate {model} hello --compare adapted",
    "suggest adapted --memory 1GB",
    "tune adapted new --against {model}",
    "tune {out} new --against adapted",
    "verify adapted",
    "verify {out} --against adapted",
    "export adapted new",
    "inspect adapted",
    "report adapted",
    "card adapted",
)
REFUSED |= dict.fromkeys(
    ADAPTED,
    "adapted holds adapter_config.json and adapter_model.safetensors: transformers would add an adapter to the weights where peft "
    "is installed, and other programs would not. Merge the adapter first, or remove these files.",
)
if find_spec("datasets") is None:
    REFUSED["quantize {model} new"] = (
        "Without --calibration the text is FineWeb-Edu from the Hugging Face hub, which needs the"
    )
OPENS = (  # commands with which nothing is wrong that can be known before torch is loaded
    "quantize {model} new --calibration {text}",
    "quantize {model} new --calibration {text} --group-size 48 --ignore down_proj",
    "evaluate {model} --text {text}",
    "tune {out} new --against {model}",
    "verify {out}",
    "export {out} new",
    "generate {model} hello",
    "compare {model} --bits 4 --text {text}",
    "compare {bell} --bits 4 --text {text}",
)
RUNS = """
import json, logging, sys
from nearplane.cli.app import app
from nearplane.errors import NearplaneError

class FirstLine(logging.Handler):
    def emit(self, record):
        raise NearplaneError(record.getMessage())

logging.getLogger("nearplane").addHandler(FirstLine())
logging.getLogger("nearplane").setLevel(logging.INFO)
for words in json.loads(sys.argv[1]):
    try:
        app(words)
    except NearplaneError as error:
        print(json.dumps([str(error), "torch" in sys.modules]))
"""


@pytest.fixture(scope="module")
def refusals(tiny, tmp_path_factory):
    """What every command of `REFUSED` and `OPENS` says first, and whether torch is loaded by then."""
    model, out, text = tiny
    place = tmp_path_factory.mktemp("refused")
    for name in ("full/file", "started/INCOMPLETE"):
        (place / name).parent.mkdir()
        (place / name).write_text("")
    shutil.copytree(out, place / "adapted")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (place / "adapted" / name).write_text("{}")
    os.mkfifo(place / "pipe.txt")
    (place / "loop").symlink_to("loop")
    (place / "\abell").symlink_to(model)
    places = {"model": model, "out": out, "text": text, "long": "a" * 300, "bell": "\abell"}
    commands = [[word.format(**places) for word in line.split()] for line in (*REFUSED, *OPENS)]
    run = [sys.executable, "-c", RUNS, json.dumps(commands)]
    lines = subprocess.run(run, capture_output=True, text=True, cwd=place, check=True).stdout.splitlines()
    return places, dict(zip((*REFUSED, *OPENS), map(json.loads, lines), strict=True))


@pytest.mark.parametrize("line", REFUSED)
def test_what_needs_no_model_is_refused_before_torch_is_loaded(refusals, line):
    """A folder that exists was refused after ten seconds; a pipe was read until it ended."""
    places, said = refusals
    message, loaded = said[line]
    assert REFUSED[line].format(**places) in message
    assert not loaded


@pytest.mark.parametrize("line", OPENS)
def test_the_first_line_comes_before_torch_is_loaded(refusals, line):
    """`evaluate` said nothing for 7 seconds, `tune` for 15."""
    message, loaded = refusals[1][line]
    assert message.startswith("opening ")
    assert message.isprintable()
    assert not loaded


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 KB, which holds no checkpoint."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs rights")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize(
    "words", ["quantize {model} {disk} --bits 8", "tune {out} {disk} --against {model}", "export {out} {disk}"]
)
def test_a_full_disk_is_found_before_any_work(monkeypatch, capsys, tiny, small_disk, words):
    """It was found when the last file was written."""
    model, out, text = tiny
    if words.startswith("quantize"):
        words += f" --calibration {text} --samples 4 --seqlen 40"
    words = words.format(model=model, out=out, disk=small_disk / "new").split()
    code, _, err = command(monkeypatch, capsys, *words)
    assert code == 1
    assert re.search(
        r"disk/new needs about [\d.]+ [KM]B of disk space, but only 65\.5 KB are free there\. Free some space", err
    )
    assert list(small_disk.iterdir()) == []

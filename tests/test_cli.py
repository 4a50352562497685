"""The command line: one clear sentence and exit code 1 for bad input, JSON for machines."""

import json
import subprocess
import sys

import pytest

from nearplane import cli
from nearplane.demo import CALIBRATION, HELD_OUT, MODEL


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


def test_quantize_evaluate_and_inspect_work_together(monkeypatch, capsys, tmp_path):
    flags = ("--bits", 3, "--group-size", 64, "--samples", 8, "--seqlen", 64, "--calibration", CALIBRATION)
    code, out, _ = command(monkeypatch, capsys, "quantize", MODEL, tmp_path / "out", *flags)
    assert code == 0
    assert "35 layers quantized" in out
    code, out, _ = command(monkeypatch, capsys, "evaluate", tmp_path / "out", "--text", HELD_OUT, "--samples", 4, "--seqlen", 64,
                           "--against", MODEL, "--json")  # fmt: skip
    assert code == 0
    assert json.loads(out)["kl"] > 0
    code, out, _ = command(monkeypatch, capsys, "inspect", tmp_path / "out")
    assert code == 0
    assert "model.layers.4.mlp.down_proj" in out
    code, out, _ = command(monkeypatch, capsys, "inspect", tmp_path / "out", "--json")
    assert json.loads(out)["recipe"]["rule"]["bits"] == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("quantize", "no/where/at/all", "{tmp}/out"), "does not exist"),
        (("quantize", MODEL, "{tmp}/out", "--calibration", "{tmp}/none.txt"), "none.txt"),
        (("quantize", MODEL, "{tmp}/out", "--calibration", CALIBRATION, "--seqlen", "100000"), "positions"),
        (("quantize", MODEL, "{tmp}/out", "--calibration", CALIBRATION, "--group-size", "100"), "--group-size 100"),
        (("quantize", MODEL, "{tmp}/out", "--calibration", CALIBRATION, "--no-symmetric"), "gptq_v2"),
        (("quantize", MODEL, "{tmp}/out", "--calibration", CALIBRATION, "--bits", "9"), "2 to 8"),
        (("quantize", MODEL, "{tmp}", "--calibration", CALIBRATION), "not empty"),
        (("evaluate", MODEL, "--text", "{tmp}/none.txt"), "none.txt"),
        (("evaluate", "{tmp}", "--text", HELD_OUT), "config.json"),
        (("inspect", "{tmp}"), "nearplane.json"),
    ],
)
def test_bad_input_gets_one_clear_sentence(monkeypatch, capsys, tmp_path, words, said):
    (tmp_path / "something").write_text("here")
    code, out, err = command(monkeypatch, capsys, *(str(word).format(tmp=tmp_path) for word in words))
    assert code == 1
    assert out == ""
    assert said in " ".join(err.split())
    assert "Traceback" not in err


def test_a_mistyped_flag_is_explained():
    result = subprocess.run(
        [sys.executable, "-m", "nearplane", "quantize", "a", "b", "--bitz", "4"], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "--bitz" in result.stdout + result.stderr


@pytest.mark.parametrize(("flag", "bits"), [("3.5", 3.5), ("2.25", 2.25), ("4", 4), ("3.0", 3)])
def test_bits_of_the_command_line_are_those_that_were_typed(flag, bits):
    _, bound, _ = cli.app.parse_args(["quantize", "model", "out", "--bits", flag])
    found = bound.arguments["rule"].bits
    assert found == bits
    assert isinstance(found, int) == (bits == int(bits))

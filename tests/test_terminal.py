"""The command line: what it says where there is a terminal and where there is none, and when it is stopped."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import pytest

import nearplane
from families import config_of, random_model
from nearplane import cli
from nearplane.demo import CALIBRATION, MODEL
from nearplane.record import read_record


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model of so many narrow blocks that there is time to stop its quantization."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    random_model(config_of("llama", vocab_size=2048, num_hidden_layers=12)).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((MODEL / name).read_bytes())
    return folder


def stop(model, out, number, *more):
    """Send a signal to the command once it has written its first shard; return what it said, lines of progress left out."""
    words = [
        sys.executable,
        "-m",
        "nearplane",
        "quantize",
        model,
        out,
        "--calibration",
        CALIBRATION,
        "--group-size",
        "16",
    ]
    words += ["--samples", "24", "--seqlen", "60", *more]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell starts its background jobs without
    )
    while not (out.with_name("out.unfinished") / "model-00001-of-00013.safetensors").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    printed, said = process.communicate()
    assert printed == ""
    return process.returncode, [line for line in said.splitlines() if not line.startswith("quantizing: ")]


def test_ctrl_c_ends_in_one_line_that_says_what_is_on_disk_and_how_to_go_on(model, tmp_path):
    out = tmp_path / "out"
    assert stop(model, out, signal.SIGINT) == (130, [
        f"nearplane: stopped by Ctrl-C. What is done lies in {out}.unfinished, which nothing loads. Run the same command again: it "
        f"begins anew."
    ])  # fmt: skip
    assert os.listdir(tmp_path) == ["out.unfinished"]
    with pytest.raises(nearplane.NearplaneError, match="incomplete"):
        nearplane.load(f"{out}.unfinished")


def test_sigterm_leaves_the_checkpoint_that_was_to_be_replaced_and_the_next_run_replaces_it(model, tmp_path):
    out, quick = tmp_path / "out", {"solver": "round-to-nearest", "group_size": 16}
    nearplane.quantize(model, out, bits=4, **quick)
    code, said = stop(model, out, signal.SIGTERM, "--overwrite")
    assert code == 143
    assert said == [
        f"nearplane: stopped by SIGTERM. What is done lies in {out}.unfinished, which nothing loads; {out} is as it was. Run the "
        f"same command again: it begins anew."
    ]
    assert nearplane.verify(out).faults == ()
    assert read_record(out).recipe.scheme.bits == 4
    nearplane.quantize(model, out, bits=3, overwrite=True, **quick)
    assert nearplane.verify(out).faults == ()
    assert read_record(out).recipe.scheme.bits == 3
    assert os.listdir(tmp_path) == ["out"]


def test_where_there_is_a_terminal_there_is_a_bar_and_no_lines(model, tmp_path, monkeypatch):
    pty = pytest.importorskip("pty")
    parent, child = pty.openpty()
    shown = []

    def read():
        with suppress(OSError):  # the other end is closed
            while part := os.read(parent, 1 << 16):
                shown.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    words = ["quantize", model, tmp_path / "out", "--solver", "round-to-nearest", "--group-size", "16"]
    monkeypatch.setattr(sys, "argv", ["nearplane", *map(str, words)])
    with os.fdopen(child, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with pytest.raises(SystemExit) as stop:
            cli.main()
    reader.join()
    os.close(parent)
    assert not stop.value.code
    assert b"84/84" in b"".join(shown)
    assert b"quantizing: " not in b"".join(shown)

"""The command line: what it says where there is a terminal and where there is none, and when it is stopped."""

import importlib
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

import nearplane
from children import Child, command
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane.cli import app as cli
from nearplane.cli.terminal import Terminated, attended, stopping
from nearplane.demo import CALIBRATION
from nearplane.planning.solve_stage import solve_layer
from nearplane.record.record_file import read_record


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model of so many narrow blocks that there is time to stop its quantization."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    random_model(config_of("llama", vocab_size=TEXT_VOCABULARY, num_hidden_layers=6)).float().save_pretrained(folder)
    add_tokenizer(folder)
    return folder


def stop(model, out, number, *more, send=Child.send):
    """Send a signal to the command once its first block is kept; return what it said, lines of progress left out."""
    words = ["quantize", model, out, "--calibration", CALIBRATION, "--group-size", "16", "--samples", "24"]
    verb = importlib.import_module("nearplane.planning.solve_stage")

    def slowly(*arguments, **keywords):
        time.sleep(0.1)  # so that the run cannot end before the signal
        return solve_layer(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:  # also in the child, which is forked
        patch.setattr("nearplane.formats.journal_pages.MAX_JOURNAL_SHARE", math.inf)
        patch.setattr(verb, "solve_layer", slowly)
        child = command(*words, "--seqlen", "60", *more)
    while not (out.with_name("out.unfinished") / "journal" / "state.json").exists():
        assert child.runs(), child.ended()
        time.sleep(0.01)
    send(child, number)
    code, printed, said = child.ended()
    assert printed == ""
    progress = ("opening ", "quantizing: ", "quantizing takes ", "the first block took")
    return code, [line for line in said.splitlines() if not line.startswith(progress)]


def test_ctrl_c_ends_in_one_line_that_says_what_is_on_disk_and_how_to_go_on(model, tmp_path):
    out = tmp_path / "out"
    code, said = stop(model, out, signal.SIGINT)
    assert code == 130
    start = f"nearplane: stopped by Ctrl-C. The unfinished checkpoint is in {out}.unfinished. Repeat the command"
    assert said in ([f"{start} to resume."], [f"{start}."])  # the latter if a library replaced the interruption
    assert os.listdir(tmp_path) == ["out.unfinished"]
    with pytest.raises(nearplane.NearplaneError, match="incomplete"):
        nearplane.load(f"{out}.unfinished")


def test_ctrl_c_pressed_six_times_says_the_same_once(model, tmp_path):
    """It printed a traceback after the sentence."""

    def several(child, number):
        for _ in range(6):
            child.send(number)
            time.sleep(0.02)

    out = tmp_path / "out"
    code, said = stop(model, out, signal.SIGINT, send=several)
    assert code == 130
    assert len(said) == 1
    assert said[0].startswith(f"nearplane: stopped by Ctrl-C. The unfinished checkpoint is in {out}.unfinished.")


def test_ctrl_c_while_the_command_line_is_imported_ends_in_one_line():
    """A traceback of imports was printed."""
    press = "import os, signal, sys; sys.addaudithook(lambda name, a: name == 'import' and a[0] == 'cyclopts' and "
    press += "os.kill(os.getpid(), signal.SIGINT)); signal.signal(signal.SIGINT, signal.default_int_handler); "
    run = [sys.executable, "-c", f"{press} from nearplane.__main__ import main; main()"]
    ended = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "nearplane: stopped by Ctrl-C. Repeat the command.\n")


def test_sigterm_leaves_the_checkpoint_that_was_to_be_replaced_and_the_next_run_replaces_it(model, tmp_path):
    out, quick = tmp_path / "out", {"solver": "round-to-nearest", "group_size": 16}
    nearplane.quantize(model, out, bits=4, **quick)
    code, said = stop(model, out, signal.SIGTERM, "--overwrite")
    assert code == 143
    left = f"The unfinished checkpoint is in {out}.unfinished; {out} is unchanged."
    start = f"nearplane: stopped by SIGTERM. {left} Repeat the command"
    assert said in ([f"{start} to resume."], [f"{start}."])
    assert nearplane.verify(out).faults == ()
    assert read_record(out).recipe.scheme.bits == 4
    nearplane.quantize(model, out, bits=3, overwrite=True, **quick)
    assert nearplane.verify(out).faults == ()
    assert read_record(out).recipe.scheme.bits == 3
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_stop_stays_one_where_a_library_puts_an_error_of_its_own_in_its_place(number, kind):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it

    def library():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            error = ValueError("could not determine the shape of object type 'torch.storage.UntypedStorage'")
            error.add_note("What is done lies in out.unfinished.")
            raise error from None

    with pytest.raises(KeyboardInterrupt) as stopped, stopping() as those, attended(those):
        library()
    assert stopped.type is kind
    assert stopped.value.__notes__ == ["What is done lies in out.unfinished. Repeat the command."]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(ValueError, match="else"), stopping() as those, attended(those):
        raise ValueError("else")
    signal.signal(signal.SIGINT, before)


def test_an_interruption_that_was_swallowed_is_raised_with_the_next_line_of_progress():
    """A run went to its end after Ctrl-C was pressed six times within a second."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    done = []

    def work():
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        logging.getLogger("nearplane.x").info("no progress")
        done.append(1)
        logging.getLogger("nearplane.system.progress").info("block 2")
        done.append(2)

    with pytest.raises(KeyboardInterrupt), stopping() as those, attended(those):
        work()
    assert done == [1]
    signal.signal(signal.SIGINT, before)


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
    assert b"block 6 of 6, " in b"".join(shown)
    assert b"quantizing: " not in b"".join(shown)


@pytest.mark.parametrize(
    ("width", "words"), [("1", ("inspect", "--help")), ("2", ("tune", "--help")), ("9" * 8, ("--help",))]
)
def test_help_ends_in_a_terminal_of_any_width(width, words, monkeypatch):
    """rich did not end with two columns, nor with a hundred million."""
    monkeypatch.setenv("COLUMNS", width)
    code, out, err = command(*words).ended()
    assert (code, err) == (0, "")
    assert "Usage" in out


def test_a_deleted_folder_is_refused(tmp_path, monkeypatch):
    place = tmp_path / "gone"
    place.mkdir()
    monkeypatch.chdir(place)
    place.rmdir()
    code, _, err = command("inspect", tmp_path).ended()
    assert (code, err) == (
        1,
        "nearplane: The current folder was deleted. Change to another folder, and repeat the command.\n",
    )


LIVE = """
import logging, sys, time
from nearplane.cli.terminal import attended
from nearplane.system.progress_bar import bar
from nearplane.system.progress import Tracked
log = logging.getLogger("nearplane.x")
with attended([]):
    for number in bar(Tracked(range(4), "quantizing", 4, blocks=[1] * 4), "quantizing", 4):
        time.sleep(0.3)
        log.warning("layer %d is odd: %s", number, " ".join(["word"] * 30))
"""


def test_log_lines_stand_above_the_bar_and_break_between_words():
    """They were glued onto it, and cut within words."""
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    environment = os.environ | {"TERM": "xterm"}
    environment.pop("COLUMNS", None)
    child = subprocess.Popen([sys.executable, "-c", LIVE], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    with suppress(OSError):  # the other side is closed
        while part := os.read(ours, 4096):
            seen += part
    os.close(ours)
    assert child.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())
    shown = [line.rstrip() for line in re.split(r"[\r\n]+", text)]
    for number in range(4):
        place = next(place for place, line in enumerate(shown) if line.startswith(f"layer {number} is odd: word"))
        assert set(" ".join(shown[place : place + 3]).split(": ")[1].split()) == {"word"}
        assert max(map(len, shown[place : place + 3])) <= 80
    bars = [line for line in shown if line.startswith("quantizing ")]
    assert all(
        re.fullmatch(r"quantizing \S+( \S+)? block \d of 4, [\d.]+ s(, about [\d.]+ s left|, finishing)?", line)
        for line in bars
    ), bars
    assert any("block 3 of 4" in line and "about" in line for line in bars)

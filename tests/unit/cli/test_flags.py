"""The flags of `nearplane quantize`: which there are, in which groups, and what those that left are answered."""

import re
import subprocess
import sys

import pytest
from cyclopts import CycloptsError

from nearplane.cli import app as cli

SHOWN = (  # groups in the order of the help, and their flags
    (
        "Everyday",
        ("bits", "group-size", "symmetric", "grid", "embeddings", "format", "runtime", "activations", "kv-cache"),
    ),
    ("Entropy-coded, instead of --bits", ("size", "rate")),
    (
        "A mix of formats for a size, instead of --bits",
        ("mix", "bits-per-weight", "served-memory", "context", "weigh", "cost"),
    ),
    ("GGUF, for llama.cpp", ("pre", "like")),
    ("Calibration text", ("calibration", "samples", "seqlen", "first-token", "rare-experts")),
    ("Layer by layer", ("include-head", "include-embeddings", "allocate", "layer", "ignore", "max-loss")),
    (
        "Solver: the defaults gave the best results",
        ("solver", "beam", "polish", "rounds", "order", "damp", "correct", "tune"),
    ),
    (
        "Running",
        (
            *("device", "compute-dtype", "overwrite", "memory", "device-memory", "plan-file", "trust-remote-code"),
            *("processes", "dry-run", "json"),
        ),
    ),
)


def bound(*words):
    """Return what the command line passes to `quantize`."""
    return cli.app.parse_args(["quantize", "model", "out", *words])[1].arguments


def test_help_shows_at_most_48_flags_in_groups():
    words = [sys.executable, "-m", "nearplane", "quantize", "--help"]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    parts = re.split(r"╭─ (.*?) ─+╮", text)
    found = {
        name: tuple(re.findall(r"^│ --([a-z-]+)", body, re.MULTILINE))
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }
    found.pop("Parameters")
    assert tuple(found.items()) == SHOWN
    assert sum(len(flags) for flags in found.values()) <= 48


@pytest.mark.parametrize(
    "words",
    [
        ("quantize", "model", "out", "--samples", "1.5"),
        ("quantize", "model", "out", "--group-size", "32.5"),
        ("quantize", "model", "out", "--samples", "4", "--samples", "8"),
        ("quantize", "model", ""),
        ("evaluate", "model", "--text", "a.txt", "--samples", "1.5"),
        ("evaluate", "model", "--text", ""),
        ("tune", "out", "new", "--against", "model", "--steps", "2.5"),
        ("generate", "model", "hello", "--seed", "0.5"),
    ],
    ids=" ".join,
)
def test_numbers_are_not_rounded_and_nothing_is_no_folder(words):
    """`--samples 1.5` became 2, `--text ""` the current folder."""
    with pytest.raises(CycloptsError, match=r"is not a whole number|multiple times|the path is empty"):
        cli.app.parse_args(words, exit_on_error=False, print_error=False)


def test_a_whole_number_may_have_a_point():
    assert bound("--samples", "8.0")["request"].samples == 8
